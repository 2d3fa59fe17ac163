"""Indices of several axes as indices of one: what GatherND reads."""

from __future__ import annotations

from lowbit.isa.generic import minimum, select
from lowbit.isa.types import Int, S64Pointer, U8Pointer, s64
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.shared.formats import FORMATS

_BLOCK = 4096  # indices of an item


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
    for item in k.parallel((count + (_BLOCK - 1)) // _BLOCK):
        begin = item * _BLOCK
        for number in k.range(begin, minimum(begin + _BLOCK, count)):
            place, wrong, whole = k.constant(0, s64), k.constant(0, s64), k.constant(1, s64)
            for axis in range(axes):
                size = (sizes + axis).load()
                given = (source + (number * axes + axis)).load().to(s64)
                index = select(given < 0, given + size, given)
                wrong = select((index < 0) | (index > size - 1), k.constant(1, s64), wrong)
                place, whole = place * size + index, whole * size
            (flat + number).store(select(wrong > 0, whole, place))
