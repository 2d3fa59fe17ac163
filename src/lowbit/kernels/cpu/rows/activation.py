"""How rows of the left operand become packed blocks: as bytes, or quantized from float32.

Each function emits the work on one row. Row sums, where the epilogue wants them, are made in the
same pass. `q` in the comments is the stored, unsigned value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from lowbit.isa.generic import (
    extract,
    load_head,
    maximum,
    minimum,
    reduce_add,
    select,
    shuffle,
    store_head,
)
from lowbit.isa.types import Vector, f32, s32, u8, u32
from lowbit.jit.builder import Builder
from lowbit.jit.value import Register, Value
from lowbit.kernels.cpu.shared.functions import rounded
from lowbit.kernels.cpu.shared.layout import FLIP, LINE

_LANES = 16
_WORD = 8  # bytes that are copied together, where a whole line would be too many
_INFINITY_BITS = 0x7F800000
_MINUS_ZERO_BITS = 0x80000000
_SMALLEST_NORMAL = 2.0**-126


class Source(NamedTuple):
    """What the left operand is before it is packed. It keys the code.

    `kind` is "u8", "s8", or "f32" for rows to be quantized; `symmetric` says how those are.
    `contiguous`: neighbours along K are neighbours in memory (always so for "f32").
    """

    kind: str
    contiguous: bool = True
    symmetric: bool = False


@dataclass(frozen=True)
class Row:
    """One row: where it is, how far apart its elements are, and where its lines go."""

    source: Value
    stride: Value
    length: Value
    lines: Value
    line_stride: Value


def pack_bytes(k: Builder, source: Source, row: Row, row_sum: Value | None) -> None:
    """Copy a row of bytes, made unsigned, into its lines; the last line is filled with zeros."""
    flip = FLIP if source.kind == "s8" else 0
    total = k.register(k.constant(0, s32))
    whole = row.length // LINE
    if source.contiguous:
        for line in k.range(0, whole):
            values = (row.source + line * LINE).load(LINE) ^ flip
            (row.lines + line * row.line_stride).store(values)
            if row_sum is not None:
                total.value = total.value + reduce_add(values.to(s32))
        for _ in k.when(whole * LINE < row.length):
            begin = whole * LINE
            target = row.lines + whole * row.line_stride
            _pack_tail(k, flip, row.source + begin, row.length - begin, target)
            if row_sum is not None:
                total.value = total.value + reduce_add(target.load(LINE).to(s32))
    else:
        for line in k.range(0, (row.length + (LINE - 1)) // LINE):
            target = row.lines + line * row.line_stride
            target.store(k.zeros(u8, LINE))
            begin = line * LINE
            for i in k.range(begin, minimum(begin + LINE, row.length)):
                value = (row.source + i * row.stride).load() ^ flip
                (target + (i - begin)).store(value)
                if row_sum is not None:
                    total.value = total.value + value.to(s32)
    if row_sum is not None:
        row_sum.store(total.value)


def _pack_tail(k: Builder, flip: int, source: Value, length: Value, target: Value) -> None:
    """The last line of a row, whose `length` bytes are followed by zeros."""
    target.store(k.zeros(u8, LINE))
    if k.isa.vector_bytes == LINE:  # which has masks for its bytes
        store_head(load_head(source, length, LINE) ^ flip, target, length)
        return
    whole = length // _WORD * _WORD
    for i in k.range(0, whole, _WORD):
        (target + i).store((source + i).load(_WORD) ^ flip)
    for i in k.range(whole, length):
        (target + i).store((source + i).load() ^ flip)


def _across(vector: Value, combine: Callable[[Value, Value], Value]) -> Value:
    """Combine all lanes into one scalar."""
    half = _LANES // 2
    while half:
        turned = shuffle(vector, vector, tuple((i + half) % _LANES for i in range(_LANES)))
        vector, half = combine(vector, turned), half // 2
    return extract(vector, 0)


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
    high_bits = _across(high.value, maximum)
    low_bits = _across(low.value, maximum)
    finite = (high_bits < _INFINITY_BITS) & (low_bits < (_MINUS_ZERO_BITS | _INFINITY_BITS))
    return low_bits.bits(f32), high_bits.bits(f32), finite


@dataclass(frozen=True)
class _Affine:
    """One row's parameters: its scale's inverse, its zero point, and the clamp before rounding."""

    inverse: Value
    zero: Value
    least: Value
    greatest: Value


def _affine(k: Builder, source: Source, row: Row, row_scale: Value, row_zero: Value) -> _Affine:
    """Choose and store a row's scale and zero point, as numerics.quantize_rows defines them."""
    low, high, finite = _row_range(k, row)
    one, nothing = k.constant(1.0, f32), k.constant(0.0, f32)
    if source.symmetric:
        spread = maximum(0.0 - low, high) / 127.0
    else:
        spread = high / 255.0 - low / 255.0
    scale = select(spread < _SMALLEST_NORMAL, one, spread)
    if source.symmetric:
        zero = k.constant(FLIP, s32)
        least, greatest = k.constant(-127.0, f32), k.constant(127.0, f32)
    else:
        ideal = minimum((0.0 - low) / scale, k.constant(255.0, f32))
        zero = select(finite, rounded(ideal), k.constant(0, s32))
        least, greatest = 0.0 - zero.to(f32), 255.0 - zero.to(f32)
    # A row with a NaN or an infinity in it: every q is its zero point, and the scale is NaN.
    row_scale.store(select(finite, scale, k.constant(float("nan"), f32)))
    row_zero.store(zero)
    return _Affine(
        inverse=one / scale,
        zero=zero,
        least=select(finite, least, nothing),
        greatest=select(finite, greatest, nothing),
    )


def quantize(
    k: Builder, source: Source, row: Row, out: tuple[Value, Value], row_sum: Value | None
) -> None:
    """Quantize a row of float32 to u8 into its lines; `out` is where scale and zero point go."""
    affine = _affine(k, source, row, *out)
    inverse, zero = affine.inverse.splat(_LANES), affine.zero.splat(_LANES)
    least, greatest = affine.least.splat(_LANES), affine.greatest.splat(_LANES)
    sums: Register = k.register(k.zeros(s32, _LANES))

    def quantized(values: Value) -> Value:
        bounded = minimum(maximum(values * inverse, least), greatest)
        q = rounded(bounded) + zero
        if row_sum is not None:
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
    if row_sum is not None:
        # The lanes past the end were zeros, whose q is the zero point, which b's padding ignores.
        filled = (row.length + (LINE - 1)) // LINE * LINE
        padding = (filled - row.length).to(s32) * affine.zero
        row_sum.store(reduce_add(sums.value) - padding)
