"""How many warps a multiprocessor of a GPU holds at a time, by what a block takes of it."""

from __future__ import annotations

from dataclasses import dataclass

_WARP = 32
_REGISTERS = 65536
_REGISTER_UNIT = 256  # registers are given to warps in these
_WARP_UNIT = 4  # and warps to the four parts of a multiprocessor
_SHARED_UNIT = 128


@dataclass(frozen=True)
class _Limits:
    """Of a multiprocessor: warps, blocks, and bytes of shared memory of which each block takes
    1024 more than it asks for."""

    warps: int
    blocks: int
    shared: int
    reserved: int = 1024


# From the table of compute capabilities in NVIDIA's CUDA programming guide.
_LIMITS = {
    70: _Limits(64, 32, 96 << 10, 0),
    75: _Limits(32, 16, 64 << 10, 0),
    80: _Limits(64, 32, 164 << 10),
    86: _Limits(48, 16, 100 << 10),
    87: _Limits(48, 16, 164 << 10),
    89: _Limits(48, 24, 100 << 10),
    90: _Limits(64, 32, 228 << 10),
    100: _Limits(64, 32, 228 << 10),
    120: _Limits(48, 24, 100 << 10),
}


@dataclass(frozen=True)
class Occupancy:
    """Warps that a multiprocessor holds of as many as it could, and what sets the limit."""

    warps: int
    most: int
    limit: str

    @property
    def share(self) -> float:
        """Of the most."""
        return self.warps / self.most


def occupancy(sm: int, threads: int, registers: int, shared: int) -> Occupancy | None:
    """Of blocks of so many threads, with registers of a thread and bytes of shared memory of a
    block; None for a compute capability that is not known."""
    limits = _LIMITS.get(sm)
    if limits is None or threads < 1:
        return None
    warps = -(-threads // _WARP)
    of_warp = -(-max(registers, 1) * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    held = _REGISTERS // of_warp // _WARP_UNIT * _WARP_UNIT
    taken = -(-(shared + limits.reserved) // _SHARED_UNIT) * _SHARED_UNIT
    blocks = {
        "threads": limits.warps // warps,
        "blocks": limits.blocks,
        "registers": held // warps,
        "shared memory": limits.shared // taken if taken else limits.blocks,
    }
    limit = min(blocks, key=lambda name: blocks[name])
    return Occupancy(blocks[limit] * warps, limits.warps, limit)
