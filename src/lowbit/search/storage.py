"""Where an index keeps its vectors: parts of some thousands, of which the last one grows.

What a part holds is never changed, only added to, behind what whoever reads it knows of. So readers
need no lock, and a vector is added in the time that its own bytes take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit import isa as instruction_sets
from lowbit.jit import threads as thread_runtime
from lowbit.jit.workspace import aligned_empty
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, blocks, padded_k
from lowbit.kernels.cpu.shared.pack import take_columns
from lowbit.registry.locks import cached_property
from lowbit.search.groups import Chunk, Floats, Ids
from lowbit.weights.panels import STORED, PackedMatrix, packed_panels

_WORTH_THREADS = 1 << 12  # columns


class Coded(NamedTuple):
    """Vectors as they are stored: integers int8 [n, dim], a scale each, and a bias each, which is
    added to products: −|v − centre|²/2 for l2, else v · centre − |centre|². ids: if they have
    their own. coarse: the scales that integers were rounded with."""

    codes: npt.NDArray[np.int8]
    scale: Floats
    bias: Floats
    ids: Ids | None = None
    coarse: Floats | None = None

    @classmethod
    def joined(cls, parts: Sequence[Coded]) -> Coded:
        """The vectors of parts, at least one, that have the same arrays."""
        columns = zip(*parts, strict=True)
        arrays = (None if part[0] is None else np.concatenate(part) for part in columns)
        return cls(*arrays)  # type: ignore[arg-type]

    def cut(self, first: int, last: int) -> Coded:
        parts = (None if array is None else array[first:last] for array in self)
        return Coded(*parts)  # type: ignore[arg-type]


class Arrays(NamedTuple):
    """Memory of a part, for whole panels: see `PackedMatrix`."""

    panels: npt.NDArray[np.uint8]
    column_sums: npt.NDArray[np.int32]
    scale: Floats
    bias: Floats | None
    ids: Ids | None

    @property
    def capacity(self) -> int:
        return len(self.panels) * PANEL

    def copy(self) -> Arrays:
        """The same in memory of its own."""
        copies = (None if array is None else array.copy() for array in self)
        return Arrays(*copies)  # type: ignore[arg-type]

    def first(self, panels: int) -> Arrays:
        """Views of so many panels."""
        rest = (None if part is None else part[: panels * PANEL] for part in self[1:])
        return Arrays(self.panels[:panels], *rest)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Part:
    """`count` vectors of `dim` numbers. `grows`: more may be written behind them."""

    dim: int
    dtype: str
    count: int
    memory: Arrays
    grows: bool = True

    @cached_property
    def arrays(self) -> Arrays:
        """Of the panels that hold these vectors."""
        return self.memory.first(blocks(self.count, PANEL))

    @cached_property
    def chunk(self) -> Chunk:
        """What is searched."""
        panels, sums, scale, bias, _ = self.arrays
        return Chunk(PackedMatrix(panels, sums, self.dim, self.count, self.dtype, scale), bias)

    @property
    def ids(self) -> Ids | None:
        own = self.memory.ids
        return None if own is None else own[: self.count]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.memory if array is not None)

    @classmethod
    def empty(cls, dim: int, dtype: str, capacity: int, biased: bool, named: bool) -> Part:
        """A part with room for so many; vectors that are not there yet are zeros."""
        panels = blocks(capacity, PANEL)
        lines = padded_k(dim) // (4 if STORED[dtype] == "s8" else 8)
        held = aligned_empty((panels, lines, LINE), np.uint8, lasting=True)
        columns = panels * PANEL
        bias = np.zeros(columns, np.float32) if biased else None
        ids = np.zeros(columns, np.int64) if named else None
        sums, scale = np.zeros(columns, np.int32), np.zeros(columns, np.float32)
        return cls(dim, dtype, 0, Arrays(held, sums, scale, bias, ids))

    def with_room(self, more: int, most: int) -> Part:
        """This part, or a copy with room for `more` vectors, and for as many as there are, but no
        more than `most` in all."""
        wanted = self.count + more
        if self.grows and wanted <= self.memory.capacity:
            return self
        room = max(wanted, min(most, 2 * self.count))
        biased, named = self.memory.bias is not None, self.memory.ids is not None
        made = Part.empty(self.dim, self.dtype, room, biased, named)
        for new, old in zip(made.memory, self.arrays, strict=True):
            if new is not None and old is not None:
                new[: len(old)] = old
        return replace(made, count=self.count)

    def appended(self, more: Coded) -> Part:
        """With vectors behind these, for which there is room."""
        memory, first, last = self.memory, self.count, self.count + len(more.codes)
        panel, skipped = divmod(first, PANEL)
        rows = blocks(skipped + len(more.codes), PANEL) * PANEL
        codes = np.zeros((rows, self.dim), np.int8)
        codes[skipped : skipped + len(more.codes)] = more.codes
        panels, sums = packed_panels(codes.T, self.dtype, lasting=False)
        # Somebody may be reading the columns before these.
        own = skipped * (LINE // PANEL)
        memory.panels[panel, :, own:] = panels[0, :, own:]
        memory.panels[panel + 1 : panel + len(panels)] = panels[1:]
        memory.column_sums[first:last] = sums[skipped : skipped + len(more.codes)]
        memory.scale[first:last] = more.scale
        for place, given in ((memory.bias, more.bias), (memory.ids, more.ids)):
            if place is not None and given is not None:
                place[first:last] = given
        return Part(self.dim, self.dtype, last, memory)

    def named(self, ids: Ids) -> Part:
        """With ids of their own."""
        own = np.zeros(self.memory.capacity, np.int64)
        own[: self.count] = ids
        return replace(self, memory=self.memory._replace(ids=own))


def taken(parts: Sequence[Part], positions: Ids, named: bool) -> Part:
    """The vectors at these positions, ascending, counted through all of the parts; at least one.
    `named`: with their ids, if they have their own."""
    model = parts[0]
    biased, named = model.memory.bias is not None, named and model.memory.ids is not None
    made = Part.empty(model.dim, model.dtype, len(positions), biased, named)
    new = made.memory
    new.panels[-1] = 0
    program = take_columns.program(instruction_sets.active(None), biased=biased)
    threads = thread_runtime.max_threads() if len(positions) > _WORTH_THREADS else 1
    starts = [0, *accumulate(part.count for part in parts)]
    ends = np.searchsorted(positions, starts).tolist()
    for part, start, first, last in zip(parts, starts, ends, ends[1:], strict=False):
        if first == last:
            continue
        some, old = positions[first:last], part.memory
        program(threads, old.panels, new.panels.shape[1], old.column_sums, old.scale, old.bias,
                some, start, new.panels, new.column_sums, new.scale, new.bias, first,
                last - first)  # fmt: skip
        if new.ids is not None and old.ids is not None:
            new.ids[first:last] = old.ids[some - start]
    return replace(made, count=len(positions))
