"""Sums over the elements of groups, a lane for each group, in the orders that numerics states.

Elements lie in memory one vector after another. Lanes never meet, so the bits of a sum do not
depend on how many there are, and so on no instruction set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lowbit.isa.generic import maximum, minimum, select
from lowbit.isa.types import Vector, f32
from lowbit.isa.value import Register, Value
from lowbit.jit.builder import Builder
from lowbit.numerics.ranges import PARTS, SPAN, TURN

# A vector of elements -> what is added to each sum.
Terms = Callable[[Value], Sequence[Value]]

_LEAF, _EIGHT, _DEPTH = 128, 8, 16


def ordered_sums(
    k: Builder, source: Value, size: Value, kind: Vector, count: int, terms: Terms
) -> list[Value]:
    """`count` sums, vectors of `kind`, as `numerics.ranges.ordered_sum` adds. Behind the last of
    `size` elements are zeros, whose terms are 0, up to a multiple of `PARTS`."""
    registers = PARTS * -(-kind.bytes // k.isa.vector_bytes)
    together = max(1, (k.isa.vector_registers - 2) // registers)
    sums: list[Value] = []
    for first in range(0, count, together):
        some = slice(first, min(first + together, count))
        sums += _sums(k, source, size, kind, some, terms)
    return sums


def _sums(
    k: Builder, source: Value, size: Value, kind: Vector, some: slice, terms: Terms
) -> list[Value]:
    """Those of some of the terms, as many as there are registers for."""
    lanes, zeros = kind.lanes, k.constant(0, kind)
    totals = [k.local(kind.element, lanes) for _ in range(some.start, some.stop)]
    for total in totals:
        total.store(zeros)
    length = select(size > 2 * SPAN, k.index(SPAN), maximum(size, k.index(1)))
    for span in k.range(0, size, length):
        with k.scope():
            sums = [[k.register(zeros) for _ in range(PARTS)] for _ in totals]
            end = minimum(span + length, size)
            whole = span + (end - span) // TURN * TURN

            def add(
                at: Value, starts: Sequence[int], sums: Sequence[Sequence[Register]] = sums
            ) -> None:
                for start in starts:
                    for part in range(PARTS):
                        vector = (source + (at + (start + part)) * lanes).load(lanes)
                        for one, term in zip(sums, terms(vector)[some], strict=True):
                            one[part].value = one[part].value + term

            for at in k.range(span, whole, TURN):
                add(at, range(TURN - PARTS, -1, -PARTS))
            for at in k.range(whole, end, PARTS):
                add(at, (0,))
            for total, (a, b, c, d) in zip(totals, sums, strict=True):
                total.store(total.load(lanes) + ((a.value + b.value) + (c.value + d.value)))
    return [total.load(lanes) for total in totals]


def leaves(size: int) -> list[tuple[int, int]]:
    """How `np.sum` adds a contiguous row of so many: (elements that are added together, how often
    the last two sums are then added), in order."""
    if size <= _LEAF:
        return [(size, 0)]
    half = size // 2 // _EIGHT * _EIGHT
    first, second = leaves(half), leaves(size - half)
    count, merges = second.pop()
    return [*first, *second, (count, merges + 1)]


def pairwise_sum(k: Builder, source: Value, plan: Value, count: Value, lanes: int) -> Value:
    """The sum of all elements, float32, by the `leaves` in `plan`, s64 [count, 2]."""
    stack = k.local(f32, _DEPTH * lanes)
    first, top = k.register(k.index(0)), k.register(k.index(0))
    for leaf in k.range(0, count):
        size = (plan + leaf * 2).load()
        (stack + top.value * lanes).store(_leaf(k, source + first.value * lanes, size, lanes))
        first.value = first.value + size
        top.value = top.value + 1
        for _ in k.range(0, (plan + (leaf * 2 + 1)).load()):
            top.value = top.value - 1
            last = stack + (top.value - 1) * lanes
            last.store(last.load(lanes) + (last + lanes).load(lanes))
    return stack.load(lanes)


def _leaf(k: Builder, source: Value, size: Value, lanes: int) -> Value:
    """In eight parts, then their sums, then what is left, one by one."""

    def element(at: Value | int) -> Value:
        return (source + at * lanes).load(lanes)

    with k.scope():
        total = k.register(k.zeros(f32, lanes))
        whole = size // _EIGHT * _EIGHT
        for _ in k.when(whole > 0):
            parts = [k.register(element(part)) for part in range(_EIGHT)]
            for at in k.range(_EIGHT, whole, _EIGHT):
                for part, register in enumerate(parts):
                    register.value = register.value + element(at + part)
            a, b, c, d, e, f, g, h = (part.value for part in parts)
            total.value = ((a + b) + (c + d)) + ((e + f) + (g + h))
        for at in k.range(whole, size):
            total.value = total.value + element(at)
        return total.value
