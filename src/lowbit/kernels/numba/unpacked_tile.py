"""Step 5: a tile of vectors, unpacked once."""

from __future__ import annotations

import numpy as np
from numba import njit

from lowbit.kernels.numba.operations import PACKED_ROWS
from lowbit.kernels.numba.registry import uint4_step
from lowbit.kernels.numba.unpacking import TILE, unpack_rows


@uint4_step(5, PACKED_ROWS)
@njit
def unpacked_tile(a, b, out):
    """A tile of vectors is unpacked once into the cache and serves all queries from there.

    a: uint8 [M, P], b: uint8 [N, P], the first of a pair in the low half; out: int32 [M, N].

    Bytes: half a byte of b from memory for M multiply-adds, and two bytes from the cache for each.
    Memory no longer matters and unpacking next to nothing: 1/M of what it was. Limit:
    instructions, those of step 3.
    """
    queries = np.empty((a.shape[0], 2 * a.shape[1]), np.uint8)
    tile = np.empty((TILE, 2 * b.shape[1]), np.uint8)
    unpack_rows(a, queries)
    for first in range(0, b.shape[0], TILE):
        rows = b[first : first + TILE]
        unpack_rows(rows, tile)
        for m in range(queries.shape[0]):
            for n in range(rows.shape[0]):
                total = np.int32(0)
                for k in range(queries.shape[1]):
                    total = np.int32(total + np.int32(queries[m, k]) * tile[n, k])
                out[m, first + n] = total
