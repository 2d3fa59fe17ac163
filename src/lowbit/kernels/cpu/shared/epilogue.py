"""What happens to accumulators before they are stored, in registers.

With stored values a' (u8) and b' (s8) and their zero points, the accumulators hold Σ a'·b', and

    Σ (a' − za)·(b' − zb)  =  Σ a'·b'  −  za·(Σ b' − K·zb)  −  zb·Σ a'

The bracket is folded into the packed operand's column sums; Σ a' is made while a is packed. All
of this wraps modulo 2^32, so it is exact whenever the result fits in 32 bits. (Jacob et al.,
"Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference",
2018, section 2.3.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from lowbit.isa.generic import extract, maximum, select, shuffle, store_head, stream
from lowbit.isa.types import Scalar, Vector, f32, s32, u8
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.shared.formats import (
    FORMATS,
    LIMITS,
    Convert,
    parameters_of,
    quantizing,
    storing,
)
from lowbit.kernels.cpu.shared.layout import LINE, QUAD
from lowbit.kernels.cpu.shared.post_op import Apply, Columns, Operands, post_ops

# What the output can be, and the type that is stored.
MAXIMA = ("max8", "max8_masked")
OUTPUTS: dict[str, Scalar] = {**FORMATS, **dict.fromkeys(MAXIMA, f32)}
OCTET = 8  # columns that share one maximum

# (row, vector of accumulators) -> None: finishes and stores part of one row of the output.
Store = Callable[[Value, Value], None]


class Epilogue(NamedTuple):
    """What the epilogue does. It keys the code.

    `a_zero`, `b_zero`: the left operand has zero points per row, the right one per column;
    `uniform`: scales and zero points of all rows are the first. With the output "s32" nothing else
    happens. Otherwise sums become float32, are multiplied by their row's, then by their column's
    scale, go through `post_ops` in order, by name, and are stored as `out`: "f32", "bf16",
    quantized to "u8" or "s8", or as "max8", the greatest float32 of each 8 columns, two for a
    panel, where columns that do not exist count as −∞; or "max8_masked", where those do too whose
    byte, in place of a residual, is 0. `streams`: past the caches, for outputs that
    these could not hold; the output's rows then begin at multiples of a cache line, 64 bytes.

    `scales`: "both" of them, for sums of integers. "row": sums are float32 and hold the scales of
    the right operand, as do its column sums, float32 too. "none": sums are the product itself.
    """

    a_zero: bool = False
    b_zero: bool = False
    post_ops: tuple[str, ...] = ()
    out: str = "s32"
    streams: bool = False
    scales: str = "both"
    uniform: bool = False


def columns(
    k: Builder, epilogue: Epilogue, at: Operands, column: Value,
    lanes: int, rows: int = 1, whole: bool = False,
) -> Store:  # fmt: skip
    """Load what belongs to `lanes` columns from `column` on; return how to store a row of them; or
    `rows` rows of all columns, of which there are lanes / rows. `whole`: all of them exist."""
    left = at.columns - column if rows == 1 else k.index(lanes)
    place = Columns(k, at, column, lanes, left, rows=rows)
    finish, numbers = _finishing(epilogue, place)
    convert = _converting(epilogue, numbers)
    target = at.out.cast(OUTPUTS[epilogue.out])
    write = _writing(epilogue, lanes)

    def store(row: Value, accumulators: Value) -> None:
        value = finish(row, accumulators)
        if epilogue.out in MAXIMA:
            mask = at.residual.cast(u8) + column if epilogue.out != "max8" else None
            with k.scope():
                _store_maxima(k, value, lanes, target + row * at.out_stride, column, left, mask)
            return
        value = convert(value)
        start = target + (row * at.out_stride + column)
        if rows > 1:
            _store_rows(place, value, start)
            return
        if whole:
            write(value, start)
            return
        for _ in k.when(left > lanes - 1):
            write(value, start)
        for _ in k.when(left < lanes):
            store_head(value, start, left)

    return store


def _writing(epilogue: Epilogue, lanes: int) -> Callable[[Value, Value], object]:
    """How a vector of the output gets to its place: past the caches, if it is a whole line."""
    if epilogue.streams and OUTPUTS[epilogue.out].bytes * lanes == LINE:
        return stream
    return lambda value, place: place.store(value)


def _store_rows(at: Columns, value: Value, start: Value) -> None:
    """Store several rows of all columns: at once where no gap is between them."""
    stride, each = at.operands.out_stride, at.each
    for _ in at.k.when(stride.equals(each)):
        start.store(value)
    for _ in at.k.when((stride < each) | (stride > each)):
        for row in range(at.rows):
            lanes = tuple(range(row * each, row * each + each))
            (start + stride * row).store(shuffle(value, value, lanes))


def _finishing(epilogue: Epilogue, place: Columns) -> tuple[Apply, list[Value]]:
    """Load what belongs to some columns; return what becomes of sums before the conversion to the
    output's type, and the numbers of that type."""
    at, lanes = place.operands, place.lanes
    scales = "none" if epilogue.out == "s32" else epilogue.scales
    kind = f32 if epilogue.scales == "row" else s32
    column_sum = place.of_columns(at.column_sum.cast(kind)) if epilogue.a_zero else None
    if column_sum is not None and epilogue.uniform:
        column_sum = at.row_zero.load().to(kind).splat(lanes) * column_sum
    column_zero = place.of_columns(at.column_zero) if epilogue.b_zero else None
    column_scale = place.of_columns(at.column_scale) if scales == "both" else None
    uniform = epilogue.uniform and scales != "none"
    first_scale = at.row_scale.load().splat(lanes) if uniform else None
    parameters = at.parameters

    def numbers(count: int) -> list[Value]:
        nonlocal parameters
        given = [(parameters + i).load().splat(lanes) for i in range(count)]
        parameters = parameters + count
        return given

    steps = map(post_ops.get, epilogue.post_ops)
    applied = [one.begin(replace(place, numbers=numbers(one.parameters))) for one in steps]

    def finish(row: Value, accumulators: Value) -> Value:
        value = accumulators
        if column_sum is not None:
            shift = column_sum
            if not epilogue.uniform:
                shift = place.of_rows(at.row_zero, row).to(kind) * column_sum
            value = value - shift
        if column_zero is not None:
            value = value - place.of_rows(at.row_sum, row) * column_zero
        if scales != "none":
            scale = place.of_rows(at.row_scale, row) if first_scale is None else first_scale
            value = value.to(f32) * scale
        if column_scale is not None:
            value = value * column_scale
        for apply in applied:
            value = apply(row, value)
        return value

    return finish, numbers(parameters_of(epilogue.out) if epilogue.out in LIMITS else 0)


