"""Rows of a table written, or added to, by their numbers: ScatterND and ScatterElements."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lowbit.isa.generic import maximum, minimum, select
from lowbit.isa.types import Int, S32Pointer, S64Pointer, U8Pointer, f32, s32, s64
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.shared.formats import RAW, load_vector, store_vector
from lowbit.kernels.cpu.shared.post_op import keeping_nan
from lowbit.kernels.cpu.tensors.loops import by_vectors

BLOCK = 4096  # elements of a row that an item writes, at most
_TOGETHER = 4  # vectors

ELEMENTS = {"f32": f32, "s32": s32, "s64": s64}
"""Formats of which there are reductions."""

REDUCTIONS: dict[str, Callable[[Value, Value], Value]] = {
    "add": lambda old, new: old + new,
    "mul": lambda old, new: old * new,
    "max": lambda old, new: keeping_nan(old, maximum(old, new)),
    "min": lambda old, new: keeping_nan(old, minimum(old, new)),
}


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
    lanes = k.isa.vector_bytes // element.bytes
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
                value = REDUCTIONS[form.reduction](load_vector(place, lanes, left), value)
            store_vector(value, place, left)

    by_vectors(k, length, lanes, _TOGETHER, some, form.format in RAW)
