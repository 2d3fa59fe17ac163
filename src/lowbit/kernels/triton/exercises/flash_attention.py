"""z_i = Σ_j softmax_j(q_i · k_j) · v_j, in one loop over j."""

from __future__ import annotations

import triton
import triton.language as tl

from lowbit.kernels.triton.registry import teaches
from lowbit.spec.exercises import flash_attention


@teaches(flash_attention, grid=lambda meta: (triton.cdiv(meta["N0"], meta["B0"]),))
@triton.jit
def flash_attention_kernel(q_ptr, k_ptr, v_ptr, z_ptr, N0, T, B0: tl.constexpr, B1: tl.constexpr):
    """The sum of the weights and the weighted sum of v are rescaled together when a larger score
    comes. Keys past the end are masked in the scores, after the product: a key of -inf would give
    +inf for a negative q, and NaN for 0."""
    log2_e = tl.constexpr(1.44269504)
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    q = tl.load(q_ptr + i, mask=i < N0, other=0.0)
    largest = tl.full((B0,), -float("inf"), tl.float32)
    weights = tl.zeros((B0,), tl.float32)
    weighted = tl.zeros((B0,), tl.float32)
    for start in range(0, T, B1):
        j = start + tl.arange(0, B1)
        k = tl.load(k_ptr + j, mask=j < T, other=0.0)
        v = tl.load(v_ptr + j, mask=j < T, other=0.0)
        scores = tl.where((j < T)[None, :], q[:, None] * k[None, :], -float("inf"))
        now = tl.maximum(largest, tl.max(scores, axis=1))
        rescale = tl.exp2((largest - now) * log2_e)
        weight = tl.exp2((scores - now[:, None]) * log2_e)
        weights = weights * rescale + tl.sum(weight, axis=1)
        weighted = weighted * rescale + tl.sum(weight * v[None, :], axis=1)
        largest = now
    tl.store(z_ptr + i, weighted / weights, mask=i < N0)
