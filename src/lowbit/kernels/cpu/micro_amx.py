"""The micro-kernel for AMX: two by two tiles of accumulators, or one by four for few rows.

           b0 (6)  b1 (7)          For each 64 k: four loads and four products, and each product
    a0 (4)  c 0     c 1            takes as many cycles as a block has rows. With up to 16 rows a
    a1 (5)  c 2     c 3            single block of a would leave products waiting for each other,
                                   so it meets four panels at once.

Every line of an operand is one cache line, and 16 of them a contiguous kilobyte, which is what the
tile loads need to run at full speed. Tiles cannot be read lane by lane: the accumulators go through
a kilobyte of scratch each, which stays in the nearest cache.
"""

from __future__ import annotations

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
from lowbit.jit.value import Value
from lowbit.kernels.cpu.layout import GROUP, LINE, PANEL, blocks
from lowbit.kernels.micro_kernel import MicroKernel, Shape, Step
from lowbit.kernels.registry import micro_kernel

_TILE = ROWS * LINE  # bytes


@micro_kernel("amx")
class Amx(MicroKernel):
    """Two blocks of up to 16 rows by two panels, or one block by four panels."""

    name = "amx"

    def shape(self, m: int) -> tuple[Shape, int]:
        if m <= ROWS:
            return Shape(rows=0, depth=1, panels=4), m
        steps = blocks(m, 2 * ROWS)
        return Shape(rows=0, depth=2, panels=2), blocks(m, 2 * steps)

    def begin(self, k: Builder, shape: Shape, block_rows: Value) -> None:
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

    def end(self, k: Builder) -> None:
        tilerelease(*(k.tile(i) for i in range(TILES)))

    def step(self, k: Builder, shape: Shape, step: Step, panels: int) -> None:
        accumulators = shape.depth * shape.panels
        a_tiles = [k.tile(accumulators + d) for d in range(shape.depth)]
        b_tiles = [k.tile(t) for t in range(accumulators + shape.depth, TILES)]
        c_tiles = [[k.tile(d * panels + p) for p in range(panels)] for d in range(shape.depth)]
        stride = k.index(LINE)
        for tile in (t for row in c_tiles for t in row):
            tilezero(tile)
        for line in k.range(0, step.lines):
            for d, a_tile in enumerate(a_tiles):
                offset = step.block_bytes * d + line * step.block_rows * LINE
                tileloadd(a_tile, step.a + offset, stride)
            for p in range(panels):
                b_tile = b_tiles[p % len(b_tiles)]
                tileloadd(b_tile, step.b + (step.panel_bytes * p + line * _TILE), stride)
                for d, a_tile in enumerate(a_tiles):
                    tdpbusd(c_tiles[d][p], a_tile, b_tile)
        self._store(k, step, c_tiles)

    @staticmethod
    def _store(k: Builder, step: Step, c_tiles: list[list[Value]]) -> None:
        """Through scratch, all tiles at once so that none waits for another, into the epilogue."""
        panels = range(len(c_tiles[0]))
        scratch = [[k.local(s32, _TILE // GROUP) for _ in panels] for _ in c_tiles]
        for d, tiles in enumerate(c_tiles):
            for which in panels:
                tilestored(tiles[which], scratch[d][which], k.index(LINE))
        stores = [step.columns(which) for which in panels]
        for d, lines in enumerate(scratch):
            first = step.row + step.block_rows * d
            for r in k.range(0, minimum(step.block_rows, step.rows - first)):
                for which in panels:
                    stores[which](first + r, (lines[which] + r * PANEL).load(PANEL))
