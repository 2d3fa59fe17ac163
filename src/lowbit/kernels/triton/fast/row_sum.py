"""Sums over rows. Where there are few, each is summed in parts, and those in another launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.kernels.triton.fast.config import not_powers, require
from lowbit.kernels.triton.fast.launch import compute_capability, launch, multiprocessors
from lowbit.kernels.triton.fast.rows import as_rows

# Enough programs for each multiprocessor to have several at once.
_PROGRAMS_OF_A_PROCESSOR = 8
_WANTED_OF_A_THREAD, _LEAST_BLOCK, _LARGEST_CHUNK = 16, 2048, 4096


@dataclass(frozen=True)
class SumConfig:
    """`rows` rows to a program, which walks along them by `chunk`; `parts` programs to a row."""

    rows: int
    chunk: int
    parts: int
    num_warps: int

    def refusal(self) -> str | None:
        """Why this is no configuration; None if it is."""
        if refusal := not_powers(self, "rows", "chunk", "num_warps"):
            return refusal
        return None if self.parts >= 1 else f"parts is {self.parts}; it must be at least 1"


SumTable = Mapping[int, tuple[tuple[int, SumConfig], ...]]
"""By compute capability: (the longest row that it is for, configuration), the shortest first."""

TABLE: SumTable = {}


@triton.jit
def row_sum_kernel(
    x_ptr,
    z_ptr,
    rows,
    length,
    span,
    x_stride,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
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


def sum_config(rows: int, length: int, device: torch.device) -> SumConfig:
    """The configuration of the table, else that of a rule."""
    for longest, config in TABLE.get(compute_capability(device), ()):
        if length <= longest and rows >= config.rows * multiprocessors(device):
            return config
    chunk = min(triton.next_power_of_2(length), _LARGEST_CHUNK)
    together = max(1, _LEAST_BLOCK // chunk)
    warps = together * chunk // (32 * _WANTED_OF_A_THREAD)
    wanted = _PROGRAMS_OF_A_PROCESSOR * multiprocessors(device)
    parts = min(max(wanted * together // max(rows, 1), 1), -(-length // chunk))
    return SumConfig(together, chunk, parts, min(max(warps, 4), 8))


def row_sum(x: Tensor, config: SumConfig | None = None) -> Tensor:
    """The sums of [..., length] over its last dimension, in x's dtype; float32 within.

    ValueError if `config` is none.
    """
    x2d = as_rows(x)
    rows, length = x2d.shape
    config = config or sum_config(rows, length, x.device)
    require(config)
    # A multiple of 16 in every part, so that all parts begin where wide loads can.
    span = -(-length // config.parts)
    span += -span % min(config.chunk, 16)
    parts = -(-length // span)
    shape = x.shape[:-1] if parts == 1 else (rows, parts)
    z = torch.empty(shape, dtype=x.dtype if parts == 1 else torch.float32, device=x.device)
    arguments = {
        "x_ptr": x2d,
        "z_ptr": z,
        "rows": rows,
        "length": length,
        "span": span,
        "x_stride": x2d.stride(0),
        "ROWS": config.rows,
        "CHUNK": config.chunk,
    }
    grid = (-(-rows // config.rows), parts)
    launch(row_sum_kernel, grid, arguments, num_warps=config.num_warps)
    return z if parts == 1 else _sum_of_parts(z, x)


def _sum_of_parts(partial: Tensor, x: Tensor) -> Tensor:
    """[rows, parts] summed by one program a row, in x's dtype and shape."""
    rows, parts = partial.shape
    z = torch.empty(x.shape[:-1], dtype=x.dtype, device=x.device)
    arguments = {
        "x_ptr": partial,
        "z_ptr": z,
        "rows": rows,
        "length": parts,
        "span": parts,
        "x_stride": parts,
        "ROWS": 1,
        "CHUNK": triton.next_power_of_2(parts),
    }
    launch(row_sum_kernel, (rows, 1), arguments, num_warps=1)
    return z
