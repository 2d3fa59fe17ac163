"""z = (scale · (nibble(weight) − nibble(offset))) @ activation."""

from __future__ import annotations

import triton
import triton.language as tl

from lowbit.kernels.triton.registry import teaches
from lowbit.spec.exercises import quantized_matmul


@teaches(
    quantized_matmul,
    grid=lambda meta: (triton.cdiv(meta["N0"], meta["B0"]), triton.cdiv(meta["N1"], meta["B1"])),
)
@triton.jit
def quantized_matmul_kernel(
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
    """Element m of a row of the weight is nibble m % 8 of word m // 8, which is its group; the
    group's offset is nibble m // 8 % 8 of word m // 64. MID is a multiple of 64."""
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    j = tl.program_id(1) * B1 + tl.arange(0, B1)
    total = tl.zeros((B0, B1), tl.float32)
    for start in range(0, MID, B_MID):
        m = start + tl.arange(0, B_MID)
        w_inside = (i < N0)[:, None] & (m < MID)[None, :]
        group = i[:, None] * (MID // 8) + m[None, :] // 8
        scale = tl.load(scale_ptr + group, mask=w_inside, other=0.0)
        word = tl.load(weight_ptr + group, mask=w_inside, other=0)
        at = i[:, None] * (MID // 64) + m[None, :] // 64
        offset = tl.load(offset_ptr + at, mask=w_inside, other=0)
        nibble = (word >> (m[None, :] % 8 * 4)) & 15
        zero = (offset >> (m[None, :] // 8 % 8 * 4)) & 15
        weight = scale * (nibble - zero).to(tl.float32)
        a_inside = (m < MID)[:, None] & (j < N1)[None, :]
        a_at = m[:, None] * N1 + j[None, :]
        activation = tl.load(activation_ptr + a_at, mask=a_inside, other=0.0)
        total = tl.dot(weight, activation, total, input_precision="ieee")
    inside = (i < N0)[:, None] & (j < N1)[None, :]
    tl.store(z_ptr + i[:, None] * N1 + j[None, :], total, mask=inside)
