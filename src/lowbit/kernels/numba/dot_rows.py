"""Step 3: vectors as rows, sums in registers."""

from __future__ import annotations

import numpy as np
from numba import njit

from lowbit.kernels.numba.operations import ROWS
from lowbit.kernels.numba.registry import uint4_step


@uint4_step(3, ROWS)
@njit
def dot_rows(a, b, out):
    """A vector lies in a row, so that its sum stays in a register until it is finished.

    a: uint8 [M, K], b: uint8 [N, K], out: int32 [M, N].

    Bytes: each multiply-add reads one byte of a, which stays in the first-level cache, and one of
    b; a sum is written once. The loops are those of step 1: only the layout differs, and SIMD
    adds up several parts of a sum side by side. Limit: instructions. Bytes are widened before
    they are multiplied, and the parts of every sum are added up across the register.
    """
    for m in range(a.shape[0]):
        for n in range(b.shape[0]):
            total = np.int32(0)
            for k in range(a.shape[1]):
                total = np.int32(total + np.int32(a[m, k]) * b[n, k])
            out[m, n] = total
