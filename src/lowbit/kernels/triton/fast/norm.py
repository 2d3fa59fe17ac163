"""LayerNorm and RMSNorm over rows, forward and backward.

One text serves both: RMSNorm is LayerNorm that takes the mean for 0 and has no bias.
"""

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

# Measured on an H200.
FORWARD: RowTable = {
    90: (
        (1024, RowConfig(2, 1024, 4)),
        (2048, RowConfig(2, 2048, 4)),
        (4096, RowConfig(1, 4096, 4)),
        (8192, RowConfig(1, 8192, 8)),
        (16384, RowConfig(1, 16384, 8)),
        (32768, RowConfig(1, 32768, 16)),
    )
}
BACKWARD: RowTable = {}

LARGEST_CHUNK, LARGEST_BACKWARD_CHUNK = 32768, 16384
"""Where no table says how: so much of a row is held by a program. Few large parts wait for each
other far better than many small ones do, even where a register or two is spilled."""


@triton.jit
def norm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    z_ptr,
    mean_ptr,
    rstd_ptr,
    sums_ptr,
    met_ptr,
    rows,
    length,
    x_stride,
    eps,
    CENTRED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
):
    """z = (x - mean) / sqrt(variance + eps) · weight + bias; mean and 1 / sqrt are kept too.

    The variance is that of the differences from the mean, which are in registers: no difference
    of large squares. Parts meet with their mean and their squares about it (Chan, Golub and
    LeVeque, Algorithms for computing the sample variance, 1983).
    """
    row, part, column = place(met_ptr, rows, ROWS, CHUNK, PARTS)
    inside = (row < rows)[:, None] & (column < length)[None, :]
    at = row[:, None] * x_stride + column[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.zeros((ROWS,), tl.float32)
    if CENTRED:
        mean = tl.sum(x, axis=1) / tl.minimum(length - part * CHUNK, CHUNK)
    difference = tl.where(inside, x - mean[:, None], 0.0)
    squares = tl.sum(difference * difference, axis=1)
    if PARTS > 1:
        means, squared = meet(mean, squares, sums_ptr, met_ptr, row, part, PARTS, PARTS_BLOCK)
        parts = tl.arange(0, PARTS_BLOCK)[None, :]
        counts = tl.maximum(tl.minimum(length - parts * CHUNK, CHUNK), 0).to(tl.float32)
        mean = tl.sum(means * counts, axis=1) / length
        apart = means - mean[:, None]
        squares = tl.sum(squared + counts * apart * apart, axis=1)
    rstd = 1.0 / tl.sqrt_rn(squares / length + eps)
    z = (x - mean[:, None]) * rstd[:, None]
    if WEIGHTED:
        weight = tl.load(weight_ptr + column, mask=column < length, other=0.0).to(tl.float32)
        z = z * weight[None, :]
    if BIASED:
        bias = tl.load(bias_ptr + column, mask=column < length, other=0.0).to(tl.float32)
        z = z + bias[None, :]
    z = z.to(z_ptr.dtype.element_ty)
    tl.store(z_ptr + row[:, None] * length + column[None, :], z, mask=inside)
    if CENTRED:
        tl.store(mean_ptr + row, mean, mask=(row < rows) & (part == 0))
    tl.store(rstd_ptr + row, rstd, mask=(row < rows) & (part == 0))


@triton.jit
def norm_backward_kernel(
    x_ptr,
    dz_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    sums_ptr,
    met_ptr,
    rows,
    length,
    x_stride,
    dz_stride,
    CENTRED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
):
    """dx = (g - mean(g) - n · mean(g · n)) · rstd with g = dz · weight, n the normalized x."""
    row, part, column = place(met_ptr, rows, ROWS, CHUNK, PARTS)
    inside = (row < rows)[:, None] & (column < length)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
    g = tl.load(dz_ptr + row[:, None] * dz_stride + column[None, :], mask=inside, other=0.0)
    rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
    normalized, g = x.to(tl.float32), g.to(tl.float32)
    if CENTRED:
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
        normalized = normalized - mean[:, None]
    normalized = normalized * rstd[:, None]
    if WEIGHTED:
        weight = tl.load(weight_ptr + column, mask=column < length, other=0.0).to(tl.float32)
        g = g * weight[None, :]
    # Past the row g is 0, so those lanes add nothing, whatever `normalized` is there.
    along = tl.sum(g * normalized, axis=1)
    level = tl.sum(g, axis=1)
    if PARTS > 1:
        alongs, levels = meet(along, level, sums_ptr, met_ptr, row, part, PARTS, PARTS_BLOCK)
        along, level = tl.sum(alongs, axis=1), tl.sum(levels, axis=1)
    dx = g - normalized * (along / length)[:, None]
    if CENTRED:
        dx = dx - (level / length)[:, None]
    dx = (dx * rstd[:, None]).to(dx_ptr.dtype.element_ty)
    tl.store(dx_ptr + row[:, None] * length + column[None, :], dx, mask=inside)


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    config: RowConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., length] normalized over its last dimension, in x's dtype; and, float32 [rows], the
    means (empty unless `centred`) and the reciprocals of the deviations."""
    x2d = as_rows(x)
    rows, length = x2d.shape
    z = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = torch.empty(rows if centred else 0, dtype=torch.float32, device=x.device)
    cut = Cut.of(
        rows, length, row_config(FORWARD, length, x.device, config, LARGEST_CHUNK), x.device
    )
    arguments = {
        "x_ptr": x2d,
        "weight_ptr": x2d if weight is None else weight.contiguous(),
        "bias_ptr": x2d if bias is None else bias.contiguous(),
        "z_ptr": z,
        "mean_ptr": mean if centred else rstd,
        "rstd_ptr": rstd,
        "x_stride": x2d.stride(0),
        "eps": eps,
        "CENTRED": centred,
        "WEIGHTED": weight is not None,
        "BIASED": bias is not None,
        **cut.arguments,
    }
    launch(norm_kernel, cut.grid, arguments, num_warps=cut.num_warps)
    return z, mean, rstd


def norm_backward(
    dz: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    centred: bool,
    config: RowConfig | None = None,
) -> Tensor:
    """The gradient of x."""
    x2d, dz2d = as_rows(x), as_rows(dz)
    rows, length = x2d.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    config = row_config(BACKWARD, length, x.device, config, LARGEST_BACKWARD_CHUNK)
    cut = Cut.of(rows, length, config, x.device)
    arguments = {
        "x_ptr": x2d,
        "dz_ptr": dz2d,
        "weight_ptr": x2d if weight is None else weight.contiguous(),
        "mean_ptr": mean if centred else rstd,
        "rstd_ptr": rstd,
        "dx_ptr": dx,
        "x_stride": x2d.stride(0),
        "dz_stride": dz2d.stride(0),
        "CENTRED": centred,
        "WEIGHTED": weight is not None,
        **cut.arguments,
    }
    launch(norm_backward_kernel, cut.grid, arguments, num_warps=cut.num_warps)
    return dx
