"""Running the PTX of a kernel without a GPU, a block of threads after the other, every access
recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowbit.registry.locks import cached_property
from lowbit_lab.compare.code import Code
from lowbit_lab.compare.ptx.block import WARP, Block
from lowbit_lab.compare.ptx.memory import REGION_BITS, Memory
from lowbit_lab.compare.ptx.parse import Ptx
from lowbit_lab.run.trace import Grid

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Access:
    """One execution of a load or store: which instruction, the addresses and which threads."""

    index: int
    addresses: Array
    active: Array


@dataclass
class Trace:
    """What is recorded while a kernel runs: its accesses, at most so many of each instruction,
    and how often each instruction was executed by a block; whether all came to their end."""

    most: int = 64
    accesses: dict[int, list[Access]] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    ended: bool = False

    def note(self, index: int, addresses: Array, active: Array) -> None:
        kept = self.accesses.setdefault(index, [])
        if len(kept) < self.most:
            kept.append(Access(index, addresses.copy(), active.copy()))


@dataclass(frozen=True, eq=False)
class Launch:
    """A kernel with its arguments: bytes by parameter."""

    ptx: Ptx
    memory: Memory
    parameters: Mapping[str, bytes]
    grid: Grid
    block: Grid
    dynamic_shared: int = 0

    @cached_property
    def symbols(self) -> dict[str, tuple[str, int]]:
        """The offset of each variable of shared and local memory."""
        ends, found = {"shared": 0, "local": 0}, dict[str, tuple[str, int]]()
        # What the launch sizes comes last.
        for name, (space, align, size) in sorted(
            self.ptx.memory.items(), key=lambda m: not m[1][2]
        ):
            start = -(-ends[space] // align) * align
            found[name] = space, start
            ends[space] = start + size
        return found

    @cached_property
    def addresses(self) -> dict[str, int]:
        """Where the variables of the module lie."""
        return {
            name: self.memory.place(name, np.frombuffer(held, np.uint8).copy())
            for name, held in self.ptx.constants.items()
        }

    def bytes_of(self, space: str) -> int:
        """How much a block has of shared, a thread of local memory."""
        sizes = self.ptx.memory
        used = [start + sizes[n][2] for n, (s, start) in self.symbols.items() if s == space]
        return max(used, default=0) + (self.dynamic_shared if space == "shared" else 0)

    def run(
        self, blocks: Iterable[Grid] | None = None, trace: Trace | None = None, most: int = 0
    ) -> bool:
        """Run these blocks, all by default; each at most so many instructions if that is given.
        Returns whether they came to their end.

        NotInterpretedError for an instruction that is not known, OutsideError for an access
        outside of the arrays; both name the instruction's line.
        """
        x, y, z = self.grid
        every = ((i, j, k) for k in range(z) for j in range(y) for i in range(x))
        ended = True
        with np.errstate(all="ignore"):
            for index in every if blocks is None else blocks:
                ended &= Block(self, index, trace).run(most)
        if trace is not None:
            trace.ended = ended
        return ended


# What the accesses of a run cost: sectors of global memory, banks of shared memory; and how often
# a loop's body repeats itself.

SECTOR = 32
"""Bytes that global memory moves at least."""

_BANKS, _BANK_BYTES = 32, 4


@dataclass(frozen=True)
class AccessCost:
    """A load or store of one line, per warp on average over those that were seen.

    sectors: of 32 bytes that it moves; least: as many as its threads' bytes would fill side by
    side, fewer where threads share an address. conflict: how often the busiest bank of shared
    memory is asked, 1 if there is no conflict. stride: bytes from a thread to the next, None if
    that differs.
    """

    line: int | None
    space: str
    stores: bool
    nbytes: int
    in_loop: bool
    sectors: float = 0.0
    least: float = 0.0
    conflict: float = 1.0
    stride: int | None = None
    atomic: bool = False

    @property
    def waste(self) -> float:
        """Sectors moved by the least that would do."""
        return self.sectors / self.least if self.least else 1.0


def costs(code: Code, trace: Trace) -> tuple[AccessCost, ...]:
    """The cost of each line's accesses, the worst of each line, space and direction."""
    found: dict[tuple[int | None, str, bool], AccessCost] = {}
    for index, seen in sorted(trace.accesses.items()):
        one = code.instructions[index]
        if one.space == "local" or not one.nbytes:
            continue
        made = _cost(index, seen, code)
        key = one.line, made.space, one.stores
        old = found.get(key)
        if old is None or (made.waste, made.conflict) > (old.waste, old.conflict):
            found[key] = made
    return tuple(found.values())


