"""The micro-kernels for AArch64: rows by one panel, on registers of 4 columns.

`Dot` keeps four registers for each row. A line of b is four registers of 4 columns by 4 k, and 16
bytes of a row of a are four groups of 4 k, of which SDOT and SUDOT (what USDOT by an element is
called) pick one by its number: nothing is broadcast.

               b 0-3   b 4-7   b 8-11  b 12-15        4 rows: 16 accumulators, 4 registers of b and
    a0[i]  |   v0      v1      v2      v3             4 of a. For each 16 k: 16 loads of b and 4 of
    ..                                                a feed 64 products.
    a3[i]  |   v12     v13     v14     v15

Without i8mm no product takes u8 times s8. With a = a' + 128, where a' = a xor 128 is signed,

    Σ a·b = Σ a'·b + 128·Σ b

and Σ b costs as much as one more row, whose elements are 1. It is the same for all rows, so a step
takes several blocks of rows and makes it once for them: with 8 blocks of 4 rows, 3 % of the
products. (Making b unsigned for UDOT instead needs Σ a, which is cheap, but an exclusive-or for
each register of b in every block: 25 % at 4 rows.)

`Matrix` uses USMMLA, 2 rows by 8 k times 8 k by 2 columns, twice as much as USDOT. Its operands are
8 bytes of each of two rows, and two lines of b zipped by groups of 4 k:

               b 0-1   b 2-3   ...   b 14-15          4 rows: 16 accumulators of 2 by 2. For each
    a0, a1 |   v0      v1            v7               8 k: 8 zips of b and 2 joined pairs of rows
    a2, a3 |   v8      v9            v15              beside 16 products; USDOT would need 32.

Six rows would share the zips better, but LLVM 22 then spills: 24 accumulators leave it too few
registers for its order of loads.

Both instructions run at the same rate and take an accumulator again after one cycle, so there are
no partial sums (Arm Neoverse N2 and V1 Core Software Optimization Guides, "ASIMD integer
instructions": SDOT, USDOT and USMMLA as often a cycle as there are pipes, latency 3(1)).
"""

from __future__ import annotations

from typing import Any

from lowbit.isa.generic import shuffle
from lowbit.isa.neon import sdot, usdot, usmmla
from lowbit.isa.types import Vector, s8, s32, u8, u32
from lowbit.isa.value import Register, Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.integer.micro_kernel import (
    KernelQuery,
    MicroKernel,
    Shape,
    Step,
    micro_kernel,
)
from lowbit.kernels.cpu.shared.layout import FLIP, LINE, PANEL, QUAD, blocks

_LANES = 4  # columns in a register of b, and groups of 4 k in one of a
_BYTES = _LANES * QUAD
_VECTORS = PANEL // _LANES
_BLOCK_LINES = LINE * LINE // QUAD  # bytes of a panel for the 64 k of one block

_MOST_ROWS = 4  # of a block
_SHARING = 8  # most blocks that share one sum of b
_MATRIX_K = 2 * QUAD


def _rows(m: int, multiple: int) -> int:
    """The rows of a block: fewest loads and products, those for missing rows included."""
    sizes = range(multiple, _MOST_ROWS + 1, multiple)
    return min(sizes, key=lambda rows: (blocks(m, rows) * (rows + 1), -rows))


def _accumulators(k: Builder, count: int) -> list[Register]:
    return [k.register(k.zeros(s32, _LANES)) for _ in range(count)]


def _joined(vectors: list[Value]) -> Value:
    """Four registers as one vector of 16 columns; LLVM takes it apart without an instruction."""
    lanes = _LANES
    while len(vectors) > 1:
        lanes *= 2
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [shuffle(low, high, tuple(range(lanes))) for low, high in pairs]
    return vectors[0]


