"""Running the PTX of a kernel without a GPU, a block of threads after the other, every access
recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowbit.lab.compare.ptx.block import Block
from lowbit.lab.compare.ptx.memory import Memory
from lowbit.lab.compare.ptx.parse import Ptx
from lowbit.registry.locks import cached_property

Array = NDArray[Any]
Dims = tuple[int, int, int]


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
    grid: Dims
    block: Dims
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
        self, blocks: Iterable[Dims] | None = None, trace: Trace | None = None, most: int = 0
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


def blocks_of(values: Sequence[int]) -> Dims:
    """One to three sizes as three."""
    x, y, z = [*values, 1, 1][:3]
    return int(x), int(y), int(z)
