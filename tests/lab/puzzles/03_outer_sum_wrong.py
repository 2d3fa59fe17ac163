"""A row and a column are added by one program; wrong."""

import triton
import triton.language as tl
from jaxtyping import Float32
from torch import Tensor


def add_vec_spec(x: Float32[Tensor, "32"], y: Float32[Tensor, "32"]) -> Float32[Tensor, "32 32"]:
    return x[None, :] + y[:, None]


@triton.jit
def add_vec_kernel(x_ptr, y_ptr, z_ptr, N0, N1, B0: tl.constexpr, B1: tl.constexpr):
    column, row = tl.arange(0, B0), tl.arange(0, B1)
    x = tl.load(x_ptr + column, mask=column < N0)
    y = tl.load(y_ptr + row, mask=row < N1)
    at = row[:, None] * N0 + column[None, :]
    inside = (row < N1)[:, None] & (column < N0)[None, :]
    tl.store(z_ptr + at, x[:, None] + y[None, :], mask=inside)
