"""How the steps take their operands: float32 a [M, K] and b [K, N], row by row."""

from __future__ import annotations

import numpy as np

from lowbit.kernels.steps.registry import Array, Layout
from lowbit.spec.operations.steps import product_of_floats

ROWS, COLUMNS = 8, 48
"""M and N are padded to multiples of these: whole tiles on every instruction set."""


def _padded(a: Array, b: Array) -> tuple[Array, Array]:
    rows, columns = -len(a) % ROWS, -b.shape[1] % COLUMNS
    wide = np.pad(b, ((0, 0), (0, columns)))
    return np.ascontiguousarray(np.pad(a, ((0, rows), (0, 0)))), np.ascontiguousarray(wide)


PLAIN = Layout(
    "row by row", product_of_floats, lambda a, b: (np.ascontiguousarray(a), np.ascontiguousarray(b))
)
WHOLE_TILES = Layout("row by row, with zeros up to whole tiles", product_of_floats, _padded)
