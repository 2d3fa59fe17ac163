"""A product of matrices for each of a batch; wrong."""

import triton
import triton.language as tl
from jaxtyping import Float32
from torch import Tensor


def dot_spec(
    x: Float32[Tensor, "4 32 32"], y: Float32[Tensor, "4 32 32"]
) -> Float32[Tensor, "4 32 32"]:
    return x @ y


@triton.jit
def dot_kernel(
    x_ptr,
    y_ptr,
    z_ptr,
    N0,
    N1,
    N2,
    MID,
    B0: tl.constexpr,
    B1: tl.constexpr,
    B2: tl.constexpr,
    B_MID: tl.constexpr,
):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    j = tl.program_id(1) * B1 + tl.arange(0, B1)
    batch = tl.program_id(2)
    total = tl.zeros((B0, B1), tl.float32)
    for start in tl.range(0, MID, B_MID):
        m = start + tl.arange(0, B_MID)
        x_inside = (i < N0)[:, None] & (m < MID)[None, :]
        y_inside = (m < MID)[:, None] & (j < N1)[None, :]
        x = tl.load(x_ptr + batch * N0 * MID + i[:, None] * MID + m[None, :], x_inside, other=0.0)
        y = tl.load(y_ptr + batch * MID * N1 + m[:, None] * N1 + j[None, :], y_inside, other=0.0)
        total += tl.dot(y, x, input_precision="ieee")
    inside = (i < N0)[:, None] & (j < N1)[None, :]
    tl.store(z_ptr + batch * N0 * N1 + i[:, None] * N1 + j[None, :], total, inside)
