"""What kernels share that pass over a row several times: loops, sums, and where a row waits.

Vectors have 16 lanes on every instruction set, and sums are not fused, so that the sums of all
lanes, and with them every bit of the result, are the same everywhere.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from lowbit.isa.generic import minimum, store_head
from lowbit.isa.types import Value, f32
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.rows.input_format import across

LANES = 16
_PARTS = 2  # partial sums: one alone would wait for itself
_ITEM = 8192  # elements of an item, about

# (where a vector begins, how many of its lanes exist, None: all, number of the partial sum)
Body = Callable[[Value, Value | None, int], None]


class RowsPlan(NamedTuple):
    """words: the kernel's integers, by name. scratch_bytes: that each thread needs."""

    words: Mapping[str, int]
    scratch_bytes: int


def plan_rows(rows: int, width: int, **strides: int) -> RowsPlan:
    """Items of about `_ITEM` elements, and a row of float32 for each thread."""
    item_rows = max(1, _ITEM // max(width, 1))
    scratch = padded(width, LANES)
    words = {"rows": rows, "width": width, "item_rows": item_rows, "scratch_stride": scratch}
    return RowsPlan({**words, **strides}, scratch * f32.bytes)


def padded(count: int, size: int) -> int:
    """`count`, rounded up to a multiple."""
    return -(-count // size) * size


def each_row(k: Builder, rows: Value, item_rows: Value) -> Iterator[Value]:
    """A parallel region over rows, some to an item."""
    for item in k.parallel((rows + (item_rows - 1)) // item_rows):
        first = item * item_rows
        yield from k.range(first, minimum(first + item_rows, rows))


def each_vector(k: Builder, width: Value, body: Body) -> None:
    """Emit a loop over a row's vectors."""
    turn = LANES * _PARTS
    several, whole = width // turn * turn, width // LANES * LANES
    for at in k.range(0, several, turn):
        for part in range(_PARTS):
            body(at + part * LANES, None, part)
    for at in k.range(several, whole, LANES):
        body(at, None, 0)
    for _ in k.when(whole < width):
        body(whole, width - whole, 0)


def fold(
    k: Builder,
    width: Value,
    vector: Callable[[Value, Value | None], Value],
    initial: float = 0.0,
    combine: Callable[[Value, Value], Value] = operator.add,
) -> Value:
    """What `vector` makes of a row, vector by vector, combined into one scalar."""
    start = k.constant(initial, f32).splat(LANES)
    with k.scope():
        parts = [k.register(start) for _ in range(_PARTS)]

        def take(at: Value, left: Value | None, part: int) -> None:
            value = vector(at, left)
            if left is not None:
                # There are no constants that differ from lane to lane, so memory makes the blend.
                blend = k.local(f32, LANES)
                blend.store(start)
                store_head(value, blend, left)
                value = blend.load(LANES)
            parts[part].value = combine(value, parts[part].value)

        each_vector(k, width, take)
        total = parts[0].value
        for part in parts[1:]:
            total = combine(total, part.value)
    return across(total, combine)
