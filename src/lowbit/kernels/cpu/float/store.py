"""What becomes of the sums of a step: alpha·sum + beta·c, rounded and stored."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.isa.generic import load_head, minimum, select, store_head
from lowbit.isa.types import bf16
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.shared.functions import canonical


@dataclass(frozen=True)
class Finish:
    """How sums become output: value = factors[0]·sum + factors[1]·source, if `reads`.

    Goes to `out` if this is where the sum `ends`, else to `partial`. m, n: rows and columns that
    there are.
    """

    source: Value
    source_stride: Value
    reads: Value
    factors: tuple[Value, Value]
    partial: Value
    partial_stride: Value
    out: Value
    out_stride: Value
    ends: Value
    m: Value
    n: Value


def store_tile(
    k: Builder, finish: Finish, place: tuple[Value, Value], sums: list[list[Value]], lanes: int,
    ragged: bool,
) -> None:  # fmt: skip
    """Finish and store sums [row][vector] at (row, column) `place`.

    `ragged`: the last vector may not be whole.
    """
    (row, column), rows = place, len(sums)
    for _ in k.when(row + (rows - 1) < finish.m):
        for r, values in enumerate(sums):
            _store_row(k, finish, (row + r, column), values, lanes, ragged)
    for _ in k.when(finish.m < row + rows):
        for r, values in enumerate(sums[:-1]):
            for _ in k.when(row + r < finish.m):
                _store_row(k, finish, (row + r, column), values, lanes, ragged)


class Pending:
    """The sums of the step before, row by row in scratch: they are finished in passing, a few rows
    at a time, while the next step is multiplied."""

    def __init__(self, k: Builder, scratch: Value) -> None:
        self.scratch = scratch
        self._row, self._column, self._done, self._count = (
            k.register(k.index(0)) for _ in range(4)
        )

    def put(self, finish: Finish, place: tuple[Value, Value], rows: int) -> None:
        """Scratch holds now what belongs there."""
        row, self._column.value = place
        self._row.value = row
        self._count.value = minimum(row.machine.constant(rows, row.type), finish.m - row)
        self._done.value = row.machine.constant(0, row.type)

    def finish(
        self, k: Builder, finish: Finish, vectors: int, lanes: int, ragged: bool,
        rows: int | None = None,
    ) -> None:  # fmt: skip
        """Finish and store so many rows more, as far as there are; None: all."""
        done, end = self._done.value, self._count.value
        last = end if rows is None else minimum(done + rows, end)
        line = vectors * lanes
        for r in k.range(done, last):
            values = [(self.scratch + (r * line + v * lanes)).load(lanes) for v in range(vectors)]
            place = self._row.value + r, self._column.value
            _store_row(k, finish, place, values, lanes, ragged)
        self._done.value = last


def _store_row(
    k: Builder, finish: Finish, place: tuple[Value, Value], sums: list[Value], lanes: int,
    ragged: bool,
) -> None:  # fmt: skip
    """Finish and store a row of vectors."""
    row, column = place
    left: list[Value | None] = [None] * len(sums)
    if ragged:
        left[-1] = finish.n - (column + (len(sums) - 1) * lanes)
    alpha, beta = (factor.splat(lanes) for factor in finish.factors)
    source = finish.source + (row * finish.source_stride + column)
    with k.scope():
        totals = [k.register(value * alpha) for value in sums]
        for _ in k.when(finish.reads):
            for v, (total, count) in enumerate(zip(totals, left, strict=True)):
                more = _load(source + v * lanes, count, lanes) * beta
                total.value = total.value + more
        values = [total.value for total in totals]
    if finish.out.type == finish.partial.type:
        target = finish.out + (row * finish.out_stride + column)
        for v, (value, count) in enumerate(zip(values, left, strict=True)):
            _store(canonical(value), target + v * lanes, count)
        return
    for _ in k.when(finish.ends):
        target = finish.out + (row * finish.out_stride + column)
        for v, (value, count) in enumerate(zip(values, left, strict=True)):
            _store(value.to(bf16), target + v * lanes, count)
    for _ in k.when(select(finish.ends, k.index(0), k.index(1)) > 0):
        partial = finish.partial + (row * finish.partial_stride + column)
        for v, (value, count) in enumerate(zip(values, left, strict=True)):
            _store(value, partial + v * lanes, count)


def _load(at: Value, count: Value | None, lanes: int) -> Value:
    return at.load(lanes) if count is None else load_head(at, count, lanes)


def _store(value: Value, at: Value, count: Value | None) -> None:
    if count is None:
        at.store(value)
    else:
        store_head(value, at, count)
