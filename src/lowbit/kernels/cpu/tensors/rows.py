"""What kernels share that pass over a row several times: loops, sums, and where a row waits.

Vectors have 16 lanes on every instruction set, and each operation rounds as it does elsewhere, so
that the sums of all lanes, and with them every bit of the result, are the same everywhere.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

from lowbit.isa.generic import minimum, store_head
from lowbit.isa.types import Value, f32
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.rows.input_format import across

LANES = 16
_PARTS = 3  # partial sums: fewer would wait for themselves, more not fit 16 registers
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
    for at in each_rows(k, rows, item_rows, 1):
        yield from at


def each_rows(k: Builder, rows: Value, item_rows: Value, together: int) -> Iterator[list[Value]]:
    """The same over so many rows at a time, which do not wait for each other, and single ones."""
    for item in k.parallel((rows + (item_rows - 1)) // item_rows):
        first, last = item * item_rows, minimum(item * item_rows + item_rows, rows)
        whole = (last - first) // together * together + first
        for at in k.range(first, whole, together):
            yield [at + i for i in range(together)]
        for at in k.range(whole, last) if together > 1 else ():
            yield [at]


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
    return fold_rows(k, width, [vector], initial, combine)[0]


def fold_rows(
    k: Builder,
    width: Value,
    vectors: Sequence[Callable[[Value, Value | None], Value]],
    initial: float = 0.0,
    combine: Callable[[Value, Value], Value] = operator.add,
    take_in: Callable[[Value, Value], Value] | None = None,
) -> list[Value]:
    """The same for several rows at a time. `take_in`: how a partial result takes in a vector, if
    not by `combine`."""
    start = k.constant(initial, f32).splat(LANES)
    with k.scope():
        parts = [[k.register(start) for _ in range(_PARTS)] for _ in vectors]

        def take(at: Value, left: Value | None, part: int) -> None:
            for vector, of_row in zip(vectors, parts, strict=True):
                value = vector(at, left)
                if left is not None:
                    # There are no constants that differ from lane to lane, so memory makes the
                    # blend.
                    blend = k.local(f32, LANES)
                    blend.store(start)
                    store_head(value, blend, left)
                    value = blend.load(LANES)
                of_row[part].value = (take_in or combine)(value, of_row[part].value)

        each_vector(k, width, take)
        totals = [reduce(combine, (part.value for part in of_row)) for of_row in parts]
    return [across(total, combine) for total in totals]
