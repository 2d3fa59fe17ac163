"""z_ij = exp(x_ij) / Σ_k exp(x_ik), in two passes over the row."""

from __future__ import annotations

import triton
import triton.language as tl

from lowbit.kernels.triton.registry import teaches
from lowbit.spec.exercises import long_softmax


@teaches(long_softmax, grid=lambda meta: (triton.cdiv(meta["N0"], meta["B0"]),))
@triton.jit
def long_softmax_kernel(x_ptr, z_ptr, N0, T, B0: tl.constexpr, B1: tl.constexpr):
    """The first pass keeps the largest x so far, and the sum of exp(x - largest); when the largest
    grows, the sum is rescaled (Milakov and Gimelshein, Online normalizer calculation for softmax,
    2018). exp(x) is 2^(x · log2(e)), which is the instruction that GPUs have."""
    log2_e = tl.constexpr(1.44269504)
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    row = x_ptr + i[:, None] * T
    largest = tl.full((B0,), -float("inf"), tl.float32)
    total = tl.zeros((B0,), tl.float32)
    for start in range(0, T, B1):
        j = start + tl.arange(0, B1)
        inside = (i < N0)[:, None] & (j < T)[None, :]
        x = tl.load(row + j[None, :], mask=inside, other=-float("inf"))
        # Rows past the last one hold only -inf; 0 keeps their differences from being NaN.
        now = tl.where(i < N0, tl.maximum(largest, tl.max(x, axis=1)), 0.0)
        total *= tl.exp2((largest - now) * log2_e)
        total += tl.sum(tl.exp2((x - now[:, None]) * log2_e), axis=1)
        largest = now
    for start in range(0, T, B1):
        j = start + tl.arange(0, B1)
        inside = (i < N0)[:, None] & (j < T)[None, :]
        x = tl.load(row + j[None, :], mask=inside, other=0.0)
        z = tl.exp2((x - largest[:, None]) * log2_e) / total[:, None]
        tl.store(z_ptr + i[:, None] * T + j[None, :], z, mask=inside)
