"""Step 4: two values to a byte."""

from __future__ import annotations

import numpy as np
from numba import njit

from lowbit.kernels.numba.operations import PACKED_ROWS
from lowbit.kernels.numba.registry import uint4_step


@uint4_step(4, PACKED_ROWS)
@njit
def packed_rows(a, b, out):
    """Two values to a byte halve what is read, and cost a mask and a shift at every use.

    a: uint8 [M, P], b: uint8 [N, P], the first of a pair in the low half; out: int32 [M, N].

    Bytes: two bytes for two multiply-adds, half of step 3, and half the memory. Limit:
    instructions, as before, and now more of them: each vector is unpacked once for every query.
    What packing saves is memory, and speed only where memory is the limit, as with one query.
    """
    for m in range(a.shape[0]):
        for n in range(b.shape[0]):
            total = np.int32(0)
            for p in range(a.shape[1]):
                x, y = a[m, p], b[n, p]
                low = np.int32(x & 15) * np.int32(y & 15)
                high = np.int32(x >> 4) * np.int32(y >> 4)
                total = np.int32(total + low + high)
            out[m, n] = total
