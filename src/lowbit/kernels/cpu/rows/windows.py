"""Rows that are windows of images, of which those of an item are made together, as a strip.

Windows that are neighbours have most of their bytes in common. A strip holds what the windows of
some lines of the output have, each byte once or a few times: see `Lowered` and shifted.py. In it
the windows of an output line lie a fixed distance apart, so that micro-kernels multiply them where
they are, and no step has parts of two images.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from lowbit.isa.generic import maximum, minimum, select
from lowbit.isa.types import s64, u8
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.rows.input_format import (
    ImageRows,
    LeftOperand,
    Lines,
    Row,
    RowFacts,
)
from lowbit.kernels.cpu.shared.layout import LINE


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


# Strips of images of few channels: lowered along one axis.
#
# Where channels are no whole lines of 64 bytes, a window is many short pieces, and neighbours one
# above the other have most of them in common. What a window holds of one line of the image, `slot`
# bytes, is written once, below that of the line before.
#
#     column 0         column 1           A window is contiguous, as long as its kernel is high, and
#     | line 0 slot |  | line 0 slot |    the windows of an output line lie one column apart.
#     | line 1 slot |  | line 1 slot |
#     | ...         |  | ...         |
#
# Source: Cho and Brand, "MEC: Memory-efficient Convolution for Deep Neural Network", 2017.


class LoweredImage(NamedTuple):
    """The geometry of one image, all int32.

    lines, length: of the output, pixels of a line. height, width: lines of the image, and bytes of
    one. above, left: lines and bytes added before them. skip: lines from one output line to the
    next; step: bytes from one window to the next. reach: lines of a kernel; slot: bytes of one.

    Not told to kernels, but as of a `ShiftedImage`: aligned: whether rows begin at multiples of 64
    bytes, and 64 k are a line of cache. gap: of so many rows, so many are rows of the output; (0,
    0): all are; it keys the code.
    """

    lines: int
    length: int
    height: int
    width: int
    above: int
    left: int
    skip: int
    step: int
    reach: int
    slot: int

    aligned = False
    gap = 0, 0

    def pitch(self, lines: int) -> int:
        """Bytes from column to column. They key the code, so there are few; and they are an odd
        number of lines of cache, lest columns fall into the same sets."""
        size = seen(self, lines) * self.slot
        # What is read or written behind a slot fits.
        return max(1 << size.bit_length(), 2 * LINE) + LINE

    def strip(self, lines: int, step_rows: int) -> int:
        """Bytes of a strip of so many output lines, in steps of so many rows."""
        columns = (self.length + step_rows) * self.pitch(lines)
        return columns + seen(self, lines) * padded_line(self)

    @property
    def of_line(self) -> int:
        """Bytes of a line of the image where it comes from."""
        return self.width

    @property
    def pixels(self) -> int:
        """Of an image of the output."""
        return self.lines * self.length

    def table(self) -> tuple[int, ...]:
        """What the kernel is given."""
        return tuple(self)


def padded_line(facts: LoweredImage) -> int:
    """Bytes of one line of an image with what is added, and of what is read behind it. Also of
    facts that are values."""
    return (facts.length * facts.step + facts.slot + (3 * LINE - 1)) // LINE * LINE


@dataclass(frozen=True)
class Lowered(Strips):
    """`piece`: bytes that are copied at once, 16, 32 or 64; `several`: a slot has more."""

    piece: int = LINE
    several: bool = True

    def facts(self, operand: LeftOperand) -> LoweredImage:
        numbers = (self.number(operand, i) for i in range(len(LoweredImage._fields)))
        return LoweredImage(*numbers)  # type: ignore[arg-type]

    def make(
        self, k: Builder, operand: LeftOperand, image: Value, lines: tuple[Value, Value],
        memory: Value, pitch: int, step_rows: Value,
    ) -> Strip:  # fmt: skip
        facts: LoweredImage = self.facts(operand)
        size = k.index(padded_line(facts))
        padded = memory + (facts.length + step_rows) * pitch
        self._pad(k, operand, facts, image, lines, padded)
        count = seen(facts, lines[1] - lines[0])
        # Columns are written one after another: stores all over the strip would be many pages.
        for x in k.range(0, facts.length):
            for y in k.range(0, count):
                source = padded + (y * size + x * facts.step)
                target = memory + (x * pitch + y * facts.slot)
                parts = k.range(0, facts.slot, self.piece) if self.several else (k.index(0),)
                for part in parts:  # the next ones overwrite what is too much
                    (target + part).store((source + part).load(self.piece))
        line_bytes = k.index(facts.skip * facts.slot)
        return Strip(facts, memory, pitch, line_bytes, lines[0], image, lambda block: block * LINE)

    def _pad(
        self, k: Builder, operand: LeftOperand, facts: LoweredImage, image: Value,
        lines: tuple[Value, Value], target: Value,
    ) -> None:  # fmt: skip
        """Copy the lines that are seen, with what lies outside; nothing behind the end is read."""
        size, zero = k.index(padded_line(facts)), self.nothing(k, operand).splat(LINE)
        for y, of_image, inside in self.seen(k, facts, lines):
            line = target + y * size
            for at in k.range(0, size, LINE):
                (line + at).store(zero)
            for _ in k.when(inside):
                source = operand.a + (image * operand.row_stride + of_image * facts.width)
                self._copy(k, source, line + facts.left, k.index(facts.width))

    def _copy(self, k: Builder, source: Value, target: Value, size: Value) -> None:
        """Lines, of which the last overlaps the one before, or bytes where there is none."""
        last = size - LINE
        for at in k.range(0, last, LINE):
            (target + at).store((source + at).load(LINE) ^ self.flip)
        for _ in k.when(last > -1):
            (target + last).store((source + last).load(LINE) ^ self.flip)
        for _ in k.when(last < 0):
            for at in k.range(0, size):
                (target + at).store((source + at).load() ^ self.flip)


# Rows that are windows of images: what a convolution multiplies, gathered through a table.
#
# Images are bytes, channels last. A row is one pixel of the output; its K bytes are the channels at
# each tap of the kernel, one behind the other. The kernel knows no geometry: a table of int32 says
# where taps lie (see `WindowTable`), in bytes from the beginning of an image. Pixels whose taps all
# lie inside share one list of places, counted from their first tap; each other pixel has a list of
# its own, in which −1 stands for a tap outside, which is filled with the zero point.


class Header(NamedTuple):
    """What a table of windows begins with; all are int32.

    - pixels: rows of one image. taps: places in a list of a pixel of its own, of `channels` bytes.
    - end: bytes that may be read from the beginning of an image.
    - pieces: loads of 64 bytes that make a row of a pixel inside, with `positions`, where in a row
      they go. offsets, positions, entries: where in the table these begin.

    An entry of a pixel inside is the place of its first tap, to which offsets are added; any other
    is −i, and its list begins at table[i]. With `Windows.whole` taps are lines of 64 bytes, as many
    as pieces, and go where they come from, so that there are no positions.
    """

    pixels: int
    taps: int
    channels: int
    end: int
    pieces: int
    offsets: int
    positions: int
    entries: int


class Window(NamedTuple):
    """One row: its image, its entry (at least 0: `base`), and the list that this means."""

    image: Value
    entry: Value
    base: Value
    places: Value


@dataclass(frozen=True)
class Windows(ImageRows):
    """`room`: bytes of memory in which a row is gathered, K and 64 at least; 0 where channels come
    in multiples of 64 and lines of taps are lines of rows. A pixel inside is read by loads of 64
    bytes that may go over a tap's end, but never over the end of its image.
    """

    room: int = 0

    @property
    def by_lines(self) -> bool:
        return not self.room

    def fact(self, operand: LeftOperand, name: str) -> Value:
        """A number of the table's header."""
        return self.number(operand, Header._fields.index(name))

    def find(self, k: Builder, operand: LeftOperand, number: Value) -> Window:
        """Look a row up."""
        table, row = operand.windows, operand.first_row + number
        pixels = self.fact(operand, "pixels")
        which, pixel = k.register(k.index(0)), k.register(row)
        for _ in k.when(row > pixels - 1):  # a division takes as long as packing two lines
            which.value, pixel.value = row // pixels, row % pixels
        image = operand.a + which.value * operand.row_stride
        entry = (table + (self.fact(operand, "entries") + pixel.value)).load().to(s64)
        own, shared = table + (0 - entry), table + self.fact(operand, "offsets")
        base = maximum(entry, k.index(0))
        return Window(image, entry, base, select(entry < 0, own, shared))

    def outside(self, k: Builder, operand: LeftOperand, size: int = LINE) -> Value:
        """So many bytes of what is outside, as it would lie in an image."""
        memory = k.local(u8, size)
        memory.store(self.stored(self.nothing(k, operand)).splat(size))
        return memory

    def stored(self, values: Value) -> Value:
        """Bytes of an image as they are multiplied, and back."""
        return values ^ self.flip

    def lines(self, k: Builder, operand: LeftOperand, number: Value) -> Lines:
        window, outside = self.find(k, operand, number), self.outside(k, operand)
        first = window.image + window.base

        def line(which: Value, left: Value | None) -> Value:
            place = (window.places + which).load().to(s64)
            return self.stored(select(place < 0, outside, first + place).load(LINE))

        return line

    def pack(self, k: Builder, row: Row, facts: RowFacts) -> None:
        assert facts.sum is None, "right operands of convolutions are symmetric"
        if not self.room:
            line = self.lines(k, row.operand, row.number)
            for which in k.range(0, row.length // LINE):
                (row.lines + which * row.line_stride).store(line(which, None))
            return
        buffer = k.local(u8, self.room)
        window = self.find(k, row.operand, row.number)
        for _ in k.when(window.entry > -1):
            self._gather_inside(k, row.operand, window, buffer)
        for _ in k.when(window.entry < 0):
            self._gather_taps(k, row.operand, window, buffer)
        for which in k.range(0, (row.length + (LINE - 1)) // LINE):
            line = self.stored((buffer + which * LINE).load(LINE))
            (row.lines + which * row.line_stride).store(line)

    def _gather_inside(
        self, k: Builder, operand: LeftOperand, window: Window, buffer: Value
    ) -> None:
        """By whole loads, each of which overwrites what the one before read too much."""
        positions = operand.windows + self.fact(operand, "positions")
        first = window.image + window.entry
        for piece in k.range(0, self.fact(operand, "pieces")):
            source = first + (window.places + piece).load().to(s64)
            (buffer + (positions + piece).load().to(s64)).store(source.load(LINE))

    def _gather_taps(self, k: Builder, operand: LeftOperand, window: Window, buffer: Value) -> None:
        """Tap by tap, and byte by byte at the end of the image."""
        outside = self.outside(k, operand)
        channels, end = self.fact(operand, "channels"), self.fact(operand, "end")
        for tap in k.range(0, self.fact(operand, "taps")):
            place = (window.places + tap).load().to(s64)
            for part in k.range(0, channels, LINE):
                target, first = buffer + (tap * channels + part), place + part
                near = (place > -1) & (end - LINE < first)
                elsewhere = near | (place < 0)
                target.store(select(elsewhere, outside, window.image + first).load(LINE))
                for _ in k.when(near):
                    for i in k.range(0, minimum(channels - part, k.index(LINE))):
                        (target + i).store((window.image + (first + i)).load())
