"""Rows that are windows of images, of which those of an item are made together, as a strip.

Windows that are neighbours have most of their bytes in common. A strip holds what the windows of
some lines of the output have, each byte once or a few times: see lowered.py and shifted.py. In it
the windows of an output line lie a fixed distance apart, so that micro-kernels multiply them where
they are, and no step has parts of two images.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lowbit.isa.generic import minimum
from lowbit.isa.types import Scalar, s64, u8
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.rows.input_format import InputFormat, LeftOperand, Row, RowFacts
from lowbit.kernels.cpu.shared.layout import FLIP


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
    def of_line(self) -> int:
        """Bytes of a line of the image where it comes from."""
        ...

    @property
    def aligned(self) -> bool:
        """Whether rows begin at multiples of 64 bytes, and 64 k are a line of cache."""
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


@dataclass(frozen=True)
class Strips(InputFormat):
    """uint8, or int8 if `signed`, with one scale and zero point (if `shifted`) for all rows."""

    signed: bool = False
    shifted: bool = False

    made = False
    copied = True
    windows = True
    strips = True

    @property
    def element(self) -> Scalar:
        return u8

    @property
    def zero_points(self) -> bool:
        return self.shifted or self.signed

    @property
    def uniform(self) -> bool:
        return True

    @property
    def flips(self) -> int:
        """What makes bytes of images unsigned."""
        return FLIP if self.signed else 0

    def pack(self, k: Builder, row: Row, facts: RowFacts) -> None:
        raise NotImplementedError("rows are made by items")

    def fact(self, operand: LeftOperand, number: int) -> Value:
        """A number of the table."""
        return (operand.windows + number).load().to(s64)

    def nothing(self, k: Builder, operand: LeftOperand) -> Value:
        """What lies outside of an image, as it is multiplied."""
        return operand.zero.load().to(u8) if self.zero_points else k.constant(0, u8)

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
