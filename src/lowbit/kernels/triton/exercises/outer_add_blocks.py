"""z_ji = x_i + y_j, a block of two dimensions to each program."""

from __future__ import annotations

import triton
import triton.language as tl

from lowbit.kernels.triton.registry import teaches
from lowbit.spec.exercises import outer_add_blocks


@teaches(
    outer_add_blocks,
    grid=lambda meta: (triton.cdiv(meta["N0"], meta["B0"]), triton.cdiv(meta["N1"], meta["B1"])),
)
@triton.jit
def outer_add_blocks_kernel(x_ptr, y_ptr, z_ptr, N0, N1, B0: tl.constexpr, B1: tl.constexpr):
    """The grid has an axis for each dimension of the result."""
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    j = tl.program_id(1) * B1 + tl.arange(0, B1)
    x = tl.load(x_ptr + i, mask=i < N0)
    y = tl.load(y_ptr + j, mask=j < N1)
    inside = (j < N1)[:, None] & (i < N0)[None, :]
    tl.store(z_ptr + j[:, None] * N0 + i[None, :], x[None, :] + y[:, None], mask=inside)
