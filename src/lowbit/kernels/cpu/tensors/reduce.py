"""Sums, means and maxima of tensors [outer, count, inner] over the axis in the middle."""

from __future__ import annotations

from lowbit.isa.generic import extract, minimum, shuffle
from lowbit.isa.types import F32Pointer, Int, U8Pointer, s32
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.shared.formats import FORMATS, store_vector
from lowbit.kernels.cpu.tensors.loops import by_vectors
from lowbit.kernels.cpu.tensors.reduction import Reducer, Reduction

_LANES, _VECTORS = 16, 2  # of a row: the same partial sums on every instruction set
_TOGETHER = 4  # vectors of columns
_SHORT = 64  # numbers of a column that are added one after another; then their sums are
_ROW_BLOCK, _COLUMN_BLOCK = 16, 256  # of an item


@kernel
def reduce_rows(
    k: Builder,
    out: U8Pointer,
    x: U8Pointer,
    parameters: F32Pointer,
    rows: Int,
    count: Int,
    *,
    reduction: Reduction,
) -> None:
    """out[r] = the reduction of x[r, :count], contiguous. parameters: as in `Reducer`.

    A row's numbers are added in 32 parts, of every 32nd number each, then the parts, halved again
    and again, then what a part of 32 is not filled by.
    """
    reducer = Reducer(k, reduction, parameters, 0)
    source, target = x.cast(FORMATS[reduction.format]), out.cast(FORMATS[reduction.out])
    width = _LANES * _VECTORS
    whole = count // width * width
    for item in k.parallel((rows + (_ROW_BLOCK - 1)) // _ROW_BLOCK):
        for row in k.range(item * _ROW_BLOCK, minimum((item + 1) * _ROW_BLOCK, rows)):
            start = source + row * count
            with k.scope():
                parts = [k.register(reducer.start(_LANES)) for _ in range(_VECTORS)]
                for at in k.range(0, whole, width):
                    reducer.take(parts, start + at)
                first, second = parts
                vector, half = reducer.combine(first.value, second.value), _LANES // 2
                while half:
                    lanes = tuple(lane ^ half for lane in range(_LANES))
                    vector = reducer.combine(vector, shuffle(vector, vector, lanes))
                    half //= 2
                total = k.register(extract(vector, 0))
                for at in k.range(whole, count):
                    total.value = reducer.combine(total.value, reducer.loaded((start + at).load()))
                numbers = count.to(s32)
                (target + row).store(reducer.finish(total.value, numbers, numbers))


@kernel
def reduce_columns(
    k: Builder,
    out: U8Pointer,
    x: U8Pointer,
    parameters: F32Pointer,
    outer: Int,
    count: Int,
    inner: Int,
    *,
    reduction: Reduction,
) -> None:
    """out[o, i] = the reduction of x[o, :count, i], contiguous. parameters: as in `Reducer`.

    A column's numbers are added 64 at a time, and then these sums.
    """
    lanes = k.isa.vector_bytes // 4
    reducer = Reducer(k, reduction, parameters, lanes)
    source, target = x.cast(FORMATS[reduction.format]), out.cast(FORMATS[reduction.out])
    blocks = (inner + (_COLUMN_BLOCK - 1)) // _COLUMN_BLOCK
    numbers = count.to(s32)
    for item in k.parallel(outer * blocks):
        image, begin = item // blocks, item % blocks * _COLUMN_BLOCK
        corner, place = source + image * count * inner + begin, target + image * inner + begin

        def some(
            at: Value,
            lanes: int,
            together: int,
            left: Value | None,
            corner: Value = corner,
            place: Value = place,
        ) -> None:
            with k.scope():
                totals = [k.register(reducer.start(lanes)) for _ in range(together)]
                parts = [k.register(reducer.start(lanes)) for _ in range(together)]
                for first in k.range(0, count, _SHORT):
                    for part in parts:
                        part.value = reducer.start(lanes)
                    for row in k.range(first, minimum(first + _SHORT, count)):
                        reducer.take(parts, corner + row * inner + at, left)
                    for total, part in zip(totals, parts, strict=True):
                        total.value = reducer.combine(total.value, part.value)
                for number, total in enumerate(totals):
                    made = reducer.finish(total.value, numbers, numbers)
                    store_vector(made, place + at + number * lanes, left)

        by_vectors(k, minimum(inner - begin, k.index(_COLUMN_BLOCK)), lanes, _TOGETHER, some)
