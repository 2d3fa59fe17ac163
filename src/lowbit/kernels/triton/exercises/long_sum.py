"""z_i = Σ_j x_ij, a block of T at a time."""

from __future__ import annotations

import triton
import triton.language as tl

from lowbit.kernels.triton.registry import teaches
from lowbit.spec.exercises import long_sum


@teaches(long_sum, grid=lambda meta: (triton.cdiv(meta["N0"], meta["B0"]),))
@triton.jit
def long_sum_kernel(x_ptr, z_ptr, N0, T, B0: tl.constexpr, B1: tl.constexpr):
    """Lanes past the end of a row read 0, which adds nothing."""
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    total = tl.zeros((B0,), tl.float32)
    for start in range(0, T, B1):
        j = start + tl.arange(0, B1)
        inside = (i < N0)[:, None] & (j < T)[None, :]
        x = tl.load(x_ptr + i[:, None] * T + j[None, :], mask=inside, other=0.0)
        total += tl.sum(x, axis=1)
    tl.store(z_ptr + i, total, mask=i < N0)
