"""z_bij = Σ_uv k_uv · x_b,i+u,j+v, with zeros past the lower and the right edge."""

from __future__ import annotations

import triton
import triton.language as tl

from lowbit.kernels.triton.registry import teaches
from lowbit.spec.exercises import conv2d


@teaches(conv2d, grid=lambda meta: (meta["N0"], meta["H"], triton.cdiv(meta["W"], meta["B1"])))
@triton.jit
def conv2d_kernel(x_ptr, k_ptr, z_ptr, N0, H, W, KH, KW, B1: tl.constexpr):
    """A program computes B1 neighbours of one row; the mask is the padding."""
    b, i = tl.program_id(0), tl.program_id(1)
    j = tl.program_id(2) * B1 + tl.arange(0, B1)
    total = tl.zeros((B1,), tl.float32)
    for u in range(KH):
        for v in range(KW):
            inside = (i + u < H) & (j + v < W)
            x = tl.load(x_ptr + (b * H + i + u) * W + j + v, mask=inside, other=0.0)
            total += tl.load(k_ptr + u * KW + v) * x
    tl.store(z_ptr + (b * H + i) * W + j, total, mask=j < W)