@micro_kernel("neon_dotprod", "neon_i8mm")
class Dot(MicroKernel):
    """Up to 4 rows by one panel; several blocks of them where a has to be made signed."""

    name = "dot"

    def __init__(self, isa: str) -> None:
        super().__init__(isa)
        self._mixed = isa == "neon_i8mm"

    def shape(self, query: KernelQuery) -> tuple[Shape, int]:
        rows = _rows(query.m, multiple=1)
        depth = 1 if self._mixed else min(_SHARING, blocks(query.m, rows))
        return Shape(rows, row_blocks=depth, panels=1), rows

    def step(self, k: Builder, session: Any, shape: Shape, step: Step, panels: int) -> None:
        column_sums = [] if self._mixed else _accumulators(k, _VECTORS)
        # Several blocks need the sums of b before they start, a single one makes them in passing.
        shared = shape.row_blocks > 1
        if shared:
            self._sweep(k, step, step.a, [], column_sums)
        store = step.columns(step.panel, 0, PANEL)
        for block in k.range(0, shape.row_blocks):
            first = step.row + block * shape.rows
            for _ in k.when(first < step.rows):
                with k.scope():
                    sums = [_accumulators(k, _VECTORS) for _ in range(shape.rows)]
                    a = step.a + block * step.block_bytes
                    self._sweep(k, step, a, sums, [] if shared else column_sums)
                    for row, accumulators in enumerate(sums):
                        for _ in k.when(first + row < step.rows):
                            store(first + row, self._total(accumulators, column_sums))

    @staticmethod
    def _total(accumulators: list[Register], column_sums: list[Register]) -> Value:
        vectors = [accumulator.value for accumulator in accumulators]
        if column_sums:
            offsets = [total.value * FLIP for total in column_sums]
            vectors = [v + offset for v, offset in zip(vectors, offsets, strict=True)]
        return _joined(vectors)

    def _sweep(
        self, k: Builder, step: Step, a: Value, sums: list[list[Register]],
        column_sums: list[Register],
    ) -> None:  # fmt: skip
        """Along K: add the products of a block of rows to `sums`, of ones to `column_sums`."""
        ones = k.constant(1, Vector(s8, _BYTES))
        for line in k.range(0, step.k_blocks):
            left = a + line * (len(sums) * LINE)
            right = step.b + line * _BLOCK_LINES
            for at in k.range(0, LINE, _BYTES):
                quads = [self._signs(left + (row * LINE + at)) for row in range(len(sums))]
                for group in range(_LANES):
                    place = right + (at * PANEL + group * LINE)
                    columns = [(place + v * _BYTES).cast(s8).load(_BYTES) for v in range(_VECTORS)]
                    for column, total in zip(columns, column_sums, strict=False):
                        total.value = sdot(total.value, column, ones)
                    for quad, accumulators in zip(quads, sums, strict=True):
                        self._multiply(quad, group, columns, accumulators)

    def _signs(self, a: Value) -> Value:
        """16 k of one row as four groups, made signed if they must be."""
        values = a.load(_BYTES)
        return (values if self._mixed else values ^ FLIP).bits(Vector(u32, _LANES))

    def _multiply(
        self, quads: Value, group: int, columns: list[Value], accumulators: list[Register]
    ) -> None:
        """Add the products of one of the four groups of 4 k of a row."""
        four = shuffle(quads, quads, (group,) * _LANES)
        for accumulator, column in zip(accumulators, columns, strict=True):
            if self._mixed:
                accumulator.value = usdot(accumulator.value, four.bits(Vector(u8, _BYTES)), column)
            else:
                accumulator.value = sdot(accumulator.value, column, four.bits(Vector(s8, _BYTES)))


@micro_kernel("neon_i8mm")
class Matrix(MicroKernel):
    """One or two pairs of rows by one panel."""

    name = "matrix"
    preference = 1

    def refuses(self, query: KernelQuery) -> str:
        if query.m == 1:
            return "rows go in pairs, and one row would waste half of each product"
        return super().refuses(query)

    def shape(self, query: KernelQuery) -> tuple[Shape, int]:
        rows = _rows(query.m, multiple=2)
        return Shape(rows, row_blocks=1, panels=1), rows

    def step(self, k: Builder, session: Any, shape: Shape, step: Step, panels: int) -> None:
        sums = [_accumulators(k, PANEL // 2) for _ in range(0, shape.rows, 2)]
        for line in k.range(0, step.k_blocks):
            left = step.a + line * (shape.rows * LINE)
            right = step.b + line * _BLOCK_LINES
            for at in k.range(0, LINE, _MATRIX_K):
                self._multiply(left + at, right + at * PANEL, sums)
        store = step.columns(step.panel, 0, PANEL)
        for row in range(shape.rows):
            for _ in k.when(step.row + row < step.rows):
                store(step.row + row, self._row(sums[row // 2], row % 2))

    @staticmethod
    def _multiply(a: Value, b: Value, sums: list[list[Register]]) -> None:
        """Add the products of 8 k to every accumulator."""
        pairs = []
        for number in range(len(sums)):
            rows = [(a + row * LINE).load(_MATRIX_K) for row in (2 * number, 2 * number + 1)]
            pairs.append(shuffle(*rows, tuple(range(_BYTES))))
        for v in range(_VECTORS):
            lines = [(b + (line * LINE + v * _BYTES)).cast(u32).load(_LANES) for line in range(2)]
            for half, lanes in enumerate(((0, 4, 1, 5), (2, 6, 3, 7))):
                columns = shuffle(*lines, lanes).bits(Vector(s8, _BYTES))
                for pair, accumulators in zip(pairs, sums, strict=True):
                    accumulator = accumulators[2 * v + half]
                    accumulator.value = usmmla(accumulator.value, pair, columns)

    @staticmethod
    def _row(accumulators: list[Register], which: int) -> Value:
        """One row of a pair: two columns of each accumulator."""
        lanes = ((0, 1, 4, 5), (2, 3, 6, 7))[which]
        pairs = zip(accumulators[::2], accumulators[1::2], strict=True)
        return _joined([shuffle(low.value, high.value, lanes) for low, high in pairs])
