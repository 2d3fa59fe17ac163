"""What becomes of the sums of a step: alpha·sum + beta·c, rounded and stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowbit.isa.generic import minimum, select
from lowbit.isa.types import element_of
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.shared.formats import Convert, load_vector, same, store_vector, storing


@dataclass(frozen=True)
class FloatEpilogue:
    """How sums become output [m, n]: value = factors[0]·sum + factors[1]·source, if `reads`.

    It goes to `out`; but where the sum does not end, as `ends` says, to `partial`, float32.
    """

    k: Builder
    source: Value
    source_stride: Value
    reads: Value
    factors: tuple[Value, Value]
    out: Value
    out_stride: Value
    m: Value
    n: Value
    partial: Value
    partial_stride: Value
    ends: Value | None = None

    def tile(self, place: tuple[Value, Value], sums: list[list[Value]], ragged: bool) -> None:
        """Finish and store sums [row][vector] at (row, column) `place`.

        `ragged`: the last vector may not be whole.
        """
        k, (row, column), rows = self.k, place, len(sums)
        for _ in k.when(row + (rows - 1) < self.m):
            for r, values in enumerate(sums):
                self.row((row + r, column), values, ragged)
        for _ in k.when(self.m < row + rows):
            for r, values in enumerate(sums[:-1]):
                for _ in k.when(row + r < self.m):
                    self.row((row + r, column), values, ragged)

    def row(self, place: tuple[Value, Value], sums: Sequence[Value], ragged: bool) -> None:
        """Finish and store a row of vectors."""
        k, (row, column), lanes = self.k, place, sums[0].lanes
        left: list[Value | None] = [None] * len(sums)
        if ragged:
            left[-1] = self.n - (column + (len(sums) - 1) * lanes)
        alpha, beta = (factor.splat(lanes) for factor in self.factors)
        source = self.source + (row * self.source_stride + column)
        with k.scope():
            totals = [k.register(value * alpha) for value in sums]
            for _ in k.when(self.reads):
                for v, (total, count) in enumerate(zip(totals, left, strict=True)):
                    more = load_vector(source + v * lanes, lanes, count) * beta
                    total.value = total.value + more
            values = [total.value for total in totals]

        def store(out: Value, stride: Value, convert: Convert) -> None:
            target = out + (row * stride + column)
            for v, (value, count) in enumerate(zip(values, left, strict=True)):
                store_vector(convert(value), target + v * lanes, count)

        rounded = storing(str(element_of(self.out.type)), ())
        if self.ends is None:
            store(self.out, self.out_stride, rounded)
            return
        for _ in k.when(self.ends):
            store(self.out, self.out_stride, rounded)
        for _ in k.when(select(self.ends, k.index(0), k.index(1)) > 0):
            store(self.partial, self.partial_stride, same)


class PendingTile:
    """The sums of the step before, row by row in scratch: they are finished in passing, a few rows
    at a time, while the next step is multiplied."""

    def __init__(self, k: Builder, scratch: Value, lanes: int) -> None:
        self._k, self.scratch, self._lanes = k, scratch, lanes
        self._row, self._column, self._done, self._count = (
            k.register(k.index(0)) for _ in range(4)
        )

    def put(self, epilogue: FloatEpilogue, place: tuple[Value, Value], rows: int) -> None:
        """Scratch holds now what belongs there."""
        row, self._column.value = place
        self._row.value = row
        self._count.value = minimum(row.machine.constant(rows, row.type), epilogue.m - row)
        self._done.value = row.machine.constant(0, row.type)

    def finish(
        self, epilogue: FloatEpilogue, vectors: int, ragged: bool, rows: int | None = None
    ) -> None:
        """Finish and store so many rows more, as far as there are; None: all."""
        done, end = self._done.value, self._count.value
        last = end if rows is None else minimum(done + rows, end)
        line, lanes = vectors * self._lanes, self._lanes
        for r in self._k.range(done, last):
            values = [(self.scratch + (r * line + v * lanes)).load(lanes) for v in range(vectors)]
            epilogue.row((self._row.value + r, self._column.value), values, ragged)
        self._done.value = last
