"""The steps that are a compiler's to make fast, in Numba."""

from __future__ import annotations

import numpy as np
from numba import njit

from lowbit.kernels.steps.int8.layouts import PLAIN
from lowbit.kernels.steps.registry import step

K_BLOCK, N_BLOCK = 128, 1024
"""A block of b: 128 KiB of bytes, which a second-level cache holds."""


@step("cpu-int8", 1, PLAIN)
@njit
def int8_loops(a, b, out):
    """Three loops, the sum innermost.

    a: uint8 [M, K], b: int8 [K, N], out: int32 [M, N].

    Bytes: each multiply-add reads a byte of a and one of b, N bytes from the last: a cache line of
    64 for the sake of one. Limit: waiting for these lines, one multiply-add at a time.
    """
    for m in range(a.shape[0]):
        for n in range(b.shape[1]):
            total = np.int32(0)
            for k in range(a.shape[1]):
                total = np.int32(total + np.int32(a[m, k]) * np.int32(b[k, n]))
            out[m, n] = total


@step("cpu-int8", 2, PLAIN)
@njit
def int8_loop_order(a, b, out):
    """The loop over columns innermost, which the compiler makes vectors of.

    a: uint8 [M, K], b: int8 [K, N], out: int32 [M, N].

    Bytes: nine for each multiply-add: one of b, and a sum of four read and written. Limit: the sums
    on their way through the cache, K times.
    """
    for m in range(a.shape[0]):
        for n in range(b.shape[1]):
            out[m, n] = 0
        for k in range(a.shape[1]):
            x = np.int32(a[m, k])
            for n in range(b.shape[1]):
                out[m, n] += x * np.int32(b[k, n])


@step("cpu-int8", 3, PLAIN)
@njit
def int8_blocks(a, b, out):
    """A block of b stays in the second cache while all rows of a pass over it.

    a: uint8 [M, K], b: int8 [K, N], out: int32 [M, N].

    Bytes: those of step 2, but b comes from memory once, where it is larger than that cache. Limit:
    still the sums: two loads, a widening, a product, a sum and a store for a few multiply-adds.
    """
    out[:] = 0
    for first in range(0, b.shape[1], N_BLOCK):
        for start in range(0, a.shape[1], K_BLOCK):
            for m in range(a.shape[0]):
                sums = out[m, first : first + N_BLOCK]
                for k in range(start, min(start + K_BLOCK, a.shape[1])):
                    x, line = np.int32(a[m, k]), b[k, first : first + N_BLOCK]
                    for n in range(sums.size):
                        sums[n] += x * np.int32(line[n])
