# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportReturnType=false
"""Rows of activations as 8-bit numbers and their scales, in one reading where a row fits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.kernels.triton.fast.launch import launch

_ONCE = 16384  # elements of a row that a program keeps in registers


@triton.jit
def _scales(low, high, INT: tl.constexpr, SYMMETRIC: tl.constexpr):
    """Scale and zero point of numbers between two, 0 among them (numerics, `quantize_rows`)."""
    if SYMMETRIC:
        scale = tl.maximum(-low, high, propagate_nan=tl.PropagateNan.ALL)
        scale = scale / (127.0 if INT else 448.0)
    else:
        scale = (high - low) / 255.0
    scale = tl.where(scale == 0.0, 1.0, scale)
    zero = 0.0
    if not SYMMETRIC:
        # Rounded to nearest even by adding 1.5·2²³.
        zero = tl.minimum(tl.maximum(-low / scale, 0.0), 255.0) + 12582912.0 - 12582912.0 - 128.0
    return scale, zero


@triton.jit
def quantize_rows_kernel(
    x_ptr, q_ptr, scale_ptr, zero_ptr, K, x_stride,
    BLOCK: tl.constexpr, INT: tl.constexpr, SYMMETRIC: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """q[m, k] = round(x[m, k] / scale[m]) + zero[m]; GROUP: that many k have their own scale."""
    m, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = group * GROUP
    end = tl.minimum(first + GROUP, K) if GROUP else K
    at = x_ptr + m * x_stride
    low, high = 0.0, 0.0
    for start in tl.range(first, end, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(at + k, mask=k < end, other=0.0).to(tl.float32)
        low = tl.minimum(low, tl.min(tl.minimum(x, 0.0, propagate_nan=tl.PropagateNan.ALL), 0))
        high = tl.maximum(high, tl.max(tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL), 0))
        # A NaN makes the scale one, and with it the row of results.
        high += tl.sum(tl.where(x == x, 0.0, x), 0)
    scale, zero = _scales(low, high, INT, SYMMETRIC)
    tl.store(scale_ptr + m * tl.num_programs(1) + group, scale)
    if not SYMMETRIC:
        tl.store(zero_ptr + m, zero.to(tl.int32))
    for start in tl.range(first, end, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(at + k, mask=k < end, other=0.0).to(tl.float32)
        q = x / scale
        if INT:
            least = -127.0 if SYMMETRIC else -128.0
            q = q + 12582912.0 - 12582912.0 + zero
            q = tl.minimum(tl.maximum(q, least), 127.0)
        else:
            q = tl.minimum(tl.maximum(q, -448.0), 448.0)
        tl.store(q_ptr + m * K + k, q.to(q_ptr.dtype.element_ty), mask=k < end)


def quantize_rows(
    x: Tensor, dtype: torch.dtype, symmetric: bool, blocks: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K] with rows that lie close: values of a dtype, scales, and zero points or nothing."""
    M, K = x.shape
    groups = -(-K // 128) if blocks else 1
    q = torch.empty(M, K, dtype=dtype, device=x.device)
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
    }
    if M and K:
        launch(quantize_rows_kernel, (M, groups), arguments, num_warps=4 if block <= 4096 else 8)
    return q, scale, zero
