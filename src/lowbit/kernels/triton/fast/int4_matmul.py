"""Products with 4-bit weights, x [M, K] · dequantized weight [N, K]ᵀ: which kernel serves them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.kernels.triton.fast import int4_one_row, int4_planes
from lowbit.kernels.triton.fast.launch import Choice, Gpu, choosing, gpu_of
from lowbit.kernels.triton.fast.tiles import TILE_ROWS, Int4Weight

_DEQUANTIZED_TILES = 256  # of rows of the weight, that are floats at one time


class Int4Kernel(NamedTuple):
    """One way to multiply: why it does not serve a product (M, K, group_size, itemsize), None if it
    does; how it is cut for a weight (N, K); what runs it; and what it is good for."""

    refusal: Callable[[int, int, int, int], str | None]
    config: Callable[[Gpu, int, int], Any]
    run: Callable[[Tensor, Int4Weight, Any], Tensor]
    why: str


def _as_floats(x: Tensor, weight: Int4Weight, _: None) -> Tensor:
    """The weight is written in the dtype of x, some tiles at a time, and multiplied by cuBLAS."""
    z = x.new_empty(len(x), weight.N)
    for first in range(0, weight.tiles.shape[0], _DEQUANTIZED_TILES):
        w = int4_planes.dequantize(weight, x.dtype, first, _DEQUANTIZED_TILES)
        at = first * TILE_ROWS
        torch.matmul(x, w.T, out=z[:, at : at + len(w)])
    return z


KERNELS = {
    "one_row_kernel": Int4Kernel(
        int4_one_row.refusal,
        int4_one_row.vector_config,
        int4_one_row.vector,
        "integer units take one row as fast as memory gives the weight",
    ),
    "rows_kernel": Int4Kernel(
        int4_planes.refusal,
        int4_planes.rows_config,
        int4_planes.rows,
        f"tensor cores take {int4_planes.MOST_ROWS} rows for one reading of the weight",
    ),
    "dequantize_kernel and cuBLAS": Int4Kernel(
        lambda M, K, group_size, itemsize: None,
        lambda gpu, N, K: None,
        _as_floats,
        "serves every product",
    ),
}
"""The first that does not refuse serves a product."""


@choosing("int4_matmul")
def int4_choice(gpu: Gpu, M: int, N: int, K: int, group_size: int, itemsize: int) -> Choice[Any]:
    """For x [M, K] by a weight [N, K]."""
    refused = list[tuple[str, str]]()
    for name, kernel in KERNELS.items():
        refusal = kernel.refusal(M, K, group_size, itemsize)
        if refusal is None:
            return Choice(name, kernel.config(gpu, N, K), kernel.why, tuple(refused))
        refused.append((name, refusal))
    raise AssertionError("the last kernel serves every product")


def int4_matmul(x: Tensor, *parts: Any) -> Tensor:
    """x [..., K], floats of any strides, by a weight whose fields follow: [..., N]."""
    weight = Int4Weight(*parts)
    if not x.numel() or not weight.N:
        return x.new_zeros(*x.shape[:-1], weight.N)
    flat = x.reshape(-1, weight.K)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    sizes = len(flat), weight.N, weight.K, weight.group_size, x.itemsize
    choice = int4_choice(gpu_of(x.device), *sizes)
    return KERNELS[choice.kernel].run(flat, weight, choice.config).view(*x.shape[:-1], weight.N)