def _cost(index: int, seen: Sequence[Access], code: Code) -> AccessCost:
    one = code.instructions[index]
    known = {
        "line": one.line,
        "stores": one.stores,
        "nbytes": one.nbytes,
        "in_loop": index in code.in_loops,
    }
    warps = [warp for each in seen for warp in _warps(each)]
    if not warps:
        return AccessCost(space=one.space or "global", **known)
    space = "global" if one.opcode.startswith("cp") else one.space
    if not space:
        space = "shared" if int(warps[0][0]) >> REGION_BITS >= 1 << 20 else "global"
    atomic = one.opcode.startswith(("atom", "red"))
    stride = _stride(warps)
    if space == "shared":
        conflict = float(np.mean([_conflict(warp, one.nbytes) for warp in warps]))
        return AccessCost(space=space, conflict=conflict, stride=stride, atomic=atomic, **known)
    sectors = [_sectors(warp, one.nbytes) for warp in warps]
    least = [-(-len(np.unique(warp)) * one.nbytes // SECTOR) for warp in warps]
    return AccessCost(
        space=space,
        sectors=float(np.mean(sectors)),
        least=float(np.mean(least)),
        stride=stride,
        atomic=atomic,
        **known,
    )


def _warps(access: Access) -> list[Array]:
    """The addresses of the active threads of each warp that takes part."""
    parts = range(0, len(access.addresses), WARP)
    found = [access.addresses[i : i + WARP][access.active[i : i + WARP]] for i in parts]
    return [one for one in found if len(one)]


def _sectors(addresses: Array, nbytes: int) -> int:
    size = np.uint64(SECTOR)
    ends = [addresses // size, (addresses + np.uint64(nbytes - 1)) // size]
    return len(np.unique(np.concatenate(ends)))


def _conflict(addresses: Array, nbytes: int) -> int:
    """The most different words that one bank is asked for at a time: 8 bytes a thread are served
    half a warp at a time, 16 bytes a quarter."""
    together = WARP * _BANK_BYTES // max(nbytes, _BANK_BYTES)
    worst = 1
    for start in range(0, len(addresses), together):
        part = addresses[start : start + together]
        spans = [part + np.uint64(i) for i in range(0, max(nbytes, 1), _BANK_BYTES)]
        words = np.unique(np.concatenate(spans) // np.uint64(_BANK_BYTES))
        worst = max(worst, int(np.bincount((words % np.uint64(_BANKS)).astype(int)).max()))
    return worst


def _stride(warps: Sequence[Array]) -> int | None:
    steps = {int(s) for warp in warps[:8] for s in np.unique(np.diff(warp.astype(np.int64)))}
    return steps.pop() if len(steps) == 1 else None


def repeats(code: Code, loop: range, trace: Trace) -> int:
    """How many iterations of the source a pass through a loop makes: what its compiler unrolled.

    Loads that come from one place of the source lie at equal steps that add up to the step of the
    whole pass. So their addresses, modulo that step, are the same set when all are moved by an n-th
    of it; the largest such n of every line, and of the lines what divides all of them.
    """
    lines: dict[tuple[int | None, str, int, int], list[int]] = {}
    for index in loop:
        one, seen = code.instructions[index], trace.accesses.get(index, [])
        if not one.loads or len(seen) < 2:
            continue
        first, second = (int(each.addresses[np.argmax(each.active)]) for each in seen[:2])
        step = second - first
        if step:
            lines.setdefault((one.line, one.space, one.nbytes, step), []).append(first)
    counts = [_repeats(bases, abs(step)) for (*_, step), bases in lines.items()]
    return gcd(*counts) if counts else 1


def _repeats(bases: Sequence[int], step: int) -> int:
    there = sorted(base % step for base in bases)
    for count in range(len(bases), 1, -1):
        if len(bases) % count == 0 and step % count == 0:
            moved = sorted((base + step // count) % step for base in bases)
            if moved == there:
                return count
    return 1


def moved(code: Code, loop: range, trace: Trace) -> float | None:
    """Bytes of whole sectors that a warp moves from and to global memory in one pass through a
    loop; None if none was seen."""
    found = [
        _cost(i, trace.accesses[i], code)
        for i in loop
        if i in trace.accesses and code.instructions[i].nbytes
    ]
    return SECTOR * sum(one.sectors for one in found) if found else None
