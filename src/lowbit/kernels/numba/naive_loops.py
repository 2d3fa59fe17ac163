"""Step 1: the definition of a matrix product, as three loops."""

from __future__ import annotations

import numpy as np
from numba import njit

from lowbit.kernels.numba.operations import COLUMNS
from lowbit.kernels.numba.registry import uint4_step


@uint4_step(1, COLUMNS)
@njit
def naive_loops(a, b, out):
    """Three loops, the sum innermost.

    a: uint8 [M, K], b: uint8 [K, N], out: int32 [M, N].

    Bytes: each multiply-add reads one byte of a and one of b, but the next one of b is N bytes
    further: a cache line of 64 bytes comes for the sake of one. Limit: waiting for those lines.
    If N is a power of two it is worse, since they all fall into a few sets of the cache and push
    each other out. Nothing is left for SIMD, which wants neighbours.
    """
    for m in range(a.shape[0]):
        for n in range(b.shape[1]):
            total = np.int32(0)
            for k in range(a.shape[1]):
                total = np.int32(total + np.int32(a[m, k]) * b[k, n])
            out[m, n] = total
