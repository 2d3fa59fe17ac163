"""z_ji = relu(x_i · y_j)."""

from __future__ import annotations

import triton
import triton.language as tl

from lowbit.kernels.triton.registry import teaches
from lowbit.spec.exercises import outer_mul_relu


@teaches(
    outer_mul_relu,
    grid=lambda meta: (triton.cdiv(meta["N0"], meta["B0"]), triton.cdiv(meta["N1"], meta["B1"])),
)
@triton.jit
def outer_mul_relu_kernel(x_ptr, y_ptr, z_ptr, N0, N1, B0: tl.constexpr, B1: tl.constexpr):
    """What follows the product happens in registers, before the only store."""
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    j = tl.program_id(1) * B1 + tl.arange(0, B1)
    x = tl.load(x_ptr + i, mask=i < N0)
    y = tl.load(y_ptr + j, mask=j < N1)
    z = tl.maximum(x[None, :] * y[:, None], 0.0)
    inside = (j < N1)[:, None] & (i < N0)[None, :]
    tl.store(z_ptr + j[:, None] * N0 + i[None, :], z, mask=inside)
