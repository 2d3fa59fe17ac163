"""dx_ji = dz_ji · y_j where x_ji · y_j > 0, else 0."""

from __future__ import annotations

import triton
import triton.language as tl

from lowbit.kernels.triton.registry import teaches
from lowbit.spec.exercises import mul_relu_backward


@teaches(
    mul_relu_backward,
    grid=lambda meta: (triton.cdiv(meta["N0"], meta["B0"]), triton.cdiv(meta["N1"], meta["B1"])),
)
@triton.jit
def mul_relu_backward_kernel(
    x_ptr, y_ptr, dz_ptr, dx_ptr, N0, N1, B0: tl.constexpr, B1: tl.constexpr
):
    """The chain rule: relu passes dz on where its argument is positive, and x meets y there."""
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    j = tl.program_id(1) * B1 + tl.arange(0, B1)
    inside = (j < N1)[:, None] & (i < N0)[None, :]
    at = j[:, None] * N0 + i[None, :]
    x = tl.load(x_ptr + at, mask=inside)
    y = tl.load(y_ptr + j, mask=j < N1)[:, None]
    dz = tl.load(dz_ptr + at, mask=inside)
    tl.store(dx_ptr + at, tl.where(x * y > 0, dz * y, 0.0), mask=inside)
