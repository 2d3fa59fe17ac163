"""relu of an outer product, fused."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float32
from torch import Tensor


def mul_relu_block_spec(
    x: Float32[Tensor, "100"], y: Float32[Tensor, "90"]
) -> Float32[Tensor, "90 100"]:
    return torch.relu(x[None, :] * y[:, None])


@triton.jit
def mul_relu_block_kernel(x_ptr, y_ptr, z_ptr, N0, N1, B0: tl.constexpr, B1: tl.constexpr):
    column = tl.program_id(0) * B0 + tl.arange(0, B0)
    row = tl.program_id(1) * B1 + tl.arange(0, B1)
    x = tl.load(x_ptr + column, column < N0)
    y = tl.load(y_ptr + row, row < N1)
    z = x[None, :] * y[:, None]
    z = tl.where(z > 0, z, 0.0)
    inside = (row < N1)[:, None] & (column < N0)[None, :]
    tl.store(z_ptr + row[:, None] * N0 + column[None, :], z, inside)
