"""The steps that are a compiler's to make fast, in Numba."""

from __future__ import annotations

import numpy as np
from numba import njit

from lowbit.kernels.steps.float32.layouts import PLAIN
from lowbit.kernels.steps.registry import step

K_BLOCK, N_BLOCK = 64, 1024
"""A block of b: 256 KiB, which a second-level cache holds."""


@step("cpu-float32", 1, PLAIN)
@njit
def float32_loops(a, b, out):
    """Three loops, the sum innermost.

    a: float32 [M, K], b: float32 [K, N], out: float32 [M, N].

    Bytes: each multiply-add reads four of a and four of b, a row of b further than the last. Limit:
    waiting: for the line, and for the sum before, which an addition of floats takes 3 or 4 cycles
    to make. The compiler may not add in another order, so it makes no vectors of this.
    """
    for m in range(a.shape[0]):
        for n in range(b.shape[1]):
            total = np.float32(0)
            for k in range(a.shape[1]):
                total += a[m, k] * b[k, n]
            out[m, n] = total


@step("cpu-float32", 2, PLAIN)
@njit
def float32_loop_order(a, b, out):
    """The loop over columns innermost: neighbouring sums do not wait for each other.

    a: float32 [M, K], b: float32 [K, N], out: float32 [M, N].

    Bytes: twelve for each multiply-add: four of b, and a sum read and written. Vectors of them, and
    the order of each sum is what it was. Limit: the way to the second cache and back, K times.
    """
    for m in range(a.shape[0]):
        for n in range(b.shape[1]):
            out[m, n] = 0
        for k in range(a.shape[1]):
            for n in range(b.shape[1]):
                out[m, n] += a[m, k] * b[k, n]


@step("cpu-float32", 3, PLAIN)
@njit
def float32_blocks(a, b, out):
    """A block of b stays in the second cache while all rows of a pass over it.

    a: float32 [M, K], b: float32 [K, N], out: float32 [M, N].

    Bytes: those of step 2, but b comes from memory once. Limit: two loads and a store for a product
    and a sum; a core can load two vectors and store one in a cycle, and could multiply and add
    four.
    """
    out[:] = 0
    for first in range(0, b.shape[1], N_BLOCK):
        for start in range(0, a.shape[1], K_BLOCK):
            for m in range(a.shape[0]):
                sums = out[m, first : first + N_BLOCK]
                for k in range(start, min(start + K_BLOCK, a.shape[1])):
                    x, line = a[m, k], b[k, first : first + N_BLOCK]
                    for n in range(sums.size):
                        sums[n] += x * line[n]
