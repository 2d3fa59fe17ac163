"""The micro-kernel for split weights: four products summed in 16 bits, and lists added to that.

VPMADDUBSW adds two products of bytes, and saturates beyond 16 bits. Here two of its results are
added before VPMADDWD widens them: five instructions for 64 products, where the exact kernel, which
widens bytes first, takes eight and more. That is right for weights of which any such four are small
enough; shared/panel_format.py says how other weights are split to be so, and what has to be added.

That is a sum of few bytes of a row, other ones for each column. So rows are transposed once for
each step, and the sums made with a vector of 16 rows for each k of a list:

    transposed    k 0 | a0 a1 .. a15 |  u8         column n:  sum += k 17, sum -= k 40, ...
                  k 1 | a0 a1 .. a15 |

The sums of 16 columns are transposed back, and are what the products are added to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any

from lowbit.isa.avx2 import vpmaddubsw, vpmaddwd
from lowbit.isa.avx512 import vpmaddubsw_512, vpmaddwd_512
from lowbit.isa.generic import minimum, shuffle
from lowbit.isa.types import Vector, s8, s16, s32, s64, u8, u16, u32
from lowbit.isa.value import Register, Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.integer.micro_kernel import KernelQuery, Shape, Step, micro_kernel
from lowbit.kernels.cpu.integer.vectors import Begin, VectorKernel, from_zero
from lowbit.kernels.cpu.shared.formats import transposed
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, QUAD, QUADS, blocks
from lowbit.kernels.cpu.shared.panel_format import CYCLES, LISTED, SCALE, TAKEN, TOGETHER

# The micro-kernel for weights that cannot saturate: pairs of products summed in 16 bits.
#
# VPMADDUBSW is the fastest byte product without VNNI, and wrong where a pair sum leaves 16 bits.
# With a ≤ 255 it cannot, if of every two neighbouring weights along K the positive parts sum to at
# most 128, and the negative ones too: 255 · 128 = 32640. That is a property of the weights alone,
# which packing lets one prove; other weights are refused, and served by an exact kernel.

LARGEST_PAIR = 128  # the sum of two neighbouring weights of one sign that 255 times still fits

# Byte product and pair sum, by columns of a vector.
_INSTRUCTIONS = {16: (vpmaddubsw_512, vpmaddwd_512), 8: (vpmaddubsw, vpmaddwd)}
# Columns in a vector, most rows, panels, rows for nibbles.
_VARIANTS = {"avx512": (16, 8, 2, 16), "avx2": (8, 5, 1, 4)}


@micro_kernel("avx512", "avx2")
class Narrow(VectorKernel):
    """Some rows by one or two panels."""

    name = "narrow"
    preference = 1
    any_pairs = False

    def __init__(self, isa: str) -> None:
        super().__init__(isa, *_VARIANTS[isa])

    def refuses(self, query: KernelQuery) -> str:
        if query.largest_pair <= LARGEST_PAIR:
            return self._parts_pairs(query)
        return (
            f"neighbouring weights sum to {query.largest_pair}, and 16-bit sums could saturate "
            f"above {LARGEST_PAIR}"
        )

    def _parts_pairs(self, query: KernelQuery) -> str:
        """Why few columns of an odd K, whose last piece would begin within a pair, are refused."""
        if query.in_place and query.k % 2 and query.n <= self.lanes // 2:
            return "others multiply few columns in longer pieces, which may begin anywhere"
        return ""

    def multiply(
        self, k: Builder, lanes: int, rows: Iterable[Value], columns: list[Value],
        sums: list[list[Register]], signed: bool = False,
    ) -> None:  # fmt: skip
        size = lanes * QUAD
        unsigned, other = Vector(u8, size), Vector(s8, size)
        ones = k.constant(1, Vector(s16, 2 * lanes))
        multiply, add_pairs = _INSTRUCTIONS[lanes]
        for four, accumulators in zip(rows, sums, strict=True):
            for accumulator, column in zip(accumulators, columns, strict=True):
                pair = (column, four) if signed else (four, column)
                pairs = multiply(pair[0].bits(unsigned), pair[1].bits(other))
                accumulator.value = accumulator.value + add_pairs(pairs, ones)


_ROWS, _STEP_ROWS = 4, 32  # of a block; of a step, which shares the reading of lists
_ROW_LANES = 16
# Cycles for 32 products by `narrow` and by `widening`.
_NARROW, _WIDENING = 1.25, 2.05
# Cycles to transpose 16 rows of a k; for 16 rows of a chunk of 16 columns.
_TRANSPOSED, _CHUNKED = 4, 150


@micro_kernel("avx2")
class Split(Narrow):
    """Blocks of four rows by one panel; with lists, up to eight such blocks."""

    name = "split"
    preference = 2
    shortest_line = 0

    def __init__(self, isa: str) -> None:
        super().__init__(isa)
        self.most_rows = _ROWS

    def refuses(self, query: KernelQuery) -> str:
        if query.weight != "s8" or query.grouping:
            return "it multiplies weights of 8 bits"
        if query.split is None:
            return "weights are not split, and 16-bit sums could saturate"
        if not query.split.corrections:
            return self._parts_pairs(query)
        if query.in_place and query.n <= self.lanes:
            return "others multiply few columns in longer pieces of rows where they lie"
        ours, other = self._cycles(query)
        if ours >= other:
            return (
                f"{query.split.corrections} k in lists for 100 weights: some {ours:,} cycles, "
                f"and {other:,} without them"
            )
        return ""

    def _cycles(self, query: KernelQuery) -> tuple[int, int]:
        """About how many this kernel takes with lists, and the next one without."""
        assert query.split is not None
        shape, rows = self.shape(query)
        panels, chunks = blocks(query.n, PANEL), blocks(query.k, query.split.chunk)
        steps, lanes = blocks(query.m, rows * shape.row_blocks), _lanes(shape) // _ROW_LANES
        listed = query.split.corrections / 100 * PANEL * lanes * LISTED
        each = query.k * listed + chunks * lanes * _CHUNKED
        vectors = panels * query.k * query.m / 2
        rows_first = query.k * lanes * _TRANSPOSED
        ours = vectors * CYCLES[query.split.summed] + steps * (panels * each + rows_first)
        other = _NARROW if query.largest_pair <= LARGEST_PAIR else _WIDENING
        return int(ours), int(vectors * other)

    def shape(self, query: KernelQuery) -> tuple[Shape, int]:
        if query.split is None or not query.split.corrections:
            return super().shape(query)
        rows = blocks(query.m, blocks(query.m, _STEP_ROWS))
        row_blocks = blocks(rows, _ROWS)
        rows = blocks(rows, row_blocks)
        summed, _, chunk = query.split
        return Shape(rows, row_blocks, panels=1, summed=summed, chunk=chunk), rows

    def scratch_bytes(self, shape: Shape, k_blocks: int) -> int:
        if not shape.summed:
            return 0
        k = k_blocks * LINE
        return (k + blocks(k, shape.chunk)) * _lanes(shape)

    def begin_rows(
        self, k: Builder, shape: Shape, a: Value, block_bytes: Value, k_blocks: Value, memory: Value
    ) -> None:
        """Transpose the rows of a step: for each k all rows, and zeros before each chunk."""
        if not shape.summed:
            return
        lanes, chunk, target = _lanes(shape), shape.chunk, memory
        last = shape.rows * shape.row_blocks - 1
        for block in k.range(0, k_blocks):
            row = target + (block * LINE + block // (chunk // LINE) + 1) * lanes
            for part in k.range(0, LINE, _ROW_LANES):
                with k.scope():
                    vectors: list[Value] = []
                    for first in range(_ROW_LANES):
                        halves: list[Value] = []
                        for r in range(first, lanes, _ROW_LANES):
                            which, within = divmod(min(r, last), shape.rows)
                            line = block_bytes * which + block * (shape.rows * LINE)
                            halves.append((a + (line + within * LINE + part)).load(_ROW_LANES))
                        vectors.append(_joined(halves))
                    for i, vector in enumerate(transposed(vectors)):
                        (row + (part + i) * lanes).store(vector)
        for which in k.range(0, (k_blocks * LINE + (chunk - 1)) // chunk):
            (target + which * ((chunk + 1) * lanes)).store(k.zeros(u8, lanes))

    def step(self, k: Builder, session: Any, shape: Shape, step: Step, panels: int) -> None:
        if not shape.summed:
            super().step(k, session, shape, step, panels)
            return
        corrections = k.local(s32, _lanes(shape) * PANEL)
        self._correct(k, shape, step, corrections)
        pairs = (step.k_size + (2 * QUAD - 1)) // (2 * QUAD)
        places = [(0, at) for at in self.offsets]
        left = (step.rows - step.row + (shape.rows - 1)) // shape.rows
        for block in k.range(0, minimum(left, k.index(shape.row_blocks))):
            one = replace(
                step,
                a=step.a + block * step.block_bytes,
                row=step.row + block * shape.rows,
            )
            first = corrections + block * (shape.rows * PANEL)

            def begin(row: int, which: int, first: Value = first) -> Value:
                return (first + (row * PANEL + places[which][1])).load(self.lanes)

            with k.scope():
                sums = self._sums(k, shape, one, places, 1, (k.index(0), pairs), begin)
                self._finish(k, one, places, sums)

    def _correct(self, k: Builder, shape: Shape, step: Step, target: Value) -> None:
        """target[row, column], s32 [rows of a step, 16]: what is to be added to the sums."""
        assert step.behind is not None
        assert step.scratch is not None
        lanes, scratch, behind = _lanes(shape), step.scratch, step.behind
        sums = k.local(s16, PANEL * lanes)
        chunks = (step.k_size + (shape.chunk - 1)) // shape.chunk
        starts = behind.cast(s32) + step.panel * chunks * (PANEL // TOGETHER)

        def add(chunk: Value, first_chunk: bool) -> None:
            rows = scratch + chunk * ((shape.chunk + 1) * lanes)
            for group in k.range(0, PANEL // TOGETHER):
                start = starts + (chunk * (PANEL // TOGETHER) + group)
                span = start.load().to(s64), (start + 1).load().to(s64)
                with k.scope():
                    self._add_lists(k, behind.cast(u16), span, rows, sums, group, lanes)
            for first, half in product(range(0, lanes, _ROW_LANES), range(0, PANEL, self.lanes)):
                with k.scope():
                    self._transpose_back(sums, first, half, lanes, target, first_chunk)

        add(k.index(0), first_chunk=True)
        for chunk in k.range(1, chunks):
            add(chunk, first_chunk=False)

    def _add_lists(
        self, k: Builder, lists: Value, span: tuple[Value, Value], rows: Value, sums: Value,
        group: Value, lanes: int,
    ) -> None:  # fmt: skip
        """sums[column, row], s16, of four columns: over the k of their lists."""
        firsts = range(0, lanes, _ROW_LANES)
        totals = [[k.register(k.zeros(s16, _ROW_LANES)) for _ in firsts] for _ in range(TOGETHER)]
        for entry in k.range(*span, 2 * TOGETHER):
            for column, registers in enumerate(totals):
                plus, minus = (
                    rows + (lists + (entry + (2 * column + sign))).load().to(s64) * (lanes // SCALE)
                    for sign in range(2)
                )
                for first, total in zip(firsts, registers, strict=True):
                    more, less = (
                        (place + first).load(_ROW_LANES).to(s16) for place in (plus, minus)
                    )
                    total.value = total.value + more - less
        for column, registers in enumerate(totals):
            place = sums + (group * TOGETHER + column) * lanes
            for first, total in zip(firsts, registers, strict=True):
                (place + first).store(total.value)

    def _transpose_back(
        self, sums: Value, first: int, half: int, lanes: int, target: Value, fresh: bool
    ) -> None:
        """Add 16 rows of the sums of 8 columns, times what was taken, to `target`, or if `fresh`
        begin with them."""
        vectors = [(sums + (half + c) * lanes + first).load(_ROW_LANES) for c in range(self.lanes)]
        for i, both in enumerate(transposed(vectors)):  # rows i and 8 + i
            for part in range(2):
                lane = part * self.lanes
                row = shuffle(both, both, tuple(range(lane, lane + self.lanes))).to(s32)
                place = target + ((first + lane + i) * PANEL + half)
                more = row * TAKEN
                place.store(more if fresh else place.load(self.lanes) + more)

    def _sums(
        self, k: Builder, shape: Shape, step: Step, places: list[tuple[int, int]], parts: int,
        span: tuple[Value, Value], begin: Begin = from_zero,
    ) -> list[list[Value]]:  # fmt: skip
        """As its base, but 8 k together."""
        sums = self._begun(k, shape.rows, len(places), begin)
        self._resume(k, step, sums)
        for quad in k.range(span[0] * 2, span[1] * 2, 2):
            a = step.a + (quad // QUADS * (shape.rows * LINE) + quad % QUADS * QUAD)
            columns = [
                [self._bytes(shape, step, quad, place, which) for place in places]
                for which in range(2)
            ]
            if shape.summed == 2:
                for which in range(2):
                    fours = (
                        (a + (row * LINE + which * QUAD)).cast(u32).load().splat(self.lanes)
                        for row in range(shape.rows)
                    )
                    self.multiply(k, self.lanes, fours, columns[which], sums)
            else:
                self._multiply_eight(k, a, columns, sums)
        return [[register.value for register in row] for row in sums]

    def _multiply_eight(
        self, k: Builder, a: Value, columns: list[list[Value]], sums: list[list[Register]]
    ) -> None:
        """The products of 8 k: as `multiply`, with a list of columns for each 4."""
        unsigned, other = Vector(u8, self.lanes * QUAD), Vector(s8, self.lanes * QUAD)
        ones = k.constant(1, Vector(s16, 2 * self.lanes))
        for row, accumulators in enumerate(sums):
            fours = [(a + (row * LINE + which * QUAD)).cast(u32).load() for which in range(2)]
            left = [four.splat(self.lanes).bits(unsigned) for four in fours]
            for accumulator, *eight in zip(accumulators, *columns, strict=True):
                first, second = (
                    vpmaddubsw(one, column.bits(other))
                    for one, column in zip(left, eight, strict=True)
                )
                accumulator.value = accumulator.value + vpmaddwd(first + second, ones)


def _lanes(shape: Shape) -> int:
    """Rows of a step, rounded up to whole vectors."""
    return blocks(shape.rows * shape.row_blocks, _ROW_LANES) * _ROW_LANES


def _joined(halves: list[Value]) -> Value:
    """One vector, or two in one."""
    return halves[0] if len(halves) == 1 else shuffle(*halves, tuple(range(2 * _ROW_LANES)))
