"""Rows that are windows of images: what a convolution multiplies, gathered through a table.

Images are bytes, channels last. A row is one pixel of the output; its K bytes are the channels at
each tap of the kernel, one behind the other. The kernel knows no geometry: a table of int32 says
where taps lie (see `WindowTable`), in bytes from the beginning of an image. Pixels whose taps all
lie inside share one list of places, counted from their first tap; each other pixel has a list of
its own, in which −1 stands for a tap outside, which is filled with the zero point.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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
