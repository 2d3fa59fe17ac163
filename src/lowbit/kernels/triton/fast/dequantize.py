"""A weight in tiles as floats in rows: for float32, and for GPUs without another kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.kernels.triton.fast.launch import launch
from lowbit.kernels.triton.fast.tiles import MIDDLE, TILE_ROWS, TiledWeight


@triton.jit
def _values(halves):
    """Halves of words [4, 2, 256] of units as their nibbles, float32 [64, 128]."""
    a, b = halves & 15, (halves >> 4) & 15
    c, d = (halves >> 8) & 15, (halves >> 12) & 15
    units = tl.join(tl.join(a, c), tl.join(b, d)).reshape(4, 2, 8, 4, 4, 2, 2, 2)
    return units.permute(0, 7, 2, 1, 4, 6, 3, 5).reshape(64, 128).to(tl.float32)


@triton.jit
def dequantize_kernel(
    tiles_ptr, scale_ptr, zero_ptr, w_ptr, N, K, first,
    GROUP: tl.constexpr, ZERO: tl.constexpr, PLANES: tl.constexpr, MIDDLE: tl.constexpr,
):  # fmt: skip
    """64 rows and 128 k, from row 64·first on, as floats: w [rows, K]; scales and zeros by row."""
    tile, step, steps = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    unit = (first + tile) * 4 + tl.arange(0, 4)[:, None, None]
    at = unit.to(tl.int64) * (2 * steps) + step * 2 + tl.arange(0, 2)[None, :, None]
    at = at * (256 * PLANES) + tl.arange(0, 256)[None, None, :]
    values = _values(tl.load(tiles_ptr + at))
    if PLANES == 2:
        values = values * 16 + _values(tl.load(tiles_ptr + at + 256))
    n, k = (first + tile) * 64 + tl.arange(0, 64), step * 128 + tl.arange(0, 128)
    there = (n < N)[:, None] & (k < K)[None, :]
    groups = (K + GROUP - 1) // GROUP
    if GROUP % 128 == 0:  # one scale for a row of the tile
        at = (n * groups + step * 128 // GROUP)[:, None]
        known = (n < N)[:, None]
    else:
        at = n[:, None] * groups + (k // GROUP)[None, :]
        known = there
    values -= MIDDLE
    if ZERO:
        values -= tl.load(zero_ptr + at, mask=known, other=0.0).to(tl.float32)
    w = values * tl.load(scale_ptr + at, mask=known, other=0.0).to(tl.float32)
    at = (tile * 64 + tl.arange(0, 64))[:, None].to(tl.int64) * K + k[None, :]
    tl.store(w_ptr + at, w.to(w_ptr.dtype.element_ty), mask=there)


def dequantize(weight: TiledWeight, dtype: torch.dtype, first: int, count: int) -> Tensor:
    """`count` times 64 rows of the weight, from row 64·first on, as floats [rows, K]."""
    left = min(count * TILE_ROWS, weight.N - first * TILE_ROWS)
    w = torch.empty(left, weight.K, dtype=dtype, device=weight.tiles.device)
    arguments = {
        "tiles_ptr": weight.tiles.view(torch.int16),
        "scale_ptr": weight.scale,
        "zero_ptr": weight.scale if weight.zero is None else weight.zero,
        "w_ptr": w,
        "N": weight.N,
        "K": weight.K,
        "first": first,
        "GROUP": weight.group_size,
        "ZERO": weight.zero is not None,
        "PLANES": weight.bits // 4,
        "MIDDLE": MIDDLE[weight.bits],
    }
    grid = triton.cdiv(left, TILE_ROWS), weight.tiles.shape[1] // 2
    launch(dequantize_kernel, grid, arguments)
    return w
