"""Products of rows with the weights of the experts that they belong to, on the kernels for one
weight: a block of rows is of one expert, and which, it finds out on the GPU. Nothing waits for the
host, and a grid is as large as the worst distribution needs; what is too much returns at once."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from lowbit.kernels.triton.fast import few_rows, many_rows
from lowbit.kernels.triton.fast.dequantize import dequantize
from lowbit.kernels.triton.fast.launch import Choice, Gpu, choosing, gpu_of
from lowbit.kernels.triton.fast.tiles import (
    TILE_DEPTH,
    TILE_ROWS,
    Extra,
    TiledWeight,
    by_expert,
    columns_of,
    finished,
    words_unit,
)
from lowbit.kernels.triton.fast.weight_only import KERNELS, Experts, few, many

# Rows of an expert from which on blocks of 256 lose little at its end; up to which blocks of 64 do.
_WIDE, _NARROW = 1024, 48


def _few_rows_config(gpu: Gpu, columns: int, N: int, K: int, used: int) -> few_rows.FewRowsConfig:
    """Up to eight programs for each multiprocessor, of 4,096 k and more each: experts have blocks
    of different numbers. Measured on an H200."""
    rows = 64 if columns == 8 else 128
    tiles, steps, splits = used * -(-N // rows), -(-K // TILE_DEPTH), 1
    while 2 * splits * tiles <= 8 * gpu.multiprocessors and steps >= 32 * splits:
        splits *= 2
    return few_rows.FewRowsConfig(rows, splits)


@choosing("grouped_matmul")
def grouped_choice(
    gpu: Gpu, M: int, N: int, K: int, experts: int, bits: int = 4, itemsize: int = 2,
    group_size: int = 128,
) -> Choice[Any]:  # fmt: skip
    """For M rows of x by weights [experts, N, K], by the rows that an expert has on average."""
    each, used, unit = -(-M // experts), min(experts, M), words_unit(group_size)
    refused = list[tuple[str, str]]()
    for name, rows in (("few_rows_kernel", min(each, few_rows.MOST_ROWS)), ("many_rows_kernel", M)):
        kernel = KERNELS[name]
        reason = kernel.refusal(gpu, rows, bits, itemsize)
        if reason is None and name == "few_rows_kernel" and each > rows and gpu.capability == 90:
            reason = f"an expert has {each} rows on average, and it takes {rows} at a time"
        if reason is not None:
            refused.append((name, reason))
            continue
        if name == "few_rows_kernel":
            columns = max(8, triton.next_power_of_2(rows))
            config = _few_rows_config(gpu, columns, N, K, used)
            return Choice(name, (config, columns), kernel.why, tuple(refused))
        # Blocks of 128 rows, since few experts have just as many as the average.
        each = each if each >= _WIDE else 128 if each > _NARROW else 64
        config = many_rows.many_rows_config(gpu, each, N * used, K, bits, unit)
        return Choice(name, config, kernel.why, tuple(refused))
    return Choice("dequantize_kernel and cuBLAS", None, "serves every product", tuple(refused))


def grouped_matmul(
    x: Tensor,
    tiles: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    N: int,
    K: int,
    group_size: int,
    bits: int,
    ends: Tensor,
    rows: Tensor | None,
    activation: str,
) -> Tensor:
    """As `lowbit.torch.functional.grouped_matmul`."""
    weight = TiledWeight(tiles, words, scale, zero, N, K, group_size, bits)
    x = x if x.stride(1) == 1 else x.contiguous()
    M = len(x if rows is None else rows)
    if not M or not x.numel() or not N:
        return x.new_zeros(M, columns_of(N, activation))
    experts = Experts(ends.contiguous(), None if rows is None else rows.contiguous())
    choice = grouped_choice(gpu_of(x.device), M, N, K, weight.experts, bits, x.itemsize, group_size)
    extra = Extra(activation=activation)
    if choice.kernel == "few_rows_kernel":
        return few(x, weight, extra, choice.config[0], experts, choice.config[1])
    if choice.kernel == "many_rows_kernel":
        return many(x, weight, extra, choice.config, experts)

    def floats(index: int) -> Tensor:
        return dequantize(weight.expert(index), x.dtype, 0, -(-N // TILE_ROWS))

    x = x if rows is None else x.index_select(0, rows)
    return finished(by_expert(x, ends, N, floats), extra)
