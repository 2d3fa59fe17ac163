"""What the tiled steps share: the size of a tile, and how rows are unpacked into it."""

from __future__ import annotations

from numba import njit

TILE = 64
"""Vectors in a tile: at K = 256 it is 16 KiB of bytes or 32 KiB of 16-bit words, which a
first-level cache holds, or a second-level one at least."""


@njit
def unpack_rows(packed, values):
    """Write the 4-bit values of packed uint8 [R, P] to values [R, 2P], of any integer dtype."""
    for r in range(packed.shape[0]):
        for p in range(packed.shape[1]):
            values[r, 2 * p] = packed[r, p] & 15
            values[r, 2 * p + 1] = packed[r, p] >> 4