def _converting(epilogue: Epilogue, numbers: list[Value]) -> Convert:
    if epilogue.out == "s32" or epilogue.out in MAXIMA:
        return lambda value: value.to(OUTPUTS[epilogue.out])
    return storing(epilogue.out, numbers)


def packs(epilogue: Epilogue) -> bool:
    """Whether `interleaved` serves."""
    operands = {post_ops.get(name).operand for name in epilogue.post_ops}
    return epilogue.out in LIMITS and "residual" not in operands


def interleaved(
    k: Builder, epilogue: Epilogue, at: Operands, column: Value, lanes: int
) -> Callable[[Value, list[Value]], None]:
    """What `columns` is, for four vectors of sums whose columns lie as unpacking leaves them: of
    each 16 columns, vector q has the four from 4q on. They are packed to bytes in order."""
    places = [
        Columns(k, at, column + q * QUAD, lanes, k.index(lanes), fours=True) for q in range(QUAD)
    ]
    found = [_finishing(epilogue, place) for place in places]
    made = [(finish, quantizing(epilogue.out, *numbers)) for finish, numbers in found]
    target, left, width = at.out.cast(u8), at.columns - column, QUAD * lanes
    order = [16 * (i // 16) + 4 * (i % 4) + i % 16 // 4 for i in range(width)]

    def store(row: Value, sums: list[Value]) -> None:
        packed = k.zeros(s32, lanes)
        for q, (values, (finish, quantized)) in enumerate(zip(sums, made, strict=True)):
            byte = quantized(finish(row, values))
            packed = packed | ((byte if epilogue.out == "u8" else byte & 0xFF) << (8 * q))
        values = packed.bits(Vector(u8, width))
        values = shuffle(values, values, tuple(order))
        start = target + (row * at.out_stride + column)
        for _ in k.when(left > width - 1):
            start.store(values)
        for _ in k.when(left < width):
            store_head(values, start, left)

    return store


def _store_maxima(
    k: Builder,
    value: Value,
    lanes: int,
    out: Value,
    column: Value,
    left: Value,
    mask: Value | None,
) -> None:
    """Store the greatest number of each 8 lanes, of which the first `left` count, and with a mask
    those whose byte is not 0.

    Of fewer lanes than 8, the later ones add to what the earlier ones, stored before, left.
    """
    if mask is not None:
        value = select(mask.load(lanes).to(s32) > 0, value, k.constant(float("-inf"), value.type))
    counted = k.register(value)
    for _ in k.when(left < lanes):
        # There are no constants that differ from lane to lane, so memory makes the blend.
        blend = k.local(f32, lanes)
        blend.store(k.constant(float("-inf"), f32).splat(lanes))
        store_head(value, blend, left)
        counted.value = blend.load(lanes)
    together = min(lanes, OCTET)
    greatest, half = counted.value, together // 2
    while half:
        turned = shuffle(greatest, greatest, tuple(lane ^ half for lane in range(lanes)))
        greatest, half = maximum(greatest, turned), half // 2
    place = out + column // OCTET
    for group in range(lanes // together):
        best = k.register(extract(greatest, group * together))
        if lanes < OCTET:
            for _ in k.when(column % OCTET > 0):
                best.value = maximum(best.value, place.load())
        (place + group).store(best.value)
