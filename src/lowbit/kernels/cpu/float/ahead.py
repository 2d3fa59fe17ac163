"""What is fetched while something else is multiplied, so that memory and arithmetic overlap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lowbit.isa.generic import prefetch
from lowbit.isa.value import Value
from lowbit.kernels.cpu.float.micro_kernel import PackedRight, PlainRight
from lowbit.kernels.cpu.float.pack import Source
from lowbit.kernels.cpu.shared.layout import LINE


class Ahead(Protocol):
    """Something that is fetched bit by bit."""

    def fetch(self, unit: Value) -> None:
        """The bit that belongs to this unit of the step."""
        ...


@dataclass(frozen=True)
class Beside:
    """What follows along the rows of a right operand that is read where it is."""

    right: PlainRight
    vectors: int
    elements: int

    def fetch(self, unit: Value) -> None:
        right = self.right
        at = right.base + (unit * right.reader.depth * right.stride + self.elements)
        for which in range(self.vectors):
            prefetch(at + which * right.lanes)


@dataclass(frozen=True)
class Along:
    """What follows in a packed panel, so many units on."""

    right: PackedRight
    vectors: int
    units: int

    def fetch(self, unit: Value) -> None:
        right = self.right
        at = right.base + (unit + self.units) * right.width
        for which in range(self.vectors):
            prefetch(at + which * right.lanes)


class NextPanel:
    """The panel that will be packed next, where it lies, over the same block of K.

    Of the lines of each unit one step fetches one, so a few blocks of rows fetch all of it.
    """

    def __init__(self, source: Source, x: Value, width: int, unit: Value, block: Value) -> None:
        reader, self._source = source.reader, source
        unit_bytes = reader.bytes * reader.depth
        self._lines = max(1, width * unit_bytes // LINE)
        which = block % self._lines
        self._units = LINE // unit_bytes  # in a line, where K is contiguous
        first = unit * reader.depth * source.stride
        if source.along == "k":
            self._start = source.base + ((x + which) * source.x_stride + first)
            return
        each = max(1, width * reader.bytes // LINE)
        along = which % each * (LINE // reader.bytes)
        self._start = source.base + (x + along + first + which // each * source.stride)

    def fetch(self, unit: Value) -> None:
        source, depth = self._source, self._source.reader.depth
        if source.along == "x":
            prefetch(self._start + unit * depth * source.stride)
            return
        in_line = unit & (self._units - 1)
        column = in_line * self._lines * source.x_stride
        prefetch(self._start + (column + (unit - in_line) * depth))
