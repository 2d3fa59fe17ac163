"""The gradients of a norm's weight and bias: sums over rows, by columns, in two fixed steps.

No atomic addition: the same input gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.kernels.triton.fast.config import Config
from lowbit.kernels.triton.fast.launch import gpu_of, launch
from lowbit.kernels.triton.fast.rows import as_rows


@dataclass(frozen=True)
class ColumnConfig(Config):
    """Blocks of `rows` by `columns`, and so many programs to a multiprocessor."""

    rows: int = 16
    columns: int = 128
    programs: int = 4
    num_warps: int = 4

    def refusal(self) -> str | None:
        """Why this is no configuration; None if it is."""
        if refusal := self.not_powers(rows=1, columns=1, num_warps=1):
            return refusal
        return None if self.programs >= 1 else f"programs is {self.programs}; it must be positive"


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


def norm_weight_backward(
    dz: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dtype: torch.dtype,
    centred: bool,
    config: ColumnConfig | None = None,
) -> Tensor:
    """The gradients of weight and bias, [2, length], in `dtype`.

    ValueError if `config` is none.
    """
    config = config or ColumnConfig()
    config.require()
    x2d, dz2d = as_rows(x), as_rows(dz)
    rows, length = x2d.shape
    blocks = -(-length // config.columns)
    groups = max(1, config.programs * gpu_of(x.device).multiprocessors // blocks)
    groups = min(groups, max(1, -(-rows // config.rows)))
    sums = torch.empty((2, groups, length), dtype=torch.float32, device=x.device)
    arguments = {
        "x_ptr": x2d,
        "dz_ptr": dz2d,
        "mean_ptr": mean if centred else rstd,
        "rstd_ptr": rstd,
        "sums_ptr": sums,
        "rows": rows,
        "length": length,
        "x_stride": x2d.stride(0),
        "dz_stride": dz2d.stride(0),
        "CENTRED": centred,
        "ROWS": config.rows,
        "COLUMNS": config.columns,
    }
    launch(norm_weight_kernel, (blocks, groups), arguments, num_warps=config.num_warps)
    out = torch.empty((2, length), dtype=dtype, device=x.device)
    arguments = {
        "x_ptr": sums,
        "z_ptr": out,
        "rows": groups,
        "length": length,
        "z_stride": length,
        "ROWS": config.rows,
        "COLUMNS": config.columns,
    }
    launch(column_sum_kernel, (blocks, 2), arguments, num_warps=config.num_warps)
    return out
