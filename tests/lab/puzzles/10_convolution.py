"""Images and one small kernel; zeros past the lower and the right edge."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float32
from torch import Tensor


def conv2d_spec(x: Float32[Tensor, "4 8 8"], k: Float32[Tensor, "4 4"]) -> Float32[Tensor, "4 8 8"]:
    z = torch.zeros(4, 8, 8)
    x = torch.nn.functional.pad(x, (0, 4, 0, 4, 0, 0), value=0.0)
    for i in range(8):
        for j in range(8):
            z[:, i, j] = (k[None, :, :] * x[:, i : i + 4, j : j + 4]).sum(1).sum(1)
    return z


@triton.jit
def conv2d_kernel(
    x_ptr, k_ptr, z_ptr, N0, H, W, KH: tl.constexpr, KW: tl.constexpr, B0: tl.constexpr
):
    image = tl.program_id(0)
    down, right = tl.arange(0, KH), tl.arange(0, KW)
    k = tl.load(k_ptr + KW * down[:, None] + right[None, :])
    for i in tl.range(0, H):
        for j in tl.range(0, W):
            inside = (i + down < H)[:, None] & (j + right < W)[None, :]
            at = image * H * W + (i + down)[:, None] * W + (j + right)[None, :]
            x = tl.load(x_ptr + at, mask=inside, other=0.0)
            tl.store(z_ptr + image * H * W + i * W + j, tl.sum(k * x))
