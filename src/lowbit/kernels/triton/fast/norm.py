# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""LayerNorm and RMSNorm over rows, forward and backward.

One text serves both: RMSNorm is LayerNorm that takes the mean for 0 and has no bias. The gradients
of weight and bias are sums over rows, by columns, in two fixed steps, with no atomic addition: the
same input gives the same bits.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.kernels.triton.fast.launch import Choice, Gpu, choices, choosing, gpu_of, launch
from lowbit.kernels.triton.fast.rows import (
    RowConfig,
    RowTable,
    again,
    as_rows,
    before,
    counted,
    edge_of,
    launch_rows,
    limit_of,
    load_along,
    load_pieces,
    meet,
    place,
    row_choice,
    store_piece,
    vector_of,
    within,
)

_SHORT = {
    2: (
        (1024, RowConfig(2, 1024, 4)),
        (2048, RowConfig(1, 2048, 4)),
        (4096, RowConfig(1, 4096, 4)),
        (8192, RowConfig(1, 8192, 8)),
        (16384, RowConfig(1, 16384, 8)),
    ),
    4: (
        (1024, RowConfig(2, 1024, 4)),
        (2048, RowConfig(2, 2048, 4)),
        (4096, RowConfig(1, 4096, 4)),
    ),
}
# Measured on an H200 for RMSNorm, in rows that begin at multiples of 16 elements.
RMS_ALIGNED: RowTable = {
    (90, 2): (
        *_SHORT[2],
        (32768, RowConfig(1, 32768, 16, 4)),
        (65536, RowConfig(1, 65536, 32, 2)),
        (131072, RowConfig(1, 8192, 4, 2, maxnreg=64)),
        (1 << 18, RowConfig(1, 8192, 4, 2)),
        (1 << 21, RowConfig(1, 16384, 8, 4)),
    ),
    (90, 4): (
        *_SHORT[4],
        (8192, RowConfig(1, 8192, 8)),
        (16384, RowConfig(1, 16384, 8)),
        (65536, RowConfig(1, 4096, 4)),
        (131072, RowConfig(1, 4096, 4, 4, maxnreg=56)),
        (1 << 21, RowConfig(1, 16384, 8, 4)),
    ),
}
# LayerNorm and other rows need more registers; where the above would spill, what does not.
FORWARD: RowTable = {
    (90, 2): (
        *_SHORT[2],
        (131072, RowConfig(1, 8192, 8, 2)),
        (1 << 18, RowConfig(1, 8192, 4, 2)),
        (1 << 21, RowConfig(1, 16384, 8, 4)),
    ),
    (90, 4): (
        *_SHORT[4],
        (8192, RowConfig(1, 8192, 16)),
        (131072, RowConfig(1, 4096, 4)),
        (1 << 21, RowConfig(1, 16384, 8, 4)),
    ),
}
# Rows that begin at no multiple of 16 bytes.
SHIFTED: RowTable = {
    (90, size): (*_SHORT[size][:2], (1 << 19, RowConfig(1, 4096, 4, 2)), *FORWARD[90, size][-1:])
    for size in (2, 4)
}

# How the gradients of weight and bias are cut: into blocks of rows by columns, and so many programs
# to a multiprocessor.
_ROWS, _COLUMNS, _PROGRAMS, _WARPS = 16, 128, 4, 4
# Elements of rows from which on it is worth while to write weights anew.
_MANY = 1 << 22


@triton.jit
def _meet_moments(
    mean, squares, words_ptr, row, part, limit, length, CENTRED: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """The mean of a row, and the sum of squares about it, from those of its parts."""
    means, squared = meet(mean, squares, words_ptr, row, part, PARTS, PARTS_BLOCK)
    if CENTRED:
        columns = limit
        if VEC > 1:  # of one row
            columns = tl.max(limit, axis=0)
        parts = tl.arange(0, PARTS_BLOCK)
        counts = counted(parts, columns, length, CHUNK).to(tl.float32)
        common = tl.sum(means * counts, axis=0) / length
        squared += counts * (means - common) * (means - common)
        mean = tl.full((ROWS,), common, tl.float32)
    return mean, tl.full((ROWS,), tl.sum(squared, axis=0), tl.float32)


@triton.jit
def shifts_kernel(x_ptr, z_ptr, length, z_stride, COLUMNS: tl.constexpr):
    """z[s, i] = x[i + s], for s, the second axis of the grid."""
    i, s = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1)
    x = tl.load(x_ptr + i + s, mask=i + s < length, other=0.0)
    tl.store(z_ptr + s * z_stride + i, x, mask=i < z_stride)


