"""Step 6: the tile holds what the multiplication takes."""

from __future__ import annotations

import numpy as np
from numba import njit

from lowbit.kernels.numba.operations import PACKED_ROWS
from lowbit.kernels.numba.registry import uint4_step
from lowbit.kernels.numba.unpacking import TILE, unpack_rows


@uint4_step(6, PACKED_ROWS)
@njit
def widened_tile(a, b, out):
    """The tile holds signed 16-bit words, which one instruction multiplies and adds in pairs.

    a: uint8 [M, P], b: uint8 [N, P], the first of a pair in the low half; out: int32 [M, N].

    Bytes: four from the cache for each multiply-add, twice those of step 5, and faster all the
    same: nothing is widened in the innermost loop, which on x86-64 is a load and a multiply-add
    of pairs (vpmaddwd). Limit: adding up each sum across the register. With unsigned words the
    compiler cannot use that instruction and multiplies 32-bit integers.
    """
    queries = np.empty((a.shape[0], 2 * a.shape[1]), np.int16)
    tile = np.empty((TILE, 2 * b.shape[1]), np.int16)
    unpack_rows(a, queries)
    for first in range(0, b.shape[0], TILE):
        rows = b[first : first + TILE]
        unpack_rows(rows, tile)
        for m in range(queries.shape[0]):
            for n in range(rows.shape[0]):
                total = np.int32(0)
                for k in range(queries.shape[1]):
                    total = np.int32(total + np.int32(queries[m, k]) * np.int32(tile[n, k]))
                out[m, first + n] = total
