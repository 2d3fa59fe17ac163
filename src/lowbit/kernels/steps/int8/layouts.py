"""How the steps take their operands: a [M, K] of bytes 0 to 255, b [K, N] of bytes -128 to 127."""

from __future__ import annotations

import numpy as np

from lowbit.kernels.steps.registry import Array, Layout
from lowbit.spec.operations.steps import product_of_bytes

ROWS, COLUMNS, LINE = 32, 96, 64
"""M, N and K are padded to multiples of these: whole tiles on every instruction set."""
PANEL = 16
"""Columns that lie together, since so many sums of 32 bits are a line of 64 bytes."""


def padded(matrix: Array, rows: int, columns: int) -> Array:
    """With zeros up to multiples of so many rows and columns."""
    beyond = [(0, -size % of) for size, of in zip(matrix.shape, (rows, columns), strict=True)]
    return np.ascontiguousarray(np.pad(matrix, beyond))


def _panels(b: Array, together: int) -> Array:
    """[N / 16][K / together][16][together]: what one column multiplies at once, side by side."""
    whole = padded(b, LINE, COLUMNS)
    k, n = whole.shape
    parts = whole.reshape(k // together, together, n // PANEL, PANEL)
    return np.ascontiguousarray(parts.transpose(2, 0, 3, 1))


PLAIN = Layout(
    "bytes, row by row",
    product_of_bytes,
    lambda a, b: (np.ascontiguousarray(a), np.ascontiguousarray(b)),
)
WHOLE_TILES = Layout(
    "bytes, row by row, with zeros up to whole tiles",
    product_of_bytes,
    lambda a, b: (padded(a, ROWS, 1), padded(b, 1, COLUMNS)),
)
PAIRS = Layout(
    "16-bit words, b in panels of 16 columns, two k of a column side by side",
    product_of_bytes,
    lambda a, b: (padded(a, ROWS, LINE).astype(np.int16), _panels(b, 2).astype(np.int16)),
)
QUADS = Layout(
    "bytes, b in panels of 16 columns, four k of a column side by side",
    product_of_bytes,
    lambda a, b: (padded(a, ROWS, LINE), _panels(b, 4)),
)
