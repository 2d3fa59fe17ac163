"""The gradient of relu(x * y) by x."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float32
from torch import Tensor


def mul_relu_block_back_spec(
    x: Float32[Tensor, "90 100"], y: Float32[Tensor, "90"], dz: Float32[Tensor, "90 100"]
) -> Float32[Tensor, "90 100"]:
    x = x.clone().requires_grad_(True)
    y = y.clone().requires_grad_(True)
    z = torch.relu(x * y[:, None])
    z.backward(dz)
    return x.grad


@triton.jit
def mul_relu_block_back_kernel(
    x_ptr, y_ptr, dz_ptr, dx_ptr, N0, N1, B0: tl.constexpr, B1: tl.constexpr
):
    column = tl.program_id(0) * B0 + tl.arange(0, B0)
    row = tl.program_id(1) * B1 + tl.arange(0, B1)
    at = row[:, None] * N0 + column[None, :]
    inside = (row < N1)[:, None] & (column < N0)[None, :]
    x = tl.load(x_ptr + at, inside)
    y = tl.load(y_ptr + row, row < N1)[:, None]
    dz = tl.load(dz_ptr + at, inside)
    tl.store(dx_ptr + at, tl.where(x * y > 0, dz * y, 0.0), inside)
