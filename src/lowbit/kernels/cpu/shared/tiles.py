"""The tiles of AMX: shaped before their first use in a call, released after the last."""

from __future__ import annotations

from collections.abc import Sequence

from lowbit.isa.amx import ROW_BYTES, ROWS, TILES, ldtilecfg, tilerelease
from lowbit.isa.types import u8
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder

_WHOLE: list[tuple[Value | int, int]] = [(ROWS, ROW_BYTES)] * TILES


def configure(k: Builder, shapes: Sequence[tuple[Value | int, int]] = _WHOLE) -> None:
    """Give each tile its number of rows, and of bytes in a row."""
    config = k.local(u8, 64)
    config.store(k.zeros(u8, 64))
    config.store(k.constant(1, u8))
    for number, (rows, row_bytes) in enumerate(shapes):
        (config + (16 + 2 * number)).store(k.constant(row_bytes, u8))
        count = rows.to(u8) if isinstance(rows, Value) else k.constant(rows, u8)
        (config + (48 + number)).store(count)
    ldtilecfg(config, *map(k.tile, range(TILES)))


def release(k: Builder) -> None:
    """Give all tiles up."""
    tilerelease(*map(k.tile, range(TILES)))


def turns(row_blocks: int, panels: int) -> list[tuple[int, int]]:
    """(block of rows, panel) of the tiles of sums; neighbours share one of them."""
    down = range(row_blocks)
    return [(d, p) for p in range(panels) for d in (reversed(down) if p % 2 else down)]
