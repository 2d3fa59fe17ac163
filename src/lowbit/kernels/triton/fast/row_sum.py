"""Sums over rows. Where there are few, each is summed in parts, and those in another launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.kernels.triton.fast.launch import Choice, Config, Gpu, choosing, gpu_of, launch
from lowbit.kernels.triton.fast.rows import as_rows

# Enough programs for each multiprocessor to have several at once.
_PROGRAMS_OF_A_PROCESSOR = 8
_WANTED_OF_A_THREAD, _LEAST_BLOCK, _LARGEST_CHUNK = 16, 2048, 4096


@dataclass(frozen=True)
class SumConfig(Config, rows=1, chunk=1, num_warps=1, positive=("parts",)):
    """`rows` rows to a program, which walks along them by `chunk`; `parts` programs to a row."""

    rows: int
    chunk: int
    parts: int
    num_warps: int


@triton.jit
def row_sum_kernel(
    x_ptr, z_ptr, rows, length, span, x_stride, ROWS: tl.constexpr, CHUNK: tl.constexpr
):
    """A program sums `span` elements of each of its rows; z is [rows, parts].

    Lanes add up over the chunks first, and with each other only at the end.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(1) * span
    end = tl.minimum(start + span, length)
    total = tl.zeros((ROWS, CHUNK), tl.float32)
    for first in range(start, end, CHUNK):
        column = first + tl.arange(0, CHUNK)
        inside = (row < rows)[:, None] & (column < end)[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
        total += x.to(tl.float32)
    z = tl.sum(total, axis=1).to(z_ptr.dtype.element_ty)
    tl.store(z_ptr + row * tl.num_programs(1) + tl.program_id(1), z, mask=row < rows)


@choosing("sum")
def sum_choice(gpu: Gpu, rows: int, length: int) -> Choice[SumConfig]:
    """By a rule: enough programs to fill the GPU, from the parts of rows if there are few."""
    chunk = min(triton.next_power_of_2(length), _LARGEST_CHUNK)
    together = max(1, _LEAST_BLOCK // chunk)
    warps = together * chunk // (32 * _WANTED_OF_A_THREAD)
    wanted = _PROGRAMS_OF_A_PROCESSOR * gpu.multiprocessors
    parts = min(max(wanted * together // max(rows, 1), 1), -(-length // chunk))
    config = SumConfig(together, chunk, parts, min(max(warps, 4), 8))
    return Choice("row_sum_kernel", config, f"cut so that {wanted} programs run, or more")


def row_sum(x: Tensor, config: SumConfig | None = None) -> Tensor:
    """The sums of [..., length] over its last dimension, in x's dtype; float32 within.

    ValueError if `config` is none.
    """
    x2d = as_rows(x)
    rows, length = x2d.shape
    config = config or sum_choice(gpu_of(x.device), rows, length).config
    config.require()
    # A multiple of 16 in every part, so that all parts begin where wide loads can.
    span = -(-length // config.parts)
    span += -span % min(config.chunk, 16)
    parts = -(-length // span)
    if parts == 1:
        return _summed(x2d, x.shape[:-1], x.dtype, span, config)
    partial = _summed(x2d, (rows, parts), torch.float32, span, config)
    whole = SumConfig(1, triton.next_power_of_2(parts), 1, 1)
    return _summed(partial, x.shape[:-1], x.dtype, parts, whole)


def _summed(
    x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, span: int, config: SumConfig
) -> Tensor:
    """Sums of `span` elements each of x [rows, length], in a tensor of this shape."""
    rows, length = x.shape
    z = torch.empty(shape, dtype=dtype, device=x.device)
    arguments = {
        "x_ptr": x,
        "z_ptr": z,
        "rows": rows,
        "length": length,
        "span": span,
        "x_stride": x.stride(0),
        "ROWS": config.rows,
        "CHUNK": config.chunk,
    }
    grid = (-(-rows // config.rows), -(-length // span))
    launch(row_sum_kernel, grid, arguments, num_warps=config.num_warps)
    return z
