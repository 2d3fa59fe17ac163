"""Depthwise convolution: each channel with a kernel of its own, in vectors over the channels.

Four taps of a channel make a dword, so that what multiplies bytes elsewhere serves here too:

    taps 0..3 of 64 channels, four loads  →  unpacked twice: four registers of 16 channels each,
    in each of which a dword holds four taps of one channel  →  four products of bytes

Unpacking works in lanes of 16 bytes, so register q has channels 4q to 4q + 3 of each lane. Weights
lie in that order; sums are brought into the channels' own before they are finished.

Weights: blocks of 64 outputs; in a block, for each four taps, 256 bytes: [q][lane][4 outputs][4
taps], zeros where there is no tap or output.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.isa.avx2 import vpmaddwd
from lowbit.isa.avx2_vnni import vpdpbusd_256
from lowbit.isa.avx512 import vpmaddwd_512
from lowbit.isa.avx512_vnni import vpdpbusd
from lowbit.isa.generic import madd16, minimum, select, shuffle
from lowbit.isa.types import (
    F32Pointer,
    Int,
    S32Pointer,
    U8Pointer,
    Vector,
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
from lowbit.kernels.cpu.rows.input_format import LeftOperand
from lowbit.kernels.cpu.rows.windows import Window, Windows
from lowbit.kernels.cpu.shared.epilogue import Epilogue, columns
from lowbit.kernels.cpu.shared.layout import LINE, QUAD
from lowbit.kernels.cpu.shared.post_op import Operands

_LANE = 16  # bytes in which unpacking works
_ROWS = 64  # pixels of some outputs after which those beside follow
QUAD_BYTES = QUAD * LINE  # of weights: four taps of 64 outputs


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
    item_rows: Int,
    *,
    format: Windows,
    epilogue: Epilogue,
    repeated: bool = False,
) -> None:
    """out[m, n] = epilogue(Σ over taps of x · weight): m pixels, n outputs, of which `multiplier`
    neighbours belong to a channel (`repeated`: more than one).

    windows: a table of single taps, their number a multiple of 4 (see rows/windows.py). residual
    and out: rows n apart; other operands as those of `product`, one scale and zero point for all,
    with entries for whole blocks of 64 columns.
    """
    operand = LeftOperand(x, image_stride, k.index(1), k.index(0), row_zero, windows, k.index(0))
    operands = Operands(row_zero, row_zero, row_scale, column_sum, column_sum, column_scale, bias,
                        residual, n, parameters, out, n, n)  # fmt: skip
    step = _Step(format, operand, weights, n, multiplier, repeated)
    outside = format.outside(k, operand, k.isa.vector_bytes)
    width = k.isa.vector_bytes
    lanes = width // QUAD
    for item in k.parallel((m + item_rows - 1) // item_rows):
        last = minimum(item * item_rows + item_rows, m)
        for first in k.range(item * item_rows, last, _ROWS):
            for column in k.range(0, n, width):
                with k.scope():
                    parts = [column + at for at in range(0, width, lanes)]
                    stores = [columns(k, epilogue, operands, at, lanes) for at in parts]
                    for row in k.range(first, minimum(first + _ROWS, last)):
                        with k.scope():
                            sums = step.run(k, row, column, outside)
                        for at, store, values in zip(parts, stores, sums, strict=True):
                            for _ in k.when(at < n):
                                store(row, values)


@dataclass(frozen=True)
class _Step:
    """One pixel of some outputs, as many as a register has bytes."""

    format: Windows
    operand: LeftOperand
    weights: Value
    outputs: Value
    multiplier: Value
    repeated: bool

    def run(self, k: Builder, row: Value, column: Value, outside: Value) -> list[Value]:
        """Its sums."""
        width = k.isa.vector_bytes
        lanes = width // QUAD
        window = self.format.find(k, self.operand, row)
        taps = self.format.fact(self.operand, "taps")
        sums = [k.register(k.zeros(s32, lanes)) for _ in range(QUAD)]
        block = self.weights + (column // LINE * (taps * LINE) + column % LINE)
        copies = k.local(u8, QUAD * width)

        def add(tap: Value, loaded: list[Value]) -> None:
            """Four taps."""
            for q, four in enumerate(_unpacked(loaded, width)):
                weight = (block + (tap * LINE + q * LINE)).cast(s8).load(width)
                sums[q].value = _multiplied(k, sums[q].value, four, weight)

        if not self.repeated:
            first = window.image + (window.base + column)
            for _ in k.when(window.entry > -1):
                for tap in k.range(0, taps, QUAD):
                    places = [(window.places + (tap + i)).load().to(s64) for i in range(QUAD)]
                    add(tap, [self.format.stored((first + p).load(width)) for p in places])
        for _ in (0,) if self.repeated else k.when(window.entry < 0):
            for tap in k.range(0, taps, QUAD):
                slots = [(tap + i, copies + i * width) for i in range(QUAD)]
                add(tap, [self._load(k, window, t, column, s, outside) for t, s in slots])
        return _in_order([one.value for one in sums])

    def _load(
        self, k: Builder, window: Window, tap: Value, column: Value, copy: Value, outside: Value
    ) -> Value:
        """The bytes of a tap: by one load, or from a copy where that would leave the image, or a
        channel belongs to several outputs."""
        width = k.isa.vector_bytes
        place = (window.places + tap).load().to(s64)
        inside, at = place > -1, window.base + place
        count = minimum(self.outputs - column, k.index(width))
        if self.repeated:
            for _ in k.when(inside):
                for i in k.range(0, count):
                    channel = (column + i) // self.multiplier
                    (copy + i).store((window.image + (at + channel)).load())
            return self.format.stored(select(inside, copy, outside).load(width))
        end = self.format.fact(self.operand, "end") - width
        first = window.image + (at + column)
        near = inside & (end < at + column)
        for _ in k.when(near):
            for i in k.range(0, count):
                (copy + i).store((first + i).load())
        source = select(near, copy, select(inside, first, outside))
        return self.format.stored(source.load(width))


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
    assert isinstance(a.type, Vector)
    lanes, each = a.type.lanes, _LANE // a.type.element.bytes
    chosen = []
    for lane in range(0, lanes, each):
        for i in range(each // 2):
            at = lane + half * (each // 2) + i
            chosen += [at, lanes + at]
    return shuffle(a, b, tuple(chosen))


def _in_order(sums: list[Value]) -> list[Value]:
    """Sums of channels 4q to 4q + 3 of each lane, as vectors of neighbouring channels."""
    assert isinstance(sums[0].type, Vector)
    lanes = sums[0].type.lanes
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
    assert isinstance(left.type, Vector)
    features, width = k.isa.features, left.type.lanes
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
