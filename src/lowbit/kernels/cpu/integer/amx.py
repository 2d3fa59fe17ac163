"""The micro-kernel for AMX: two by two tiles of accumulators, or one by four for few rows.

           b0 (6)  b1 (7)          For each 64 k: four loads and four products, and each product
    a0 (4)  c 0     c 1            takes as many cycles as a block has rows. With up to 16 rows a
    a1 (5)  c 2     c 3            single block of a would leave products waiting for each other,
                                   so it meets four panels at once.

Every line of an operand is one cache line, and 16 of them a contiguous kilobyte, which is what the
tile loads need to run at full speed. Tiles cannot be read lane by lane: sums go through scratch, a
kilobyte each. What happens to them then would leave the tile unit idle for as long as a short
product takes; so the rows of one step are finished while the next one is multiplied, a few of them
for each 64 k. Panels pass by once for each step: those that the nearest cache cannot hold are
loaded so that they do not push the rows, which stay, out of it. A long K is cut into spans, between
which sums wait in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lowbit.isa import host
from lowbit.isa.amx import ROWS, TILES, tdpbusd, tileloadd, tileloaddt1, tilestored, tilezero
from lowbit.isa.generic import minimum
from lowbit.isa.types import s32
from lowbit.isa.value import Register, Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.integer.in_place import cycles_in_place
from lowbit.kernels.cpu.integer.micro_kernel import (
    Columns,
    KernelQuery,
    MicroKernel,
    Shape,
    Span,
    Step,
    micro_kernel,
    span,
)
from lowbit.kernels.cpu.integer.vnni import Vnni
from lowbit.kernels.cpu.shared.groups import Grouping, Groups
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, blocks
from lowbit.kernels.cpu.shared.tiles import configure, release

_TILE = ROWS * LINE  # bytes
FEW = 8  # rows of bytes for which vector registers unpack nibbles in passing
# Cycles to configure tiles and release them; to load one, as long as to multiply it by so many
# rows. And k of one row by 16 columns that vectors multiply in a cycle.
SETUP, _LOAD, _PER_CYCLE = 1000, 8, 8
# Cycles to pack a line of a row and to begin with it; to finish and store it, for each panel.
_PACK, _ROW, _STORE = 3, 2, 3
_VECTORS = Vnni("avx512_vnni")  # which serves what tiles refuse
_AHEAD, _RING = 2, 8  # blocks of 64 k that lines are made ahead of their products; that are kept
_MOST_INTERLEAVED = 8  # rows finished for each 64 k; more would outlast the products


@dataclass
class _Session:
    """The step before, whose sums wait in scratch.

    scratch: for each panel the rows of all blocks, one after another. row, panel: where the step
    lies in the output; count: how many of its rows of the output there are, of which the first
    `done` are finished.
    """

    scratch: list[Value]
    row: Register
    panel: Register
    count: Register
    done: Register

    def finish(self, k: Builder, columns: Columns, panels: int, rows: Value | int) -> None:
        """Finish some rows more, as far as there are."""
        end = minimum(self.done.value + rows, self.count.value)
        for _ in k.when(self.done.value < end):
            stores = [columns(self.panel.value + which, 0, PANEL) for which in range(panels)]
            for r in k.range(self.done.value, end):
                for store, sums in zip(stores, self.scratch, strict=False):
                    store(self.row.value + r, (sums + r * PANEL).load(PANEL))
            self.done.value = end


def _packed_at(shape: Shape, step: Step, block: Value, which: int) -> Value:
    """Of 64 k of a block of rows. Lines that are made in passing lie beside those of the other
    blocks, and in a ring."""
    lines = step.block_rows * LINE
    if step.make_lines is None:
        return step.block_bytes * which + block * lines
    return ((block & (shape.ring - 1)) * shape.row_blocks + which) * lines


@micro_kernel("amx")
class Amx(MicroKernel):
    """Two blocks of up to 16 rows by two panels, or one block by four panels."""

    name = "amx"
    per_cycle = 512

    def refuses(self, query: KernelQuery) -> str:
        why = super().refuses(query)
        if why:
            return why
        rows = query.m
        if query.weight != "s8":
            few = f"tiles read nibbles from memory only, and {rows} rows are few to share that"
            return few if rows <= FEW else ""
        panels = blocks(query.n, PANEL)
        tiles = SETUP + panels * (rows + query.k_blocks * max(rows, _LOAD))
        vectors = panels * rows * blocks(query.k, _PER_CYCLE)
        cut, _ = _VECTORS.shape(query)
        if cut.in_place:  # without what tiles need beside products
            tiles += rows * (_PACK * query.k_blocks + _ROW + _STORE * panels)
            vectors = int(rows * cycles_in_place(query, cut))
        if vectors <= tiles:
            return f"tiles would take some {tiles:,} cycles, and vectors {vectors:,}"
        return ""

    def shape(self, query: KernelQuery) -> tuple[Shape, int]:
        m, k_blocks, wide = query.m, query.k_blocks, blocks(query.n, PANEL)
        row_blocks, panels = (1, min(4, wide)) if m <= ROWS else (2, min(2, wide))
        rows = blocks(m, row_blocks * blocks(m, row_blocks * ROWS))
        interleave = min(_MOST_INTERLEAVED, blocks(row_blocks * rows, k_blocks))
        nearest = k_blocks * LINE * (query.n + row_blocks * rows)
        nearest_cache = host.caches()["L1d"]
        stays = nearest <= nearest_cache
        # Rows that meet all panels in one step are not read again.
        large = k_blocks * LINE * row_blocks * rows > nearest_cache // 2
        ring = _RING if wide == panels and large else 0
        spans = span(query, 2 * ROWS)
        shape = Shape(0, row_blocks, panels, interleave, span=spans, stays=stays, ring=ring)
        return shape, rows

    def begin(
        self, k: Builder, shape: Shape, block_rows: Value, grouping: Grouping | None = None
    ) -> _Session:
        """Shape the tiles: those of b have 16 rows, the others as many as a block."""
        first_b = shape.row_blocks * shape.panels + shape.row_blocks
        configure(k, [(block_rows, LINE)] * first_b + [(ROWS, LINE)] * (TILES - first_b))
        size = shape.row_blocks * ROWS * PANEL
        scratch = [k.local(s32, size) for _ in range(shape.panels)]
        row, panel, count, done = (k.register(k.index(0)) for _ in range(4))
        return _Session(scratch, row, panel, count, done)

    def end(self, k: Builder) -> None:
        release(k)

    def step(self, k: Builder, session: _Session, shape: Shape, step: Step, panels: int) -> None:
        whole = panels == shape.panels
        if not whole:  # what comes now has fewer panels than the step before
            self.drain(k, session, shape, step.columns, None)
        self._span(k, session, shape, step, panels)
        if not whole:
            session.finish(k, step.columns, panels, session.count.value)

    def _span(self, k: Builder, session: _Session, shape: Shape, step: Step, panels: int) -> None:
        """Multiply over some blocks of K, finish what came before meanwhile, and leave the sums."""
        tiles = [[k.tile(d * panels + p) for p in range(panels)] for d in range(shape.row_blocks)]
        part = (step.span.first, step.span.last) if step.span else (k.index(0), step.k_blocks)
        self._start(k, step, tiles)
        if step.make_lines:
            for block in k.range(0, _AHEAD):
                step.make_lines(block)
        for block in k.range(*part):
            if step.make_lines:
                step.make_lines(block + _AHEAD)
            self._multiply(k, shape, step, tiles, block)
            if panels < shape.panels:
                continue  # nothing is left of the step before
            session.finish(k, step.columns, panels, shape.interleave)
        session.finish(k, step.columns, panels, session.count.value)
        if step.span is None:
            self._hand_over(k, session, step, tiles)
            return
        for _ in k.when(step.span.last.equals(step.k_blocks)):
            self._hand_over(k, session, step, tiles)
        for _ in k.when(step.span.last < step.k_blocks):
            for tile, place in self._places(step.span, tiles):
                tilestored(tile, place, k.index(LINE))

    @staticmethod
    def _places(span: Span, tiles: list[list[Value]]) -> Iterator[tuple[Value, Value]]:
        """Each tile of sums, and where it waits for the next span."""
        for d, row in enumerate(tiles):
            for p, tile in enumerate(row):
                yield tile, span.sums + (p * len(tiles) + d) * (ROWS * PANEL)

    def _start(self, k: Builder, step: Step, tiles: list[list[Value]]) -> None:
        """Zeros, or the sums over the spans before."""
        span = step.span
        for _ in (0,) if span is None else k.when(span.first.equals(0)):
            for tile in (t for row in tiles for t in row):
                tilezero(tile)
        if span is not None:
            for _ in k.when(span.first > 0):
                for tile, place in self._places(span, tiles):
                    tileloadd(tile, place, k.index(LINE))

    def drain(
        self,
        k: Builder,
        session: _Session,
        shape: Shape,
        columns: Columns,
        groups: Groups | None,
    ) -> None:
        session.finish(k, columns, shape.panels, session.count.value)

    @staticmethod
    def _multiply(
        k: Builder, shape: Shape, step: Step, tiles: list[list[Value]], block: Value
    ) -> None:
        """Add the products of 64 k."""
        first_a = shape.row_blocks * shape.panels
        a_tiles = [k.tile(first_a + d) for d in range(shape.row_blocks)]
        b_tiles = [k.tile(t) for t in range(first_a + shape.row_blocks, TILES)]
        stride = k.index(LINE)
        for d, a_tile in enumerate(a_tiles):
            tileloadd(a_tile, step.a + _packed_at(shape, step, block, d), stride)
        load = tileloadd if shape.stays else tileloaddt1
        for p in range(len(tiles[0])):
            b_tile = b_tiles[p % len(b_tiles)]
            load(b_tile, step.b + (step.panel_bytes * p + block * _TILE), stride)
            for d, a_tile in enumerate(a_tiles):
                tdpbusd(tiles[d][p], a_tile, b_tile)

    @staticmethod
    def _hand_over(k: Builder, session: _Session, step: Step, tiles: list[list[Value]]) -> None:
        """Bring the sums to scratch, to be finished later; what was there is finished by now."""
        for d, row in enumerate(tiles):
            for sums, tile in zip(session.scratch, row, strict=False):
                tilestored(tile, sums + step.block_rows * (d * PANEL), k.index(LINE))
        session.row.value, session.panel.value = step.row, step.panel
        session.count.value = minimum(step.block_rows * len(tiles), step.rows - step.row)
        session.done.value = k.index(0)
