"""The micro-kernel for AMX: two by two tiles of accumulators, or one by four for few rows.

           b0 (6)  b1 (7)          For each 64 k: four loads and four products, and each product
    a0 (4)  c 0     c 1            takes as many cycles as a block has rows. With up to 16 rows a
    a1 (5)  c 2     c 3            single block of a would leave products waiting for each other,
                                   so it meets four panels at once.

Every line of an operand is one cache line, and 16 of them a contiguous kilobyte, which is what the
tile loads need to run at full speed. Tiles cannot be read lane by lane: sums go through scratch, a
kilobyte each. What happens to them then would leave the tile unit idle for as long as a short
product takes; so the rows of one step are finished while the next one is multiplied, a few of them
for each 64 k.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.isa.amx import (
    ROWS,
    TILES,
    ldtilecfg,
    tdpbusd,
    tileloadd,
    tilerelease,
    tilestored,
    tilezero,
)
from lowbit.isa.generic import minimum
from lowbit.isa.types import s32, u8
from lowbit.jit.builder import Builder
from lowbit.jit.value import Register, Value
from lowbit.kernels.cpu.layout import LINE, PANEL, blocks
from lowbit.kernels.micro_kernel import Columns, MicroKernel, Shape, Step
from lowbit.kernels.registry import micro_kernel

_TILE = ROWS * LINE  # bytes
_MOST_INTERLEAVED = 8  # rows finished for each 64 k; more would outlast the products


@dataclass
class _Session:
    """The step before, whose sums wait in scratch.

    scratch: for each panel the rows of all blocks, one after another. row, panel: where the step
    lies in the output; count: how many of its rows there are, of which the first `done` are
    finished.
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


@micro_kernel("amx")
class Amx(MicroKernel):
    """Two blocks of up to 16 rows by two panels, or one block by four panels."""

    name = "amx"

    def shape(self, m: int, lines: int) -> tuple[Shape, int]:
        depth, panels = (1, 4) if m <= ROWS else (2, 2)
        block_rows = blocks(m, depth * blocks(m, depth * ROWS))
        interleave = min(_MOST_INTERLEAVED, blocks(depth * block_rows, lines))
        return Shape(0, depth, panels, interleave), block_rows

    def begin(self, k: Builder, shape: Shape, block_rows: Value) -> _Session:
        """Shape the tiles: those of b have 16 rows, the others as many as a block."""
        config = k.local(u8, 64)
        config.store(k.zeros(u8, 64))
        config.store(k.constant(1, u8))
        first_b = shape.depth * shape.panels + shape.depth
        for number in range(TILES):
            (config + (16 + 2 * number)).store(k.constant(LINE, u8))
            rows = k.constant(ROWS, u8) if number >= first_b else block_rows.to(u8)
            (config + (48 + number)).store(rows)
        ldtilecfg(config, *(k.tile(i) for i in range(TILES)))
        scratch = [k.local(s32, shape.depth * ROWS * PANEL) for _ in range(shape.panels)]
        return _Session(scratch, *(k.register(k.index(0)) for _ in range(4)))

    def end(self, k: Builder) -> None:
        tilerelease(*(k.tile(i) for i in range(TILES)))

    def step(self, k: Builder, session: _Session, shape: Shape, step: Step, panels: int) -> None:
        tiles = [[k.tile(d * panels + p) for p in range(panels)] for d in range(shape.depth)]
        whole = panels == shape.panels
        if not whole:  # what comes now has fewer panels than the step before
            self.drain(k, session, shape, step.columns)
        for tile in (t for row in tiles for t in row):
            tilezero(tile)
        for line in k.range(0, step.lines):
            self._multiply(k, shape, step, tiles, line)
            if whole:
                session.finish(k, step.columns, panels, shape.interleave)
        if whole:
            session.finish(k, step.columns, panels, session.count.value)
        self._hand_over(k, session, step, tiles)
        if not whole:
            session.finish(k, step.columns, panels, session.count.value)

    def drain(self, k: Builder, session: _Session, shape: Shape, columns: Columns) -> None:
        session.finish(k, columns, shape.panels, session.count.value)

    @staticmethod
    def _multiply(
        k: Builder, shape: Shape, step: Step, tiles: list[list[Value]], line: Value
    ) -> None:
        """Add the products of 64 k."""
        first_a = shape.depth * shape.panels
        a_tiles = [k.tile(first_a + d) for d in range(shape.depth)]
        b_tiles = [k.tile(t) for t in range(first_a + shape.depth, TILES)]
        stride = k.index(LINE)
        for d, a_tile in enumerate(a_tiles):
            offset = step.block_bytes * d + line * step.block_rows * LINE
            tileloadd(a_tile, step.a + offset, stride)
        for p in range(len(tiles[0])):
            b_tile = b_tiles[p % len(b_tiles)]
            tileloadd(b_tile, step.b + (step.panel_bytes * p + line * _TILE), stride)
            for d, a_tile in enumerate(a_tiles):
                tdpbusd(tiles[d][p], a_tile, b_tile)

    @staticmethod
    def _hand_over(k: Builder, session: _Session, step: Step, tiles: list[list[Value]]) -> None:
        """Bring the sums to scratch, to be finished later; what was there is finished by now."""
        for d, row in enumerate(tiles):
            for sums, tile in zip(session.scratch, row, strict=False):
                tilestored(tile, sums + step.block_rows * (d * PANEL), k.index(LINE))
        session.row.value, session.panel.value = step.row, step.panel
        left = step.rows - step.row
        session.count.value = minimum(step.block_rows * len(tiles), left)
        session.done.value = k.index(0)
