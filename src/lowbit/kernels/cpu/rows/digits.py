"""Rows of floats as rows of signed bytes, for weights with groups (see shared/groups.py).

Three digits hold 23 bits of the greatest number of a row's group and its sign, two hold 16:

    X = max|x| / Q        q = round(x / X)        q = d0·256² + d1·256 + d2,  −128 ≤ d ≤ 127

with Q = 2^22 − 1, or 32639; one holds 7, with Q = 127. So a number is off by at most 2^−23 (2^−16)
of the greatest of its group and the rounding of x / X: about what float32 (bfloat16) itself loses
where the numbers of a group are of one size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lowbit.isa.generic import load_head, maximum, minimum, reduce_add, select
from lowbit.isa.types import Scalar, Vector, bf16, f32, s8, s32, u8, u32
from lowbit.isa.value import Register, Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.rows.input_format import InputFormat, Row, RowFacts, across
from lowbit.kernels.cpu.shared.functions import rounded
from lowbit.kernels.cpu.shared.groups import BASE, LARGEST, Grouping
from lowbit.kernels.cpu.shared.layout import FLIP, LINE

# Rows of float32, quantized to 8 bits while they are packed. `q` is the stored, unsigned value.

_LANES = 16
_MOST = LARGEST | {1: 127}  # of one digit, a signed byte
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


_UNIT = 8  # k that no group divides


@dataclass(frozen=True)
class Digits(InputFormat):
    """float32 or bfloat16, contiguous: a scale for each group of a row."""

    groups: Grouping
    bfloat16: bool = False

    @property
    def element(self) -> Scalar:
        return bf16 if self.bfloat16 else f32

    @property
    def zero_points(self) -> bool:
        return False

    @property
    def grouping(self) -> Grouping:
        return self.groups

    def pack(self, k: Builder, row: Row, facts: RowFacts) -> None:
        assert facts.sum is not None
        _split(k, self.groups, row, facts.scale, facts.sum)


@dataclass(frozen=True)
class SignedBytes(InputFormat):
    """float32, contiguous, quantized row by row as `Quantized` does: one digit."""

    groups: Grouping
    symmetric: bool = False

    @property
    def element(self) -> Scalar:
        return f32

    @property
    def zero_points(self) -> bool:
        return not self.symmetric

    @property
    def grouping(self) -> Grouping:
        return self.groups

    def pack(self, k: Builder, row: Row, facts: RowFacts) -> None:
        assert facts.sum is not None
        affine = choose_affine(k, self.symmetric, row, facts)
        facts.zero.store(affine.zero - FLIP)
        _quantize(k, self.groups, row, affine, facts.sum)


def _split(k: Builder, grouping: Grouping, row: Row, scales: Value, sums: Value) -> None:
    """Bring a row of float32, or of bfloat16, into lines of digits, one after another for each
    block of 64 k; `scales` and `sums` have an entry for each group."""
    wide = grouping.size % (2 * _UNIT) == 0 and k.isa.vector_registers == 32
    lanes = 2 * _UNIT if wide else _UNIT
    for group in k.range(0, _groups(grouping, row.length)):
        with k.scope():
            _split_group(k, grouping, row, group, lanes, scales + group, sums + group)
    filled = (row.length + (lanes - 1)) // lanes * lanes
    for i in k.range(filled, _padded(row.length), _UNIT):
        for number in range(grouping.digits):
            (_place(row, i) + number * LINE).cast(s8).store(k.zeros(s8, _UNIT))


def _split_group(
    k: Builder, grouping: Grouping, row: Row, group: Value, lanes: int, scale: Value, sum_: Value
) -> None:
    """One group of a row."""
    first = group * grouping.size
    end = minimum(first + grouping.size, row.length)
    greatest, finite = _greatest(k, row, first, end, lanes)
    unit = greatest / float(_MOST[grouping.digits])
    usable = (unit > _SMALLEST_NORMAL) & finite
    one = k.constant(1.0, f32)
    inverse = select(usable, one / unit, k.constant(0.0, f32)).splat(lanes)
    if not grouping.exact:
        unit = unit * BASE ** (grouping.digits - 1)
    scale.store(select(finite, select(usable, unit, one), k.constant(float("nan"), f32)))
    total = _Total(k, grouping, lanes)

    def take(i: Value, numbers: Value) -> None:
        place, q = _place(row, i), rounded(numbers * inverse)
        total.add(q)
        for number in reversed(range(grouping.digits)):
            (place + number * LINE).cast(s8).store(q.to(s8))
            if number:
                q = (q + FLIP) >> 8

    whole = end // lanes * lanes
    for i in k.range(first, whole, lanes):
        take(i, (row.source + i).load(lanes).to(f32))
    for i in k.range(whole, end, lanes):
        take(i, _numbers(k, row.source + i, row.length - i, lanes))
    total.store(sum_)


class _Total:
    """The sum of a group, as `Groups` wants it."""

    def __init__(self, k: Builder, grouping: Grouping, lanes: int) -> None:
        self.k, self.grouping = k, grouping
        # Of a group that is not exact, int32 may not hold it: one for each digit.
        count = 1 if grouping.exact else grouping.digits
        self.parts = [k.register(k.zeros(s32, lanes)) for _ in range(count)]

    def add(self, q: Value) -> None:
        for part in reversed(self.parts[1:]):
            part.value = part.value + ((q << 24) >> 24)
            q = (q + FLIP) >> 8
        self.parts[0].value = self.parts[0].value + q

    def store(self, place: Value, more: Value | None = None) -> None:
        """Store the sum, with what is not in it yet."""
        sums = [reduce_add(part.value) for part in self.parts]
        if more is not None:
            sums[0] = sums[0] + more
        if self.grouping.exact:
            place.cast(s32).store(sums[0] * self.grouping.flip)
            return
        value = self.k.constant(0.0, f32)
        for number, one in enumerate(sums):
            value = value + one.to(f32) * BASE**-number
        place.store(value)


def _quantize(k: Builder, grouping: Grouping, row: Row, affine: Affine, sums: Value) -> None:
    """Bring a row of float32 into lines of one digit, the quantized byte less 128, with zeros
    behind its end; `sums` has an entry for each group."""
    unit = math.gcd(grouping.size, LINE)
    lanes = min(unit, 2 * _UNIT)
    digits = affine.rounding(lanes, FLIP)
    whole = row.length // unit * unit
    for i in k.range(whole, _padded(row.length), lanes):
        _place(row, i).cast(s8).store(k.zeros(s8, lanes))
    rest = k.register(k.constant(0, s32))
    for i in k.range(whole, row.length, lanes):
        left = row.length - i
        q = digits(_numbers(k, row.source + i, left, lanes))
        beside = k.local(s32, lanes)
        beside.store(q)
        for one in k.range(0, minimum(left, k.index(lanes))):
            _place(row, i + one).cast(s8).store((beside + one).load().to(s8))
            rest.value = rest.value + (beside + one).load()
    last = _groups(grouping, row.length) - 1
    for group in k.range(0, last + 1):
        first = group * grouping.size
        end = minimum(first + grouping.size, row.length)
        with k.scope():
            total = _Total(k, grouping, lanes)
            for i in k.range(first, end // unit * unit, unit):
                place = _place(row, i).cast(s8)
                for part in range(0, unit, lanes):
                    q = digits((row.source + i + part).load(lanes))
                    total.add(q)
                    (place + part).store(q.to(s8))
            # Written once: another thread may be packing the same row.
            total.store(sums + group, select(group.equals(last), rest.value, k.constant(0, s32)))


def _groups(grouping: Grouping, length: Value) -> Value:
    return (length + (grouping.size - 1)) // grouping.size


def _padded(length: Value) -> Value:
    return (length + (LINE - 1)) // LINE * LINE


def _place(row: Row, i: Value) -> Value:
    """Where element i of a row goes."""
    return row.lines + (i // LINE * row.line_stride + i % LINE)


def _greatest(k: Builder, row: Row, first: Value, end: Value, lanes: int) -> tuple[Value, Value]:
    """(the greatest magnitude, whether all are finite) of a group.

    Magnitudes order as their bits do, and NaN comes out above infinity.
    """
    with k.scope():
        most = k.register(k.zeros(s32, lanes))

        def take(numbers: Value) -> None:
            most.value = maximum(numbers.bits(Vector(s32, lanes)) & 0x7FFFFFFF, most.value)

        whole = end // lanes * lanes
        for i in k.range(first, whole, lanes):
            take((row.source + i).load(lanes).to(f32))
        for i in k.range(whole, end, lanes):
            take(_numbers(k, row.source + i, row.length - i, lanes))
    bits = across(most.value, maximum)
    return bits.bits(f32), bits < _INFINITY_BITS


def _numbers(k: Builder, source: Value, left: Value, lanes: int) -> Value:
    """The first `left` of so many numbers as float32, zeros behind them."""
    element = source.type.element  # type: ignore[union-attr]
    assert isinstance(element, Scalar)
    with k.scope():
        loaded = k.register(k.zeros(element, lanes))
        for _ in k.when(left > lanes - 1):
            loaded.value = source.load(lanes)
        for _ in k.when(left < lanes):
            rest = k.local(element, lanes)
            rest.store(k.zeros(element, lanes))
            for i in k.range(0, left):
                (rest + i).store((source + i).load())
            loaded.value = rest.load(lanes)
    return loaded.value.to(f32)
