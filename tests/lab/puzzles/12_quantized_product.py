"""A product whose left matrix is kept in four bits."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float32, Int32
from torch import Tensor

FPINT = 32 // 4
GROUP = 8


def quant_dot_spec(
    scale: Float32[Tensor, "32 8"],
    offset: Int32[Tensor, "32"],
    weight: Int32[Tensor, "32 8"],
    activation: Float32[Tensor, "64 32"],
) -> Float32[Tensor, "32 32"]:
    offset = offset.view(32, 1)

    def extract(words: Tensor) -> Tensor:
        return (words[..., None] >> torch.arange(8) * 4) & (2**4 - 1)

    scale = scale[..., None].expand(-1, 8, GROUP).contiguous().view(-1, 64)
    offset = extract(offset)[..., None].expand(-1, 1, 8, GROUP).contiguous().view(-1, 64)
    return (scale * (extract(weight).view(-1, 64) - offset)) @ activation


@triton.jit
def quant_dot_kernel(
    scale_ptr,
    offset_ptr,
    weight_ptr,
    activation_ptr,
    z_ptr,
    N0,
    N1,
    MID,
    B0: tl.constexpr,
    B1: tl.constexpr,
    B_MID: tl.constexpr,
):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    j = tl.program_id(1) * B1 + tl.arange(0, B1)
    total = tl.zeros((B0, B1), tl.float32)
    for start in tl.range(0, MID, B_MID):
        m = start + tl.arange(0, B_MID)
        inside = (i < N0)[:, None] & (m < MID)[None, :]
        group = i[:, None] * (MID // 8) + (m // 8)[None, :]
        scale = tl.load(scale_ptr + group, inside, other=0.0)
        words = tl.load(weight_ptr + group, inside, other=0)
        offsets = tl.load(offset_ptr + i, i < N0, other=0)[:, None]
        weight = (words >> (m % 8 * 4)[None, :]) & 15
        zero = (offsets >> (m // 8 % 8 * 4)[None, :]) & 15
        y_inside = (m < MID)[:, None] & (j < N1)[None, :]
        y = tl.load(activation_ptr + m[:, None] * N1 + j[None, :], y_inside, other=0.0)
        x = scale * (weight - zero).to(tl.float32)
        total += tl.dot(x, y, input_precision="ieee")
    tl.store(z_ptr + i[:, None] * N1 + j[None, :], total, (i < N0)[:, None] & (j < N1)[None, :])
