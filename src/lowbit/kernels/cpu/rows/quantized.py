"""Rows of float32, quantized to 8 bits while they are packed. `q` is the stored, unsigned value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lowbit.isa.generic import load_head, maximum, minimum, reduce_add, select
from lowbit.isa.types import Scalar, Vector, f32, s32, u8, u32
from lowbit.isa.value import Register, Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.rows.input_format import InputFormat, Row, RowFacts, across
from lowbit.kernels.cpu.shared.functions import rounded
from lowbit.kernels.cpu.shared.layout import FLIP, LINE

_LANES = 16
_INFINITY_BITS = 0x7F800000
_MINUS_ZERO_BITS = 0x80000000
_SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class Quantized(InputFormat):
    """float32, contiguous, each row with a scale and a zero point of its own, as
    numerics.quantize_rows defines them. `symmetric`: the zero point is that of signed bytes."""

    symmetric: bool = False

    @property
    def element(self) -> Scalar:
        return f32

    @property
    def zero_points(self) -> bool:
        return True

    def pack(self, k: Builder, row: Row, facts: RowFacts) -> None:
        quantize(k, self.symmetric, row, facts)


def _row_range(k: Builder, row: Row) -> tuple[Value, Value, Value]:
    """(low ≤ 0, high ≥ 0, whether all is finite) of a row of float32.

    Positive floats order as their bits do as signed integers, negative ones as unsigned integers
    with the larger magnitude greater; NaN comes out above infinity in both.
    """
    signed, unsigned = Vector(s32, _LANES), Vector(u32, _LANES)
    high = k.register(k.zeros(s32, _LANES))
    low = k.register(k.constant(_MINUS_ZERO_BITS, unsigned))

    def take(values: Value) -> None:
        high.value = maximum(values.bits(signed), high.value)
        low.value = maximum(values.bits(unsigned), low.value)

    whole = row.length // _LANES * _LANES
    for i in k.range(0, whole, _LANES):
        take((row.source + i).load(_LANES))
    for _ in k.when(whole < row.length):
        take(load_head(row.source + whole, row.length - whole, _LANES))
    high_bits = across(high.value, maximum)
    low_bits = across(low.value, maximum)
    finite = (high_bits < _INFINITY_BITS) & (low_bits < (_MINUS_ZERO_BITS | _INFINITY_BITS))
    return low_bits.bits(f32), high_bits.bits(f32), finite


@dataclass(frozen=True)
class Affine:
    """One row's parameters: its scale's inverse, its zero point, and the clamp before rounding."""

    inverse: Value
    zero: Value
    least: Value
    greatest: Value

    def rounding(self, lanes: int, flip: int = 0) -> Callable[[Value], Value]:
        """What makes q, less `flip`, of so many numbers."""
        inverse, least = self.inverse.splat(lanes), self.least.splat(lanes)
        greatest, zero = self.greatest.splat(lanes), (self.zero - flip).splat(lanes)
        return lambda values: rounded(minimum(maximum(values * inverse, least), greatest)) + zero


def choose_affine(k: Builder, symmetric: bool, row: Row, facts: RowFacts) -> Affine:
    """Choose and store a row's scale and zero point, as numerics.quantize_rows defines them."""
    low, high, finite = _row_range(k, row)
    one, nothing = k.constant(1.0, f32), k.constant(0.0, f32)
    if symmetric:
        spread = maximum(0.0 - low, high) / 127.0
    else:
        spread = high / 255.0 - low / 255.0
    zeros, flip = spread < _SMALLEST_NORMAL, k.constant(FLIP, s32)
    scale = select(zeros, one, spread)
    if symmetric:
        zero = flip
        least, greatest = k.constant(-127.0, f32), k.constant(127.0, f32)
    else:
        ideal = minimum((0.0 - low) / scale, k.constant(255.0, f32))
        zero = select(finite, select(zeros, flip, rounded(ideal)), flip)
        least, greatest = 0.0 - zero.to(f32), 255.0 - zero.to(f32)
    # A row with a NaN or an infinity in it: every q is its zero point, and the scale is NaN.
    facts.scale.store(select(finite, scale, k.constant(float("nan"), f32)))
    facts.zero.store(zero)
    return Affine(
        inverse=one / scale,
        zero=zero,
        least=select(finite, least, nothing),
        greatest=select(finite, greatest, nothing),
    )


def quantize(k: Builder, symmetric: bool, row: Row, facts: RowFacts) -> None:
    """Quantize a row of float32 to u8 into its lines."""
    affine = choose_affine(k, symmetric, row, facts)
    stored = affine.rounding(_LANES)
    sums: Register = k.register(k.zeros(s32, _LANES))

    def quantized(values: Value) -> Value:
        q = stored(values)
        if facts.sum is not None:
            sums.value = sums.value + q
        return q.to(u8)

    whole = row.length // LINE
    for line in k.range(0, whole):
        target = row.lines + line * row.line_stride
        for part in range(0, LINE, _LANES):
            (target + part).store(quantized((row.source + (line * LINE + part)).load(_LANES)))
    for _ in k.when(whole * LINE < row.length):
        target = row.lines + whole * row.line_stride
        for part in range(0, LINE, _LANES):
            begin = whole * LINE + part
            values = load_head(row.source + begin, row.length - begin, _LANES)
            (target + part).store(quantized(values))
    if facts.sum is not None:
        # The lanes past the end were zeros, whose q is the zero point, which b's padding ignores.
        filled = (row.length + (LINE - 1)) // LINE * LINE
        padding = (filled - row.length).to(s32) * affine.zero
        facts.sum.store(reduce_add(sums.value) - padding)
