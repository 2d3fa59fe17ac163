"""The softmax of rows, with a running maximum; wrong."""

import triton
import triton.language as tl
from jaxtyping import Float32
from torch import Tensor


def softmax_spec(x: Float32[Tensor, "4 200"]) -> Float32[Tensor, "4 200"]:
    largest = x.max(1, keepdim=True)[0]
    powers = (x - largest).exp()
    return powers / powers.sum(1, keepdim=True)


@triton.jit
def softmax_kernel(x_ptr, z_ptr, N0, N1, T, B0: tl.constexpr, B1: tl.constexpr):
    log2_e = 1.44269504
    row = tl.program_id(0) * B0 + tl.arange(0, B0)
    largest = tl.full((B0,), -float("inf"), tl.float32)
    total = tl.zeros((B0,), tl.float32)
    for start in tl.range(0, T, B1):
        column = start + tl.arange(0, B1)
        inside = (row < N0)[:, None] & (column < T)[None, :]
        x = tl.load(x_ptr + row[:, None] * T + column[None, :], inside, other=-float("inf"))
        now = tl.maximum(largest, tl.max(x, 1))
        total = total * 1.0
        total += tl.sum(tl.exp2((x - now[:, None]) * log2_e), 1)
        largest = now
    for start in tl.range(0, T, B1):
        column = start + tl.arange(0, B1)
        inside = (row < N0)[:, None] & (column < T)[None, :]
        x = tl.load(x_ptr + row[:, None] * T + column[None, :], inside, other=-float("inf"))
        z = tl.exp2((x - largest[:, None]) * log2_e) / total[:, None]
        tl.store(z_ptr + row[:, None] * T + column[None, :], z, inside)
