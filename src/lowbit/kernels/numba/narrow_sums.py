"""Step 7: sums as narrow as four bits allow."""

from __future__ import annotations

import numpy as np
from numba import njit

from lowbit.kernels.numba.operations import PACKED_ROWS
from lowbit.kernels.numba.registry import uint4_step
from lowbit.kernels.numba.unpacking import TILE, unpack_rows

SPAN = 144
"""Bytes of a row at a time: 288 products, of which a sum of 16 bits holds (2**16 - 1) // 15**2 =
291, in whole registers of 32 words."""


@uint4_step(7, PACKED_ROWS)
@njit
def narrow_sums(a, b, out):
    """Sums of 16 bits hold 291 products of 4-bit values, so that all arithmetic is 16 bits wide.

    a: uint8 [M, P], b: uint8 [N, P], the first of a pair in the low half; out: int32 [M, N].

    Bytes: as step 6, and past the span the sums once for each span. A register holds twice as
    many sums, so that half as many steps are left in which a register is added up to one sum.
    Eight-bit operands could not do this: one product fills 16 bits. Limit: instructions still;
    the machine has one that multiplies four times as many bytes, and no loop makes LLVM use it.
    """
    queries = np.empty((a.shape[0], 2 * SPAN), np.uint16)
    tile = np.empty((TILE, 2 * SPAN), np.uint16)
    out[:] = 0
    for start in range(0, b.shape[1], SPAN):
        part = a[:, start : start + SPAN]
        unpack_rows(part, queries)
        for first in range(0, b.shape[0], TILE):
            rows = b[first : first + TILE, start : start + SPAN]
            unpack_rows(rows, tile)
            for m in range(part.shape[0]):
                for n in range(rows.shape[0]):
                    total = np.uint16(0)
                    for k in range(2 * rows.shape[1]):
                        total = np.uint16(total + queries[m, k] * tile[n, k])
                    out[m, first + n] += total
