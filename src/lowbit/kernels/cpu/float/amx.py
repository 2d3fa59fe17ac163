"""The inner loop of bfloat16 products for AMX: two by two tiles, or one by four for few rows.

       b0 (6)  b1 (7)          A tile of a is 16 rows of 32 k, one of b 16 pairs of k of 16
a0 (4)  c 0     c 1            columns: each of their rows is one cache line of the packed
a1 (5)  c 2     c 3            operands, or of rows copied beside each other. Tiles cannot be read
                               lane by lane: the sums go through scratch, and are finished while
                               the next step is multiplied. Panels pass by once for each block of
                               rows: they are loaded so that they do not push it from the cache.
"""

from __future__ import annotations

from lowbit.isa.amx import (
    AMX_BF16,
    ROW_BYTES,
    ROWS,
    TILES,
    tdpbf16ps,
    tileloadd,
    tileloaddt1,
    tilestored,
    tilezero,
)
from lowbit.isa.types import f32
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.float.micro_kernel import (
    FloatMicro,
    Left,
    PackedLeft,
    PackedRight,
    Passing,
    PlainLeft,
    Right,
    register,
)
from lowbit.kernels.cpu.shared.tiles import configure, release

_UNITS = ROW_BYTES // 4  # pairs of k in a row of a tile of a; also the columns in a row of b's


class TileMicro(FloatMicro):
    """Blocks of 16 or 32 rows by panels of 4 or 2 vectors of 16 columns."""

    name = "tiles"
    pair = True
    plain = False
    line = _UNITS
    quantum = 2 * _UNITS
    in_registers = False

    def shapes(self, alone: bool = False) -> list[tuple[int, int]]:
        return [(2 * ROWS, 2), (ROWS, 4), (2 * ROWS, 1), (ROWS, 3), (ROWS, 2), (ROWS, 1)]

    def begin(self, k: Builder) -> None:
        configure(k)

    def end(self, k: Builder) -> None:
        release(k)

    def step(
        self, k: Builder, sizes: tuple[int, int], left: Left, right: Right, units: Value,
        passing: Passing | None = None,
    ) -> list[list[Value]]:  # fmt: skip
        assert isinstance(right, PackedRight)
        assert passing is not None
        rows, vectors = sizes
        depth = rows // ROWS
        sums = [[k.tile(d * vectors + v) for v in range(vectors)] for d in range(depth)]
        a_tiles = [k.tile(depth * vectors + d) for d in range(depth)]
        b_tiles = [k.tile(t) for t in range(depth * vectors + depth, TILES)]
        b_stride = k.index(4 * right.width)
        for tile in (t for row in sums for t in row):
            tilezero(tile)
        for unit in k.range(0, units, _UNITS):
            for d, a_tile in enumerate(a_tiles):
                tileloadd(a_tile, *_rows_of(k, left, unit, d))
            for v in range(vectors):
                b_tile = b_tiles[v % len(b_tiles)]
                offset = unit * right.width + v * self.lanes
                tileloaddt1(b_tile, right.base + offset, b_stride)
                for d, a_tile in enumerate(a_tiles):
                    tdpbf16ps(sums[d][v], a_tile, b_tile)
            passing.some()
        passing.rest()
        stride = k.index(vectors * self.lanes) if passing.stride is None else passing.stride
        for d, tiles in enumerate(sums):
            for v, tile in enumerate(tiles):
                place = passing.scratch + (stride * (d * ROWS) + v * self.lanes)
                tilestored(tile, place, stride * f32.bytes)
        return []


def _rows_of(k: Builder, left: Left, unit: Value, block: int) -> tuple[Value, Value]:
    """Where 16 rows of a block lie at a unit, and how far apart they are, in bytes."""
    if isinstance(left, PackedLeft):
        return left.base + (unit * left.rows + block * ROWS * _UNITS), k.index(ROW_BYTES)
    assert isinstance(left, PlainLeft)
    assert left.apart is not None
    start = left.rows[0] + (left.apart * (block * ROWS) + unit * left.reader.depth)
    return start, left.apart * left.reader.bytes


register(TileMicro(AMX_BF16))
