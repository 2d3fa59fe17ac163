"""z_b = x_b @ y_b."""

from __future__ import annotations

import triton
import triton.language as tl

from lowbit.kernels.triton.registry import teaches
from lowbit.spec.exercises import batched_matmul


@teaches(
    batched_matmul,
    grid=lambda meta: (
        triton.cdiv(meta["N0"], meta["B0"]),
        triton.cdiv(meta["N1"], meta["B1"]),
        meta["N2"],
    ),
)
@triton.jit
def batched_matmul_kernel(
    x_ptr,
    y_ptr,
    z_ptr,
    N0,
    N1,
    N2,
    MID,
    B0: tl.constexpr,
    B1: tl.constexpr,
    B_MID: tl.constexpr,
):
    """A program holds a block of z in registers, and walks along MID with one of x and one of y.

    "ieee": float32 products, where tl.dot would round the operands to TF32 otherwise.
    """
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    j = tl.program_id(1) * B1 + tl.arange(0, B1)
    b = tl.program_id(2)
    total = tl.zeros((B0, B1), tl.float32)
    for start in range(0, MID, B_MID):
        m = start + tl.arange(0, B_MID)
        x_inside = (i < N0)[:, None] & (m < MID)[None, :]
        x = tl.load(x_ptr + (b * N0 + i[:, None]) * MID + m[None, :], mask=x_inside, other=0.0)
        y_inside = (m < MID)[:, None] & (j < N1)[None, :]
        y = tl.load(y_ptr + (b * MID + m[:, None]) * N1 + j[None, :], mask=y_inside, other=0.0)
        total = tl.dot(x, y, total, input_precision="ieee")
    inside = (i < N0)[:, None] & (j < N1)[None, :]
    tl.store(z_ptr + (b * N0 + i[:, None]) * N1 + j[None, :], total, mask=inside)
