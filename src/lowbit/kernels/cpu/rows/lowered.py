"""Strips of images of few channels: lowered along one axis.

Where channels are no whole lines of 64 bytes, a window is many short pieces, and neighbours one
above the other have most of them in common. What a window holds of one line of the image, `slot`
bytes, is written once, below that of the line before.

    column 0         column 1           A window is contiguous, as long as its kernel is high, and
    | line 0 slot |  | line 0 slot |    the windows of an output line lie one column apart.
    | line 1 slot |  | line 1 slot |
    | ...         |  | ...         |

Source: Cho and Brand, "MEC: Memory-efficient Convolution for Deep Neural Network", 2017.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.rows.input_format import LeftOperand
from lowbit.kernels.cpu.rows.strips import Strip, Strips, seen
from lowbit.kernels.cpu.shared.layout import LINE


class LoweredImage(NamedTuple):
    """The geometry of one image, all int32.

    lines, length: of the output, pixels of a line. height, width: lines of the image, and bytes of
    one. above, left: lines and bytes added before them. skip: lines from one output line to the
    next; step: bytes from one window to the next. reach: lines of a kernel; slot: bytes of one.
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
        columns = (self.length + step_rows) * self.pitch(lines)
        return columns + seen(self, lines) * padded_line(self)

    @property
    def of_line(self) -> int:
        return self.width

    @property
    def pixels(self) -> int:
        return self.lines * self.length

    def table(self) -> tuple[int, ...]:
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
