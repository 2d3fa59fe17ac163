"""Elements by their numbers: read, written, and the numbers of several axes as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lowbit.isa.generic import minimum, select
from lowbit.isa.types import F32Pointer, Int, S32Pointer, S64Pointer, U8Pointer, f32, s32, s64
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.shared.formats import (
    FORMATS,
    RAW,
    WHOLE,
    Convert,
    dequantizing,
    load_vector,
    parameters_of,
    same,
    store_vector,
    storing,
)
from lowbit.kernels.cpu.tensors import integers
from lowbit.kernels.cpu.tensors.elementwise import OPERATIONS
from lowbit.kernels.cpu.tensors.loops import TOGETHER, by_vectors, convert_row

# Rows of a table by their numbers: embeddings, Gather along any axis, and GatherElements.

_NUMBERS = 16384  # that an item moves, about


class GatherForm(NamedTuple):
    """What is moved. It keys the code.

    format, out: of the table and the output; of a copy, one of `RAW` in both. indices: "s32" or
    "s64".
    """

    format: str
    out: str
    indices: str = "s64"


def gather_block(row: int) -> int:
    """How many indices an item should have, of rows of so many elements."""
    return max(1, _NUMBERS // max(1, row))


@kernel
def gather(
    k: Builder,
    out: U8Pointer,
    table: U8Pointer,
    indices: U8Pointer,
    table_parameters: F32Pointer,
    parameter_stride: Int,
    out_parameters: F32Pointer,
    outside: S32Pointer,
    outer: Int,
    rows: Int,
    count: Int,
    inner: Int,
    index_stride: Int,
    block: Int,
    *,
    form: GatherForm,
) -> None:
    """out[o, i] = table[o, indices[i]], each `inner` elements; negative indices count from the end.

    table: [outer, rows, inner]; out: [outer, count, inner]; contiguous. table_parameters: scale and
    zero point of a table of integers, for its row r at `parameter_stride` · r: 0 if all rows have
    the same, 2 if each has its own. out_parameters: 1 / scale and zero point of an 8-bit output.
    outside: one s32, which the caller has made 0; 1 afterwards if an index is out of range, whose
    row of the output is then left as it is. index_stride: from the indices of one `o` to those of
    the next; 0 if all have the same. block: indices of an item.
    """
    kinds = RAW | FORMATS | WHOLE
    source, target = table.cast(kinds[form.format]), out.cast(kinds[form.out])
    lanes = k.isa.vector_bytes // (kinds[form.format].bytes if form.format in RAW else 4)
    stored = _converting(storing, form.out, out_parameters, lanes)
    wanted = indices.cast(FORMATS.get(form.indices) or s64)
    blocks = (count + (block - 1)) // block
    for item in k.parallel(outer * blocks):
        layer, begin = item // blocks, item % blocks * block
        for number in k.range(begin, minimum(begin + block, count)):
            given = (wanted + (layer * index_stride + number)).load().to(s64)
            index = select(given < 0, given + rows, given)
            for _ in k.when((index < 0) | (index > rows - 1)):
                outside.store(k.constant(1, s32))
            for _ in k.when((index > -1) & (index < rows)):
                row = source + (layer * rows + index) * inner
                place = target + (layer * count + number) * inner
                own = table_parameters + index * parameter_stride
                loaded = _converting(dequantizing, form.format, own, lanes)
                convert_row(k, row, place, inner, lanes,
                            lambda value, loaded=loaded: stored(loaded(value)),
                            form.format in RAW)  # fmt: skip


def _converting(
    make: Callable[[str, list[Value]], Convert], name: str, parameters: Value, lanes: int
) -> Convert:
    """`storing` or `dequantizing` of a format."""
    numbers = [(parameters + i).load().splat(lanes) for i in range(parameters_of(name))]
    return same if name in RAW else make(name, numbers)


# Rows of a table written, or added to, by their numbers: ScatterND and ScatterElements.

BLOCK = 4096  # elements of a row that an item writes, at most

ELEMENTS = {"f32": f32, **WHOLE}
"""Formats of which there are reductions, and running sums."""

REDUCTIONS = ("add", "mul", "max", "min")


def combining(name: str, format: str) -> Callable[[Value, Value], Value]:
    """One of `REDUCTIONS`, of numbers of one of `ELEMENTS`. Of booleans a sum is whether any holds,
    and a product whether all do."""
    if format == "bool":
        name = {"add": "max", "mul": "min"}.get(name, name)
    return (OPERATIONS if format == "f32" else integers.OPERATIONS)[name][1]


class ScatterForm(NamedTuple):
    """What is written. It keys the code.

    format: one of `ELEMENTS`, or, without a reduction, of `RAW`. indices: "s32" or "s64".
    reduction: one of `REDUCTIONS`, or "none", where the last of several updates stays.
    """

    format: str
    indices: str
    reduction: str


@kernel
def scatter(
    k: Builder,
    out: U8Pointer,
    updates: U8Pointer,
    indices: U8Pointer,
    sizes: S64Pointer,
    outside: S32Pointer,
    outer: Int,
    rows: Int,
    count: Int,
    inner: Int,
    depth: Int,
    index_stride: Int,
    *,
    form: ScatterForm,
) -> None:
    """out[o, row(indices[o, i])] = updates[o, i], or reduced with it, in the order of i.

    out: [outer, rows, inner]; updates: [outer, count, inner]; indices: [outer, count, depth], or,
    with an index_stride of 0 in place of `count`, [count, depth]; contiguous. The row of an index
    is its place in an array of `sizes` [depth]; what is negative counts from the end. outside: as
    in `gather`; what has no row is not written.
    """
    element = (RAW | ELEMENTS)[form.format]
    lanes = k.isa.vector_bytes // (element.bytes if form.format in RAW else max(4, element.bytes))
    target, source = out.cast(element), updates.cast(element)
    wanted = indices.cast(s32 if form.indices == "s32" else s64)
    zero, one = k.constant(0, s64), k.constant(1, s64)
    blocks = (inner + (BLOCK - 1)) // BLOCK
    for item in k.parallel(outer * blocks):
        layer, begin = item // blocks, item % blocks * BLOCK
        length = minimum(inner - begin, k.constant(BLOCK, s64))
        for number in k.range(0, count):
            row, wrong = k.register(zero), k.register(zero)
            for axis in k.range(0, depth):
                place = (layer * index_stride + number) * depth + axis
                given, size = (wanted + place).load().to(s64), (sizes + axis).load()
                index = select(given < 0, given + size, given)
                wrong.value = select((index < 0) | (index > size - 1), one, wrong.value)
                row.value = row.value * size + index
            for _ in k.when(wrong.value > 0):
                outside.store(k.constant(1, s32))
            for _ in k.when(wrong.value < 1):
                new = source + ((layer * count + number) * inner + begin)
                old = target + ((layer * rows + row.value) * inner + begin)
                _write(k, old, new, length, lanes, form)


def _write(
    k: Builder, target: Value, source: Value, length: Value, lanes: int, form: ScatterForm
) -> None:
    """A part of a row."""

    def some(at: Value, lanes: int, together: int, left: Value | None) -> None:
        for part in range(0, together * lanes, lanes):
            value = load_vector(source + at + part, lanes, left)
            place = target + at + part
            if form.reduction != "none":
                combine = combining(form.reduction, form.format)
                value = combine(load_vector(place, lanes, left), value)
            store_vector(value, place, left)

    by_vectors(k, length, lanes, TOGETHER, some, form.format in RAW)


# Indices of several axes as indices of one: what GatherND reads.

_INDICES = 4096  # indices of an item


@kernel
def flat_indices(
    k: Builder,
    flat: S64Pointer,
    indices: U8Pointer,
    sizes: S64Pointer,
    count: Int,
    *,
    axes: int,
    format: str,
) -> None:
    """flat[i] = where indices[i, :axes] is in an array of these sizes, in C order.

    indices: "s32" or "s64" by `format`; negative ones count from the end. flat[i] is the product of
    the sizes, which is no element, where one of the indices is out of range.
    """
    source = indices.cast(FORMATS.get(format) or s64)
    for item in k.parallel((count + (_INDICES - 1)) // _INDICES):
        begin = item * _INDICES
        for number in k.range(begin, minimum(begin + _INDICES, count)):
            place, wrong, whole = k.constant(0, s64), k.constant(0, s64), k.constant(1, s64)
            for axis in range(axes):
                size = (sizes + axis).load()
                given = (source + (number * axes + axis)).load().to(s64)
                index = select(given < 0, given + size, given)
                wrong = select((index < 0) | (index > size - 1), k.constant(1, s64), wrong)
                place, whole = place * size + index, whole * size
            (flat + number).store(select(wrong > 0, whole, place))
