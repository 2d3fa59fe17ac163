"""Softmax over rows, forward and backward, in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.kernels.triton.fast.launch import launch
from lowbit.kernels.triton.fast.rows import (
    Cut,
    RowConfig,
    RowTable,
    as_rows,
    meet,
    place,
    row_config,
)

# Measured on an H200: up to here one program holds a row; in bfloat16 parts are slower.
FORWARD: RowTable = {
    90: (
        (1024, RowConfig(1, 1024, 2)),
        (2048, RowConfig(1, 2048, 4)),
        (4096, RowConfig(1, 4096, 4)),
        (8192, RowConfig(1, 8192, 16)),
        (16384, RowConfig(1, 16384, 8)),
        (32768, RowConfig(1, 32768, 16)),
    )
}
BACKWARD: RowTable = {}

LARGEST_CHUNK = 16384
"""Where no table says how: so much of a row fits in the registers of a program."""


@triton.jit
def softmax_kernel(
    x_ptr,
    z_ptr,
    sums_ptr,
    met_ptr,
    rows,
    length,
    x_stride,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
):
    """z = exp(x - max) / sum; parts meet with their largest x and their sum relative to it."""
    log2_e = tl.constexpr(1.4426950408889634)
    row, part, column = place(met_ptr, rows, ROWS, CHUNK, PARTS)
    inside = (row < rows)[:, None] & (column < length)[None, :]
    at = row[:, None] * x_stride + column[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=-float("inf")).to(tl.float32)
    largest = tl.max(x, axis=1)
    # A row of -inf alone has no exp(x - max); with 0 for the maximum it is 0 / 0, which is right.
    base = tl.where(largest == -float("inf"), 0.0, largest)
    z = tl.exp2((x - base[:, None]) * log2_e)
    total = tl.sum(z, axis=1)
    scale = 1.0 / total  # pyright: ignore[reportOperatorIssue]
    if PARTS > 1:
        bases, totals = meet(base, total, sums_ptr, met_ptr, row, part, PARTS, PARTS_BLOCK)
        known = tl.arange(0, PARTS_BLOCK)[None, :] < PARTS
        # A part of -inf alone has the sum 0 and no say in the maximum.
        taken = known & (totals != 0)
        common = tl.max(tl.where(taken, bases, -float("inf")), axis=1)
        common = tl.where(common == -float("inf"), 0.0, common)
        factor = tl.where(taken, tl.exp2((bases - common[:, None]) * log2_e), 0.0)
        total = tl.sum(totals * factor, axis=1)
        scale = tl.exp2((base - common) * log2_e) / total
    z = (z * scale[:, None]).to(z_ptr.dtype.element_ty)
    tl.store(z_ptr + row[:, None] * length + column[None, :], z, mask=inside)


@triton.jit
def softmax_backward_kernel(
    z_ptr,
    dz_ptr,
    dx_ptr,
    sums_ptr,
    met_ptr,
    rows,
    length,
    z_stride,
    dz_stride,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
):
    """dx = z · (dz - Σ z · dz)."""
    row, part, column = place(met_ptr, rows, ROWS, CHUNK, PARTS)
    inside = (row < rows)[:, None] & (column < length)[None, :]
    z = tl.load(z_ptr + row[:, None] * z_stride + column[None, :], mask=inside, other=0.0)
    dz = tl.load(dz_ptr + row[:, None] * dz_stride + column[None, :], mask=inside, other=0.0)
    z, dz = z.to(tl.float32), dz.to(tl.float32)
    dot = tl.sum(z * dz, axis=1)
    if PARTS > 1:
        dots, _ = meet(dot, dot, sums_ptr, met_ptr, row, part, PARTS, PARTS_BLOCK)
        dot = tl.sum(dots, axis=1)
    dx = (z * (dz - tl.expand_dims(dot, 1))).to(dx_ptr.dtype.element_ty)
    tl.store(dx_ptr + row[:, None] * length + column[None, :], dx, mask=inside)


def softmax(x: Tensor, config: RowConfig | None = None) -> Tensor:
    """softmax of [..., length] over its last dimension, in x's dtype; float32 within."""
    x2d = as_rows(x)
    rows, length = x2d.shape
    z = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    cut = Cut.of(
        rows, length, row_config(FORWARD, length, x.device, config, LARGEST_CHUNK), x.device
    )
    arguments = {"x_ptr": x2d, "z_ptr": z, "x_stride": x2d.stride(0), **cut.arguments}
    launch(softmax_kernel, cut.grid, arguments, num_warps=cut.num_warps)
    return z


def softmax_backward(z: Tensor, dz: Tensor, config: RowConfig | None = None) -> Tensor:
    """The gradient of x, from the softmax and its gradient."""
    z2d, dz2d = as_rows(z), as_rows(dz)
    rows, length = z2d.shape
    dx = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    cut = Cut.of(
        rows, length, row_config(BACKWARD, length, z.device, config, LARGEST_CHUNK), z.device
    )
    arguments = {
        "z_ptr": z2d,
        "dz_ptr": dz2d,
        "dx_ptr": dx,
        "z_stride": z2d.stride(0),
        "dz_stride": dz2d.stride(0),
        **cut.arguments,
    }
    launch(softmax_backward_kernel, cut.grid, arguments, num_warps=cut.num_warps)
    return dx