@triton.jit
def _weighted(z, weight_ptr, bias_ptr, at, mask, WEIGHTED: tl.constexpr, BIASED: tl.constexpr):
    """z · weight + bias for elements of rows, with what there is of both."""
    if WEIGHTED:
        z = z * tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if BIASED:
        z = z + tl.load(bias_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return z


@triton.jit
def norm_kernel(
    x_ptr, weight_ptr, bias_ptr, z_ptr, mean_ptr, rstd_ptr, words_ptr, rows, length, x_stride, eps,
    w_stride, CENTRED: tl.constexpr, WEIGHTED: tl.constexpr, BIASED: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, PIECES: tl.constexpr, HELD: tl.constexpr,
    ASM: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, VEC: tl.constexpr = 1,
):  # fmt: skip
    """z = (x - mean) / sqrt(variance + eps) · weight + bias; mean and 1 / sqrt are kept too.

    w_stride: 1, or that of `shifts_kernel`'s result, which weight and bias are then.

    The variance is that of the differences from the mean, which are in registers: no difference
    of large squares. Parts meet with their mean and their squares about it (Chan, Golub and
    LeVeque, Algorithms for computing the sample variance, 1983).
    """
    PIECE: tl.constexpr = CHUNK // PIECES
    row, part, column = place(words_ptr, rows, ROWS, CHUNK, PIECES, PARTS)
    limit, first = limit_of(row, x_stride, length, VEC), 0
    x = load_pieces(x_ptr, x_stride, row, rows, column, limit, 0.0, PIECES, VEC)
    if VEC > 1:
        first = before(row, x_stride, VEC)[:, None] * w_stride
        at, there = edge_of(row, rows, part, x_stride, length, limit, VEC)
        edge = tl.load(x_ptr + row[:, None] * x_stride + at, mask=there, other=0.0).to(tl.float32)
    mean = tl.zeros((ROWS,), tl.float32)
    if CENTRED:
        level = tl.zeros((ROWS, PIECE), tl.float32)
        for i in tl.static_range(PIECES):
            level += x[i].to(tl.float32)
        mean = tl.sum(level, axis=1)
        if VEC > 1:
            mean += tl.sum(edge, axis=1)
        mean = mean / tl.maximum(counted(part, limit, length, CHUNK), 1)
    squares = tl.zeros((ROWS, PIECE), tl.float32)
    for i in tl.static_range(PIECES):
        difference = again(x[i], tl.program_id(1), HELD, ASM) - mean[:, None]
        known = within(column + i * PIECE, limit, VEC)
        squares += tl.where(known, difference * difference, 0.0)
    squares = tl.sum(squares, axis=1)
    if VEC > 1:
        off = tl.where(there, edge - mean[:, None], 0.0)
        squares += tl.sum(off * off, axis=1)
    if PARTS > 1:
        mean, squares = _meet_moments(
            mean, squares, words_ptr, row, part, limit, length, CENTRED,
            ROWS, CHUNK, PARTS, PARTS_BLOCK, VEC,
        )  # fmt: skip
    rstd = 1.0 / tl.sqrt_rn(squares / length + eps)
    for i in tl.static_range(PIECES):
        z = (again(x[i], tl.program_id(2), HELD, ASM) - mean[:, None]) * rstd[:, None]
        columns = column + i * PIECE
        mask = within(columns, limit, VEC)
        z = _weighted(z, weight_ptr, bias_ptr, columns + first, mask, WEIGHTED, BIASED)
        store_piece(z_ptr, z, row, rows, columns, length, limit, VEC)
    if VEC > 1:
        z = (edge - mean[:, None]) * rstd[:, None]
        z = _weighted(z, weight_ptr, bias_ptr, at, there, WEIGHTED, BIASED)
        to = z_ptr + row[:, None] * length + at
        tl.store(to, z.to(z_ptr.dtype.element_ty), mask=there)
    if CENTRED:
        tl.store(mean_ptr + row, mean, mask=(row < rows) & (part == 0))
    tl.store(rstd_ptr + row, rstd, mask=(row < rows) & (part == 0))


@triton.jit
def norm_backward_kernel(
    x_ptr, dz_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, words_ptr, rows, length,
    x_stride, dz_stride, CENTRED: tl.constexpr, WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, PIECES: tl.constexpr, HELD: tl.constexpr,
    ASM: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr,
):  # fmt: skip
    """dx = (g - mean(g) - n · mean(g · n)) · rstd with g = dz · weight, n the normalized x."""
    PIECE: tl.constexpr = CHUNK // PIECES
    row, part, column = place(words_ptr, rows, ROWS, CHUNK, PIECES, PARTS)
    x = load_pieces(x_ptr, x_stride, row, rows, column, length, 0.0, PIECES)
    dz = load_pieces(dz_ptr, dz_stride, row, rows, column, length, 0.0, PIECES)
    rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
    mean = tl.zeros((ROWS,), tl.float32)
    if CENTRED:
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
    along, level = tl.zeros((ROWS, PIECE), tl.float32), tl.zeros((ROWS, PIECE), tl.float32)
    for i in tl.static_range(PIECES):
        g = dz[i].to(tl.float32)
        if WEIGHTED:
            g = g * load_along(weight_ptr, column + i * PIECE, length)
        # Past the row g is 0, so those lanes add nothing, whatever is normalized there.
        along += g * ((x[i].to(tl.float32) - mean[:, None]) * rstd[:, None])
        level += g
    along, level = tl.sum(along, axis=1), tl.sum(level, axis=1)
    if PARTS > 1:
        alongs, levels = meet(along, level, words_ptr, row, part, PARTS, PARTS_BLOCK)
        along = tl.full((ROWS,), tl.sum(alongs, axis=0), tl.float32)
        level = tl.full((ROWS,), tl.sum(levels, axis=0), tl.float32)
    for i in tl.static_range(PIECES):
        at, zero = column + i * PIECE, tl.program_id(2)
        g = again(dz[i], zero, HELD, ASM)
        if WEIGHTED:
            g = g * load_along(weight_ptr, at, length)
        normalized = (again(x[i], zero, HELD, ASM) - mean[:, None]) * rstd[:, None]
        dx = g - normalized * (along / length)[:, None]
        if CENTRED:
            dx = dx - (level / length)[:, None]
        store_piece(dx_ptr, dx * rstd[:, None], row, rows, at, length, length)


@triton.jit
def norm_weight_kernel(
    x_ptr, dz_ptr, mean_ptr, rstd_ptr, sums_ptr, rows, length, x_stride, dz_stride,
    CENTRED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (c, g) sums, for a block of columns, every programs(1)-th block of rows from g on;
    sums is [2, groups, length]: dz · n, and dz, with n the normalized x."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    groups = tl.num_programs(1)
    weight = tl.zeros((ROWS, COLUMNS), tl.float32)
    bias = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(tl.program_id(1) * ROWS, rows, groups * ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None] & (column < length)[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
        dz = tl.load(dz_ptr + row[:, None] * dz_stride + column[None, :], mask=inside, other=0.0)
        normalized, dz = x.to(tl.float32), dz.to(tl.float32)
        if CENTRED:
            normalized -= tl.load(mean_ptr + row, mask=row < rows, other=0.0)[:, None]
        normalized *= tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        weight += dz * normalized
        bias += dz
    at = sums_ptr + tl.program_id(1) * length + column
    tl.store(at, tl.sum(weight, axis=0), mask=column < length)
    tl.store(at + groups * length, tl.sum(bias, axis=0), mask=column < length)


@triton.jit
def column_sum_kernel(
    x_ptr, z_ptr, rows, length, z_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """z[b, c] = Σ_r x[b, r, c] for b, the second axis of the grid."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    block = tl.program_id(1)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < length)[None, :]
        at = (block * rows + row)[:, None] * length + column[None, :]
        total += tl.load(x_ptr + at, mask=inside, other=0.0)
    z = tl.sum(total, axis=0).to(z_ptr.dtype.element_ty)
    tl.store(z_ptr + block * z_stride + column, z, mask=column < length)


@choosing("layer_norm")
def norm_choice(
    gpu: Gpu,
    length: int,
    itemsize: int,
    centred: bool = True,
    biased: bool = False,
    aligned: bool = True,
) -> Choice[RowConfig]:
    """For rows of this length; aligned: all of them begin at multiples of 16 elements."""
    table = RMS_ALIGNED if not (centred or biased) else FORWARD
    table = table if aligned else SHIFTED
    return row_choice("norm_kernel", table, gpu, length, itemsize)


choices.add("rms_norm", partial(norm_choice, centred=False))


norm_backward_choice = choosing("norm_backward")(partial(row_choice, "norm_backward_kernel", {}))


def _shifts(x: Tensor, count: int, stride: int) -> Tensor:
    """x without its first s elements, for each s below `count`: [count, stride]. Rows that begin s
    elements after a multiple of 16 bytes find their weights at one."""
    z = torch.empty(count, stride, dtype=x.dtype, device=x.device)
    arguments = {"x_ptr": x.contiguous(), "z_ptr": z, "length": len(x), "z_stride": stride}
    grid = (triton.cdiv(stride, 1024), count)
    launch(shifts_kernel, grid, {**arguments, "COLUMNS": 1024}, num_warps=4)
    return z


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
    rows = len(x2d)
    z = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = torch.empty(rows if centred else 0, dtype=torch.float32, device=x.device)
    aligned = x2d.shape[1] % 16 == x2d.stride(0) % 16 == 0
    flags = {"centred": centred, "biased": bias is not None, "aligned": aligned}
    vector, w_stride, along = vector_of(x2d), 1, [weight, bias]
    if vector > 1 and weight is not None and x2d.numel() >= _MANY:
        w_stride = x2d.shape[1] + -x2d.shape[1] % 16
        along = [one if one is None else _shifts(one, vector, w_stride) for one in along]
    arguments = {
        "weight_ptr": x2d if along[0] is None else along[0].contiguous(),
        "bias_ptr": x2d if along[1] is None else along[1].contiguous(),
        "z_ptr": z,
        "mean_ptr": mean if centred else rstd,
        "rstd_ptr": rstd,
        "eps": eps,
        "w_stride": w_stride,
        "CENTRED": centred,
        "WEIGHTED": weight is not None,
        "BIASED": bias is not None,
    }
    launch_rows(norm_kernel, partial(norm_choice, **flags), config, arguments, x=x2d)
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
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    arguments = {
        "weight_ptr": x2d if weight is None else weight.contiguous(),
        "mean_ptr": mean if centred else rstd,
        "rstd_ptr": rstd,
        "dx_ptr": dx,
        "CENTRED": centred,
        "WEIGHTED": weight is not None,
    }
    rows = {"x": x2d, "dz": dz2d}
    launch_rows(norm_backward_kernel, norm_backward_choice, config, arguments, **rows)
    return dx


def norm_weight_backward(
    dz: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, dtype: torch.dtype, centred: bool
) -> Tensor:
    """The gradients of weight and bias, [2, length], in `dtype`."""
    x2d, dz2d = as_rows(x), as_rows(dz)
    rows, length = x2d.shape
    blocks = -(-length // _COLUMNS)
    groups = max(1, _PROGRAMS * gpu_of(x.device).multiprocessors // blocks)
    groups = min(groups, max(1, -(-rows // _ROWS)))
    sums = torch.empty((2, groups, length), dtype=torch.float32, device=x.device)
    shared = {"length": length, "ROWS": _ROWS, "COLUMNS": _COLUMNS}
    arguments = {
        **shared,
        "x_ptr": x2d,
        "dz_ptr": dz2d,
        "mean_ptr": mean if centred else rstd,
        "rstd_ptr": rstd,
        "sums_ptr": sums,
        "rows": rows,
        "x_stride": x2d.stride(0),
        "dz_stride": dz2d.stride(0),
        "CENTRED": centred,
    }
    launch(norm_weight_kernel, (blocks, groups), arguments, num_warps=_WARPS)
    out = torch.empty((2, length), dtype=dtype, device=x.device)
    arguments = {**shared, "x_ptr": sums, "z_ptr": out, "rows": groups, "z_stride": length}
    launch(column_sum_kernel, (blocks, 2), arguments, num_warps=_WARPS)
    return out
