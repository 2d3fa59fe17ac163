"""A row and a column are added, a tile to each program; wrong."""

import triton
import triton.language as tl
from jaxtyping import Float32
from torch import Tensor


def add_vec_block_spec(
    x: Float32[Tensor, "100"], y: Float32[Tensor, "90"]
) -> Float32[Tensor, "90 100"]:
    return x[None, :] + y[:, None]


@triton.jit
def add_vec_block_kernel(x_ptr, y_ptr, z_ptr, N0, N1, B0: tl.constexpr, B1: tl.constexpr):
    block_x, block_y = tl.program_id(0), tl.program_id(1)
    column = block_x * B0 + tl.arange(0, B0)
    row = block_y * B1 + tl.arange(0, B1)
    x = tl.load(x_ptr + column, column < N0)
    y = tl.load(y_ptr + row, row < N1)
    inside = (row < N1)[:, None] & (column < N0)[None, :]
    tl.store(z_ptr + row[:, None] * N1 + column[None, :], x[None, :] + y[:, None], inside)
