"""Rows of a table by their numbers: embeddings, Gather along any axis, and GatherElements."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lowbit.isa.generic import minimum, select
from lowbit.isa.types import F32Pointer, Int, S32Pointer, U8Pointer, s32, s64
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.shared.formats import (
    FORMATS,
    RAW,
    Convert,
    dequantizing,
    load_vector,
    parameters_of,
    same,
    store_vector,
    storing,
)
from lowbit.kernels.cpu.tensors.loops import by_vectors

_NUMBERS = 16384  # that an item moves, about
_TOGETHER = 4  # vectors


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
    kinds = RAW | FORMATS
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

                def some(
                    at: Value,
                    lanes: int,
                    together: int,
                    left: Value | None,
                    row: Value = row,
                    place: Value = place,
                    loaded: Convert = loaded,
                ) -> None:
                    for part in range(0, together * lanes, lanes):
                        value = loaded(load_vector(row + at + part, lanes, left))
                        store_vector(stored(value), place + at + part, left)

                by_vectors(k, inner, lanes, _TOGETHER, some, form.format in RAW)


def _converting(
    make: Callable[[str, list[Value]], Convert], name: str, parameters: Value, lanes: int
) -> Convert:
    """`storing` or `dequantizing` of a format."""
    numbers = [(parameters + i).load().splat(lanes) for i in range(parameters_of(name))]
    return same if name in RAW else make(name, numbers)
