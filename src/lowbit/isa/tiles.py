"""Matrix registers, as the interpreter keeps them: whichever instruction set has them."""

from __future__ import annotations

import numpy as np

ROWS, ROW_BYTES = 16, 64


class TileState:
    """What the interpreter keeps for one tile; undefined until a configuration gives it a shape."""

    def __init__(self) -> None:
        self.rows = self.row_bytes = 0
        self.data = np.zeros((ROWS, ROW_BYTES), np.uint8)

    def view(self) -> np.ndarray:
        """The configured part, uint8[rows, row_bytes]."""
        if not self.rows:
            raise RuntimeError("a tile was used before ldtilecfg gave it a shape")
        return self.data[: self.rows, : self.row_bytes]

    def set(self, values: np.ndarray) -> None:
        """Replace the configured part; the rest of a written tile becomes zero."""
        shaped = self.view()
        self.data = np.zeros_like(self.data)
        self.data[: shaped.shape[0], : shaped.shape[1]] = values
