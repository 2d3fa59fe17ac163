"""Rows in the order of the experts that they are sent to."""

from __future__ import annotations

from lowbit.isa.types import Int, S64Pointer, s64
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel


@kernel
def route(
    k: Builder,
    rows: S64Pointer,
    places: S64Pointer,
    ends: S64Pointer,
    experts: S64Pointer,
    count: Int,
    each: Int,
    groups: Int,
) -> None:
    """Sort pairs of a row and an expert by the expert, stably, by counting.

    experts: [count], from 0 to before `groups`; pair i is of row i // each. places[i]: where pair i
    went; rows: [count], of the pairs in order; ends: [groups], where those of an expert end.
    """
    for _ in k.parallel(k.index(1)):
        for group in k.range(0, groups):
            (ends + group).store(k.index(0))
        for pair in k.range(0, count):
            counted = ends + (experts + pair).load()
            counted.store(counted.load() + 1)
        total = k.register(k.constant(0, s64))
        for group in k.range(0, groups):
            found = (ends + group).load()
            (ends + group).store(total.value)
            total.value = total.value + found
        for pair in k.range(0, count):
            end = ends + (experts + pair).load()
            place = end.load()
            (places + pair).store(place)
            (rows + place).store(pair // each)
            end.store(place + 1)
