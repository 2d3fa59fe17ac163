"""Strips of images whose channels are whole lines of 64 bytes: pixels, to which windows refer.

The bytes of 64 channels of a pixel are a line, and lines of neighbours on a line of the image are
neighbours in the strip. So under each tap of a kernel the windows of an output line have lines one
behind the other: one tap is multiplied after another, all from the same strip, shifted.

    tap 0:  | 0 | 1 | 2 | 3 | 4 | ...        A window of 3 x 3 pixels is packed nowhere, and what
    tap 1:      | 1 | 2 | 3 | 4 | 5 | ...    it shares with others is copied once, not nine times.
    tap 2:          | 2 | 3 | 4 | 5 | 6 | ...

With a stride of s, pixels lie in s phases, those of each one behind the other.

Of short lines without strides, all lines of an image follow each other, and so do all windows of
the output: one long line. Between lines lie the pixels added at one end, which are those at the
other end of the next line too. Windows that begin there are multiplied and not stored.

    | + 0 1 2 3 | + 4 5 6 7 | + 8 ...        four pixels a line, one added before and behind
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lowbit.isa.generic import maximum, minimum
from lowbit.isa.types import s64
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.rows.input_format import LeftOperand
from lowbit.kernels.cpu.rows.windows import LoweredImage, Strip, Strips, seen
from lowbit.kernels.cpu.shared.layout import LINE


class ShiftedImage(NamedTuple):
    """The geometry of one image; numbers are int32.

    lines, length: of the output, pixels of a line. height, width: of the image, in pixels; pixel:
    its bytes. above, left: lines and pixels added before. skip, step: lines and pixels from one
    window to the next. reach: lines that a kernel covers. parts: lines of 64 channels that are
    multiplied. wide: pixels in a phase of a line of the strip. line_bytes, part_bytes: in it, from
    a line of the image to the next, and from 64 channels of a line to the next 64. pixels: of the
    output. taps: where each tap is, its line and its pixel. gap: as of a `LoweredImage`.
    """

    lines: int
    length: int
    height: int
    width: int
    pixel: int
    above: int
    left: int
    skip: int
    step: int
    reach: int
    parts: int
    wide: int
    line_bytes: int
    part_bytes: int
    pixels: int
    taps: tuple[tuple[int, int], ...]
    gap: tuple[int, int] = (0, 0)

    aligned = True

    def flat(self) -> ShiftedImage | None:
        """The same with all windows in one line; None: they do not lie alike."""
        if self.skip > 1 or self.step > 1:
            return None
        # What is added behind a line's pixels is what is added before the next line's.
        wide = max(self.length, self.left + self.width, self.wide - self.left)
        reach = self.lines + self.reach  # with a line behind, whose first pixels are seen
        return self._replace(
            lines=1, length=self.lines * wide, reach=reach, wide=wide, line_bytes=wide * LINE,
            part_bytes=reach * wide * LINE, gap=(wide, self.length),
        )  # fmt: skip

    def pitch(self, lines: int) -> int:
        return LINE

    def strip(self, lines: int, step_rows: int) -> int:
        if self.gap[0]:
            return self.parts * self.part_bytes + step_rows * LINE
        return seen(self, lines) * self.line_bytes + step_rows * LINE

    @property
    def of_line(self) -> int:
        return self.width * self.pixel

    def table(self) -> tuple[int, ...]:
        """The numbers, and how far each 64 k lie behind the first."""
        phase = self.wide * LINE
        taps = (
            y * self.line_bytes + x % self.step * phase + x // self.step * LINE
            for y, x in self.taps
        )
        distances = (tap + which * self.part_bytes for tap in taps for which in range(self.parts))
        return (*self[:_TAPS], *distances)  # type: ignore[return-value]


Image = LoweredImage | ShiftedImage
_TAPS = ShiftedImage._fields.index("taps")


@dataclass(frozen=True)
class Shifted(Strips):
    """Channels last, 64 or a multiple."""

    def facts(self, operand: LeftOperand) -> ShiftedImage:
        numbers = (self.number(operand, i) for i in range(_TAPS))
        return ShiftedImage(*numbers, taps=())  # type: ignore[arg-type]

    def make(
        self, k: Builder, operand: LeftOperand, image: Value, lines: tuple[Value, Value],
        memory: Value, pitch: int, step_rows: Value,
    ) -> Strip:  # fmt: skip
        facts: ShiftedImage = self.facts(operand)
        line_bytes = k.index(facts.line_bytes)
        source = operand.a + image * operand.row_stride
        for y, of_image, inside in self.seen(k, facts, lines):
            line = source + of_image * facts.of_line
            for phase in k.range(0, facts.step):
                target = memory + (y * line_bytes + phase * (facts.wide * LINE))
                self._phase(k, operand, facts, inside, line, phase, target)

        def at(block: Value) -> Value:
            return (operand.windows + (block + _TAPS)).load().to(s64)

        return Strip(facts, memory, pitch, facts.skip * line_bytes, lines[0], image, at)

    def _phase(
        self, k: Builder, operand: LeftOperand, facts: ShiftedImage, inside: Value, line: Value,
        phase: Value, target: Value,
    ) -> None:  # fmt: skip
        """Every so many pixels of a line, and nothing where there are none."""
        wide, none = k.index(facts.wide), k.index(0)
        before = (facts.left - phase + (facts.step - 1)) // facts.step
        end = (facts.left + facts.width - phase + (facts.step - 1)) // facts.step
        for _ in k.when(inside.equals(0)):
            self._fill(k, operand, facts, none, wide, target)
        for _ in k.when(inside):
            before, end = minimum(before, wide), maximum(minimum(end, wide), none)
            self._fill(k, operand, facts, none, before, target)
            self._fill(k, operand, facts, end, wide, target)
            for part in k.range(0, facts.parts):
                begin, place = line + part * LINE, target + part * facts.part_bytes
                for x in k.range(before, end):
                    pixel = x * facts.step + phase - facts.left
                    value = (begin + pixel * facts.pixel).load(LINE) ^ self.flip
                    (place + x * LINE).store(value)

    def _fill(
        self, k: Builder, operand: LeftOperand, facts: ShiftedImage, first: Value, last: Value,
        target: Value,
    ) -> None:  # fmt: skip
        nothing = self.nothing(k, operand).splat(LINE)
        for part in k.range(0, facts.parts):
            for x in k.range(first, last):
                (target + (part * facts.part_bytes + x * LINE)).store(nothing)
