# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
"""Rows of activations as 8-bit numbers and their scales, in one reading where a row fits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.kernels.triton.fast.launch import launch

_ONCE = 16384  # elements of a row that a program keeps in registers


@triton.jit
def _rounded(x):
    """To the nearest integer, halves to even, by adding 1.5·2²³."""
    return x + 12582912.0 - 12582912.0


@triton.jit
def quantize_rows_kernel(
    x_ptr, q_ptr, scale_ptr, zero_ptr, K, x_stride,
    BLOCK: tl.constexpr, INT: tl.constexpr, SYMMETRIC: tl.constexpr, GROUP: tl.constexpr,
    TILED: tl.constexpr,
):  # fmt: skip
    """q[m, k] = round(x[m, k] / scale[m]) + zero[m], as lowbit.numerics.affine.quantize_rows has
    it, less 128; GROUP: so many k have a scale of their own, 0 for all. TILED: rows are filled up
    with zeros to multiples of 16, and of each 16 columns k = 8·h + j is at 2·j + h."""
    m, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = group * GROUP
    end = tl.minimum(first + GROUP, K) if GROUP else K
    at = x_ptr + m * x_stride
    low, high, odd = 0.0, 0.0, 0
    for start in tl.range(first, end, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(at + k, mask=k < end, other=0.0).to(tl.float32)
        odd += tl.sum((tl.abs(x) < float("inf")).to(tl.int32), 0) - BLOCK  # NaN is not less
        low, high = tl.minimum(low, tl.min(x, 0)), tl.maximum(high, tl.max(x, 0))
    most: tl.constexpr = 127.0 if INT else 448.0
    if SYMMETRIC:
        scale = tl.div_rn(tl.maximum(-low, high), most)
    else:
        scale = tl.div_rn(high, 255.0) - tl.div_rn(low, 255.0)
    normal = scale >= 1.1754943508222875e-38  # else the scale is 1
    scale = tl.where(normal, scale, 1.0)
    zero = 0.0
    if not SYMMETRIC:
        zero = _rounded(tl.minimum(tl.maximum(tl.div_rn(-low, scale), 0.0), 255.0)) - 128.0
        zero = tl.where(normal & (odd == 0), zero, 0.0)
        tl.store(zero_ptr + m, zero.to(tl.int32))
    inverse = tl.div_rn(1.0, scale)
    to = scale_ptr + m * tl.num_programs(1) + group
    tl.store(to, tl.where(odd == 0, scale, float("nan")))
    for start in tl.range(first, end, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(at + k, mask=k < end, other=0.0).to(tl.float32)
        x = tl.where(odd == 0, x * inverse, 0.0)
        if SYMMETRIC:
            q = tl.minimum(tl.maximum(x, -most), most)
        else:
            q = tl.minimum(tl.maximum(x, -128.0 - zero), 127.0 - zero)
        if INT:
            q = _rounded(q) + zero
        q = q.to(q_ptr.dtype.element_ty)
        if TILED:
            q = tl.permute(tl.reshape(q, (BLOCK // 16, 2, 8)), (0, 2, 1)).reshape(BLOCK)
            width = (K + 15) // 16 * 16
            tl.store(q_ptr + m * width + k, q, mask=k < width)
        else:
            tl.store(q_ptr + m * K + k, q, mask=k < end)


def quantize_rows(
    x: Tensor, dtype: torch.dtype, symmetric: bool, blocks: bool, tiled: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K] with rows that lie close: values of a dtype, scales, and zero points or nothing.

    tiled: symmetric values in the order that `eight_by_four` takes, [M, K rounded up to 16].
    """
    M, K = x.shape
    groups = -(-K // 128) if blocks else 1
    q = torch.empty(M, K + -K % 16 * tiled, dtype=dtype, device=x.device)
    scale = torch.empty((M, groups) if blocks else (M,), dtype=torch.float32, device=x.device)
    zero = torch.empty(0 if symmetric else M, dtype=torch.int32, device=x.device)
    block = 128 if blocks else min(_ONCE, triton.next_power_of_2(max(K, 16)))
    arguments = {
        "x_ptr": x,
        "q_ptr": q,
        "scale_ptr": scale,
        "zero_ptr": zero,
        "K": K,
        "x_stride": x.stride(0),
        "BLOCK": block,
        "INT": dtype == torch.int8,
        "SYMMETRIC": symmetric,
        "GROUP": 128 if blocks else 0,
        "TILED": tiled,
    }
    if M and K:
        launch(quantize_rows_kernel, (M, groups), arguments, num_warps=4 if block <= 4096 else 8)
    return q, scale, zero
