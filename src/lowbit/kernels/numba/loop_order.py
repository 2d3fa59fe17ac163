"""Step 2: the same loops in another order."""

from __future__ import annotations

import numpy as np
from numba import njit

from lowbit.kernels.numba.operations import COLUMNS
from lowbit.kernels.numba.registry import uint4_step


@uint4_step(2, COLUMNS)
@njit
def loop_order(a, b, out):
    """The loop over vectors innermost, so that neighbours in memory are worked on together.

    a: uint8 [M, K], b: uint8 [K, N], out: int32 [M, N].

    Bytes: each multiply-add reads one byte of b, and reads and writes a sum of four: nine in all.
    Every cache line is used whole, and the compiler makes SIMD of the innermost loop. Limit: the
    sums, which go through the cache K times; a row of 16,384 of them is 64 KiB, more than the
    first-level cache of most machines.
    """
    for m in range(a.shape[0]):
        for n in range(b.shape[1]):
            out[m, n] = 0
        for k in range(a.shape[1]):
            for n in range(b.shape[1]):
                out[m, n] += np.int32(a[m, k]) * b[k, n]
