"""Depthwise convolution: each channel with a kernel of its own, in vectors over the channels.

A window has some rows of the image, and some pixels of each. Four rows of a channel make a dword,
so that what multiplies bytes elsewhere serves here too. For a line of the output, all pixels that
its windows see are brought into this form, once for all windows that share them:

    rows 0..3 of a pixel of 64 channels, four loads  →  unpacked twice: four registers of 16
    channels each, in each of which a dword holds four rows of one channel  →  scratch memory

Then a window is, for each of its columns and each four rows, four products of such registers.
Unpacking works in lanes of 16 bytes, so register q has channels 4q to 4q + 3 of each lane. Weights
lie in that order. Bytes of an output are brought into the channels' own order when they are packed,
all others before they are finished.

Weights: blocks of 64 outputs; in a block, for each column of the window and each four rows, 256
bytes: [q][lane][4 outputs][4 rows], zeros where there is no row or output.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from lowbit.isa.avx2 import vpdpbusd_256, vpmaddwd
from lowbit.isa.avx512 import vpdpbusd, vpmaddwd_512
from lowbit.isa.generic import madd16, maximum, minimum, select, shuffle
from lowbit.isa.types import (
    F32Pointer,
    Int,
    S32Pointer,
    U8Pointer,
    Vector,
    element_of,
    s8,
    s16,
    s32,
    s64,
    u8,
    u16,
    u32,
)
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.rows.input_format import ImageRows, LeftOperand
from lowbit.kernels.cpu.shared.epilogue import Epilogue, columns, interleaved, packable
from lowbit.kernels.cpu.shared.layout import LINE, QUAD, blocks
from lowbit.kernels.cpu.shared.post_op import Operands

_LANE = 16  # bytes in which unpacking works
_SCRATCH = 16 << 10  # bytes that pixels brought together should take: half of a nearest cache
QUAD_BYTES = QUAD * LINE  # of weights: four rows of 64 outputs
_MOST_TAPS = 1024  # whose pixels fit on the stack of a thread


def is_depthwise(channels: int, groups: int, kernel: tuple[int, ...]) -> bool:
    """Whether this kernel serves a convolution: each channel is a group, of not too many taps."""
    return channels == groups > 1 and math.prod(kernel) <= _MOST_TAPS


class Header(NamedTuple):
    """What a table of lines begins with; all are int32.

    - lines, length: of one image of the output. end: bytes that may be read of an image.
    - columns, rows: where in the table these begin.

    rows: for each output line, where each row of its windows begins in the image. columns: of the
    pixels that windows see (`Window.place`), how far they lie behind that. −1: outside.
    """

    lines: int
    length: int
    end: int
    columns: int
    rows: int


class Window(NamedTuple):
    """What keys the code: rows and columns of a window, how far windows and columns are apart."""

    rows: int
    columns: int
    step: int = 1
    apart: int = 1

    @property
    def fours(self) -> int:
        """Of rows."""
        return blocks(self.rows, QUAD)

    def shares(self) -> bool:
        """Whether neighbours have so many pixels in common that all of a line are kept once."""
        return 3 * self.step + self.apart * (self.columns - 1) < QUAD * self.columns

    def seen(self, pixels: int) -> int:
        """Pixels of the image that so many windows see."""
        if self.shares():
            return self.step * (pixels - 1) + self.apart * (self.columns - 1) + 1
        return pixels * self.columns

    def place(self, pixel: Any, column: Any) -> Any:
        """Which of these pixels is under a column of a window; numbers or arrays."""
        if self.shares():
            return self.step * pixel + self.apart * column
        return pixel * self.columns + column

    def together(self, width: int, block: int) -> int:
        """Windows, a multiple of `block`, whose pixels are brought together."""
        room = _SCRATCH // (self.fours * QUAD * width)
        count = block
        while self.seen(count + block) <= room:
            count += block
        return count


@kernel
def depthwise(
    k: Builder,
    x: U8Pointer,
    image_stride: Int,
    windows: S32Pointer,
    weights: U8Pointer,
    row_scale: F32Pointer,
    row_zero: S32Pointer,
    column_sum: S32Pointer,
    column_scale: F32Pointer,
    bias: F32Pointer,
    residual: F32Pointer,
    parameters: F32Pointer,
    out: U8Pointer,
    m: Int,
    n: Int,
    multiplier: Int,
    item_lines: Int,
    *,
    format: ImageRows,
    window: Window,
    epilogue: Epilogue,
    repeated: bool = False,
) -> None:
    """out[m, n] = epilogue(Σ over taps of x · weight): m lines of all images, n outputs, of which
    `multiplier` neighbours belong to a channel (`repeated`: more than one).

    windows: a table of lines (`Header`). residual and out: pixels n apart; other operands as those
    of `product`, one scale and zero point for all, with entries for whole blocks of 64 columns.
    """
    operand = LeftOperand(x, image_stride, k.index(1), k.index(0), row_zero, windows, k.index(0))
    operands = Operands(row_zero, row_zero, row_scale, column_sum, column_sum, column_scale, bias,
                        residual, n, parameters, out, n, n)  # fmt: skip
    lines = _Lines(k, format, window, operand, weights, n, multiplier, repeated)
    width = k.isa.vector_bytes
    for item in k.parallel((m + item_lines - 1) // item_lines):
        last = minimum(item * item_lines + item_lines, m)
        for column in k.range(0, n, width):
            with k.scope():
                store = _storing(k, epilogue, operands, column, width)
                for line in k.range(item * item_lines, last):
                    lines.run(line, column, store)


# (row of the output, sums in the order of registers) -> None
_Store = Callable[[Value, list[Value]], None]


def _storing(k: Builder, epilogue: Epilogue, at: Operands, column: Value, width: int) -> _Store:
    """How the sums of so many outputs are finished and stored."""
    lanes = width // QUAD
    if packable(epilogue):
        return interleaved(k, epilogue, at, column, lanes)
    parts = [column + i for i in range(0, width, lanes)]
    stores = [columns(k, epilogue, at, part, lanes) for part in parts]

    def store(row: Value, sums: list[Value]) -> None:
        for part, one, values in zip(parts, stores, _in_order(sums), strict=True):
            for _ in k.when(part < at.columns):
                one(row, values)

    return store


class _Lines:
    """Output lines of some outputs, as many as a register has bytes."""

    def __init__(
        self, k: Builder, format: ImageRows, window: Window, operand: LeftOperand, weights: Value,
        outputs: Value, multiplier: Value, repeated: bool,
    ) -> None:  # fmt: skip
        self._k, self._format, self._window = k, format, window
        self._operand, self._weights = operand, weights
        self._outputs, self._multiplier, self._repeated = outputs, multiplier, repeated
        self._width = width = k.isa.vector_bytes
        self._block = 4 if k.isa.vector_registers > 16 else 2
        self._together = window.together(width, self._block)
        self._each = window.fours * QUAD * width  # bytes of a pixel brought together
        self._scratch = k.local(u8, window.seen(self._together) * self._each)
        self._copies = k.local(u8, width)
        self._outside = k.local(u8, width)
        self._outside.store(format.nothing(k, operand).splat(width) ^ format.flip)
        self._lines, self._length, self._end, columns, rows = (
            format.number(operand, place) for place in range(len(Header._fields))
        )
        self._columns, self._rows = operand.windows + columns, operand.windows + rows

    def run(self, line: Value, column: Value, store: _Store) -> None:
        """One line, by its number in all images."""
        k, window = self._k, self._window
        image = self._operand.a + line // self._lines * self._operand.row_stride
        within = line % self._lines * window.rows
        rows = [(self._rows + (within + i)).load().to(s64) for i in range(window.rows)]
        for first in k.range(0, self._length, self._together):
            count = minimum(self._length - first, k.index(self._together))
            whole = (count + (self._block - 1)) // self._block * self._block
            self._bring(image, rows, column, window.place(1, 0) * first, whole)
            weights = self._weights + column // LINE * (window.columns * window.fours * QUAD_BYTES)
            for pixel in k.range(0, whole, self._block):
                with k.scope():
                    made = self._products(pixel, weights + column % LINE)
                for i, sums in enumerate(made):
                    for _ in k.when(pixel + i < count):
                        store(line * self._length + (first + pixel + i), sums)

    def _bring(
        self, image: Value, rows: list[Value], column: Value, first: Value, pixels: Value
    ) -> None:
        """Bring together what so many windows see, from a place on."""
        k, width, step = self._k, self._width, self._window.place(1, 0)
        greatest = rows[0]
        for row in rows[1:]:
            greatest = maximum(greatest, row)
        room = self._end - (width + greatest + column)
        # Of a row outside all pixels are one.
        starts = [select(row < 0, self._outside, image + (row + column)) for row in rows]
        masks = [(row >> 63) ^ -1 for row in rows]
        outside = self._outside.load(width) ^ self._format.flip
        for number in k.range(0, pixels * step + (self._window.seen(1) - step)):
            place = (self._columns + (first + number)).load().to(s64)
            target = self._scratch + number * self._each
            for _ in k.when(place < 0):
                for part in range(self._window.fours * QUAD):
                    (target + part * width).store(outside)
            safe = (place > -1) & (place < room + 1)
            if not self._repeated:
                for _ in k.when(safe):
                    both = zip(starts, masks, strict=True)
                    self._unpack([(start + (place & m)).load(width) for start, m in both], target)
            for _ in k.when(place > -1 if self._repeated else place > maximum(room, k.index(-1))):
                self._unpack([self._load(image, row, place, column) for row in rows], target)

    def _load(self, image: Value, row: Value, place: Value, column: Value) -> Value:
        """The bytes of a pixel, from a copy where a load would leave the image, or a channel
        belongs to several outputs."""
        k, width = self._k, self._width
        at = row + place
        copied = row > -1
        if not self._repeated:
            copied = copied & (self._end - width < at + column)
        for _ in k.when(copied):
            for i in k.range(0, minimum(self._outputs - column, k.index(width))):
                channel = (column + i) // self._multiplier if self._repeated else column + i
                (self._copies + i).store((image + (at + channel)).load())
        there = select(row < 0, self._outside, image + (at + column))
        return select(copied, self._copies, there).load(width)

    def _unpack(self, rows: list[Value], target: Value) -> None:
        """Rows of one pixel, four by four."""
        nothing = self._k.zeros(u8, self._width)
        for four in range(self._window.fours):
            taken = [row ^ self._format.flip for row in rows[four * QUAD : four * QUAD + QUAD]]
            taken += [nothing] * (QUAD - len(taken))
            for q, dwords in enumerate(_unpacked(taken, self._width)):
                (target + (four * QUAD + q) * self._width).store(dwords)

    def _products(self, pixel: Value, weights: Value) -> list[list[Value]]:
        """The sums of a block of windows."""
        k, window, width = self._k, self._window, self._width
        step, apart = window.place(1, 0) * self._each, window.place(0, 1) * self._each
        nothing = k.zeros(s32, width // QUAD)
        sums = [[k.register(nothing) for _ in range(QUAD)] for _ in range(self._block)]
        # A loop of the machine: LLVM would keep pixels for the next block, on the stack.
        for tap in k.range(0, window.columns):
            first = self._scratch + (pixel * step + tap * apart)
            block = weights + tap * (window.fours * QUAD_BYTES)
            for part in range(window.fours * QUAD):
                weight = (block + part * LINE).cast(s8).load(width)
                for i, own in enumerate(sums):
                    left = (first + (i * step + part * width)).load(width)
                    total = own[part % QUAD]
                    total.value = _multiplied(k, total.value, left, weight)
        return [[one.value for one in own] for own in sums]


def _unpacked(taps: list[Value], width: int) -> list[Value]:
    """Four taps of so many channels, as bytes, become vectors of dwords of four taps."""
    a, b, c, d = taps
    pairs = [_zipped(*two, half) for two in ((a, b), (c, d)) for half in range(2)]
    words = [one.bits(Vector(u16, width // 2)) for one in pairs]
    return [
        _zipped(words[half], words[2 + half], quarter).bits(Vector(u8, width))
        for half in range(2)
        for quarter in range(2)
    ]


def _zipped(a: Value, b: Value, half: int) -> Value:
    """One half of each lane of 16 bytes of a and b: a0 b0 a1 b1 ..."""
    lanes, each = a.lanes, _LANE // element_of(a.type).bytes
    chosen = []
    for lane in range(0, lanes, each):
        for i in range(each // 2):
            at = lane + half * (each // 2) + i
            chosen += [at, lanes + at]
    return shuffle(a, b, tuple(chosen))


def _in_order(sums: list[Value]) -> list[Value]:
    """Sums of channels 4q to 4q + 3 of each lane, as vectors of neighbouring channels."""
    lanes = sums[0].lanes
    count = lanes // QUAD  # of fours in a vector

    def joined(fours: list[int]) -> Value:
        """By the number of the four: of register number % 4, its four number // 4."""
        if len(fours) == 1:
            (one,) = fours
            at = one // QUAD * QUAD
            return shuffle(sums[one % QUAD], sums[one % QUAD], tuple(range(at, at + QUAD)))
        if len(fours) == 2:
            first, second = fours
            chosen = [one // QUAD * QUAD + i for one in fours for i in range(QUAD)]
            chosen[QUAD:] = [lanes + i for i in chosen[QUAD:]]
            return shuffle(sums[first % QUAD], sums[second % QUAD], tuple(chosen))
        half = len(fours) // 2
        low, high = joined(fours[:half]), joined(fours[half:])
        return shuffle(low, high, tuple(range(2 * half * QUAD)))

    return [joined(list(range(part * count, part * count + count))) for part in range(QUAD)]


def _multiplied(k: Builder, total: Value, left: Value, right: Value) -> Value:
    """`total` and the products of four bytes in each dword: unsigned ones by signed ones."""
    features, width = k.isa.features, left.lanes
    for dot in (vpdpbusd, vpdpbusd_256):
        if dot.feature in features:
            return dot(total, left, right)
    words = Vector(s16, width // 2)
    fitting = (one for one in (vpmaddwd_512, vpmaddwd) if one.feature in features)
    multiply = next(fitting, madd16)
    low = (left.bits(Vector(u32, width // 4)) & 0x00FF00FF).bits(words)
    high = (left.bits(Vector(u16, width // 2)) >> 8).bits(words)
    both = right.bits(words)
    return total + multiply(low, (both << 8) >> 8) + multiply(high, both >> 8)
