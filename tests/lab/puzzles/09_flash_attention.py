"""Attention of scalars in one loop."""

import triton
import triton.language as tl
from jaxtyping import Float32
from torch import Tensor


def flashatt_spec(
    q: Float32[Tensor, "200"], k: Float32[Tensor, "200"], v: Float32[Tensor, "200"]
) -> Float32[Tensor, "200"]:
    scores = q[:, None] * k[None, :]
    powers = (scores - scores.max(1, keepdim=True)[0]).exp()
    weights = powers / powers.sum(1, keepdim=True)
    return (v[None, :] * weights).sum(1)


@triton.jit
def flashatt_kernel(q_ptr, k_ptr, v_ptr, z_ptr, N0, T, B0: tl.constexpr):
    log2_e = 1.44269504
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    q = tl.load(q_ptr + i, mask=i < N0, other=0.0)
    largest = tl.full((B0,), -float("inf"), tl.float32)
    total = tl.zeros((B0,), tl.float32)
    z = tl.zeros((B0,), tl.float32)
    for start in tl.range(0, T, B0):
        j = start + tl.arange(0, B0)
        k = tl.load(k_ptr + j, mask=j < T, other=0.0)
        v = tl.load(v_ptr + j, mask=j < T, other=0.0)
        scores = tl.where((j < T)[None, :], q[:, None] * k[None, :], -float("inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        rescale = tl.exp2((largest - now) * log2_e)
        powers = tl.exp2((scores - now[:, None]) * log2_e)
        total = total * rescale + tl.sum(powers, 1)
        z = z * rescale + tl.sum(powers * v[None, :], 1)
        largest = now
    tl.store(z_ptr + i, z / total, mask=i < N0)
