"""Rows that are windows of images, of which those of an item are made together, as a strip.

Windows that are neighbours have most of their bytes in common. A strip holds what the windows of
some lines of the output have, each byte once or a few times: see lowered.py and shifted.py. In it
the windows of an output line lie a fixed distance apart, so that micro-kernels multiply them where
they are, and no step has parts of two images.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from lowbit.isa.generic import minimum
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.rows.input_format import ImageRows, LeftOperand, Row, RowFacts


class Image(Protocol):
    """The geometry of an image as kernels are told it: a tuple of int32, `lines` lines of the
    output of `length` pixels first."""

    @property
    def lines(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def reach(self) -> int: ...
    @property
    def skip(self) -> int: ...
    @property
    def pixels(self) -> int:
        """Of an image of the output."""
        ...

    @property
    def of_line(self) -> int:
        """Bytes of a line of the image where it comes from."""
        ...

    @property
    def aligned(self) -> bool:
        """Whether rows begin at multiples of 64 bytes, and 64 k are a line of cache."""
        ...

    @property
    def gap(self) -> tuple[int, int]:
        """Of so many rows, so many are rows of the output; (0, 0): all are. It keys the code."""
        ...

    def pitch(self, lines: int) -> int:
        """Bytes from row to row, in strips of so many output lines. It keys the code."""
        ...

    def strip(self, lines: int, step_rows: int) -> int:
        """Bytes of a strip of so many output lines, in steps of so many rows."""
        ...

    def table(self) -> tuple[int, ...]:
        """What the kernel is given."""
        ...


def seen(image: Any, lines: Any) -> Any:
    """Lines of an image that so many of the output see; numbers or values."""
    return (lines - 1) * image.skip + image.reach


@dataclass(frozen=True)
class Strip:
    """Some output lines of one image, from `first` on. facts: `lines`, `length` of the image.

    line_bytes: from the rows of an output line to those of the next, at `place`. at: how far a
    block of 64 k lies behind the first.
    """

    facts: Any
    place: Value
    pitch: int
    line_bytes: Value
    first: Value
    image: Value
    at: Callable[[Value], Value]

    def step(self, number: Value, rows: Value, lines: int) -> tuple[Value, Value, Value]:
        """Where the windows of a step of the image begin; the row of the output that it begins
        with, and the one behind the last. rows: of a step, within a line, or `lines` whole ones."""
        length = self.facts.length
        of_image = self.image * self.facts.lines
        if lines > 1:
            line = number * lines
            place = self.place + (line - self.first) * self.line_bytes
            return place, (of_image + line) * length, (of_image + self.facts.lines) * length
        each = (length + rows - 1) // rows
        line, pixel = number // each, number % each * rows
        place = self.place + (pixel * self.pitch + (line - self.first) * self.line_bytes)
        row = (of_image + line) * length
        return place, row + pixel, row + minimum(pixel + rows, length)


class Strips(ImageRows):
    """Rows that are made by items."""

    def pack(self, k: Builder, row: Row, facts: RowFacts) -> None:
        raise NotImplementedError("rows are made by items")

    @staticmethod
    def seen(k: Builder, facts: Any, lines: tuple[Value, Value]) -> Iterator[tuple[Value, ...]]:
        """Emit what follows for each line that the output's `lines` see: its number among these,
        and in the image, and whether it is one of the image's."""
        for y in k.range(0, seen(facts, lines[1] - lines[0])):
            line = lines[0] * facts.skip + y - facts.above
            yield y, line, (line > -1) & (line < facts.height)

    @abstractmethod
    def facts(self, operand: LeftOperand) -> Any:
        """The geometry of an image."""

    def source(
        self, operand: LeftOperand, image: Value, lines: tuple[Value, Value]
    ) -> tuple[Value, Value]:
        """About where what some lines of the output see begins in memory, and its bytes."""
        facts = self.facts(operand)
        line = facts.skip * facts.of_line
        first = operand.a + (image * operand.row_stride + lines[0] * line)
        return first, (lines[1] - lines[0]) * line

    @abstractmethod
    def make(
        self, k: Builder, operand: LeftOperand, image: Value, lines: tuple[Value, Value],
        memory: Value, pitch: int, step_rows: Value,
    ) -> Strip:  # fmt: skip
        """Emit the making of output lines from the first to before the last, in `memory`."""
