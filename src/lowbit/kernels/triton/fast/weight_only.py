"""Products with weights of 4 and 8 bits, x [M, K] · dequantized weight [N, K]ᵀ: which kernel serves
them, and how it is started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lowbit.kernels.triton.fast import few_rows, many_rows
from lowbit.kernels.triton.fast.dequantize import dequantize
from lowbit.kernels.triton.fast.descriptors import describable, described_in_shared
from lowbit.kernels.triton.fast.launch import Choice, Gpu, choosing, gpu_of, launch, parts_of
from lowbit.kernels.triton.fast.tables import measured
from lowbit.kernels.triton.fast.tiles import (
    GATES,
    TILE_ROWS,
    Extra,
    TiledWeight,
    columns_of,
    finished,
    words_unit,
)

_AT_ONCE = 256 * TILE_ROWS  # rows of a weight, that are floats at one time
_ALIGNED = 16  # elements, of which K and the stride of x are multiples for loads of 16 bytes


class Kernel(NamedTuple):
    """One way to multiply: why it does not serve a product (gpu, M, bits, itemsize), None if it
    does; how it is cut (gpu, M, N, K, bits, k that share a word); what runs it; what it is good
    for; and what its configurations are asked with (bits, k that share a word)."""

    refusal: Callable[[Gpu, int, int, int], str | None]
    config: Callable[..., Any]
    run: Callable[[Tensor, TiledWeight, Extra, Any], Tensor]
    why: str
    facts: Callable[[int, int], tuple[Any, ...]] = lambda bits, unit: ()


def with_floats(x: Tensor, weight: TiledWeight, extra: Extra, _: None) -> Tensor:
    """The weight is written in the dtype of x, some rows at a time, and multiplied by cuBLAS."""
    z = x.new_empty(len(x), weight.N)
    for first in range(0, weight.N, _AT_ONCE):
        w = dequantize(weight, x.dtype, first // TILE_ROWS, _AT_ONCE // TILE_ROWS)
        torch.matmul(x, w.T, out=z[:, first : first + len(w)])
    return finished(z, extra)


def _even(x: Tensor) -> Tensor:
    """x, or a copy whose rows are filled with zeros to a multiple of 16, and begin at such."""
    if describable(x) and x.stride(0) % _ALIGNED == 0 and x.shape[1] % _ALIGNED == 0:
        return x
    return torch.nn.functional.pad(x, (0, -x.shape[1] % _ALIGNED)).contiguous()


class Experts(NamedTuple):
    """Which rows of x belong to which expert: int32, where those of each end, [experts]; and, where
    x is to be gathered, the rows of x, as many as the result has."""

    ends: Tensor
    rows: Tensor | None = None

    def blocks(self, count: int, columns: int) -> int:
        """Of so many rows, how many blocks there are at most, each of one expert."""
        used = min(len(self.ends), count)
        return used + (count - used) // columns


def _arguments(
    x: Tensor, weight: TiledWeight, extra: Extra, z: Tensor, experts: Experts | None
) -> dict[str, Any]:
    """What both kernels take."""
    count = 0 if experts is None else len(experts.ends)
    return {
        "ends_ptr": None if experts is None else experts.ends,
        "experts": count,
        "EXPERTS": count and max(32, triton.next_power_of_2(count)),
        "tiles_ptr": weight.tiles.view(torch.int16),
        "words_ptr": weight.words,
        "z_ptr": z,
        "bias_ptr": extra.bias,
        "residual_ptr": extra.residual,
        "M": len(z),
        "N": weight.N,
        "K": x.shape[1],
        "padded": weight.words.shape[1],
        "PLANES": weight.bits // 4,
        "GROUP": words_unit(weight.group_size),
        "REAL": weight.zero is not None and weight.zero.is_floating_point(),
        "HALF": x.dtype == torch.float16,
        "BIAS": extra.bias is not None,
        "RESIDUAL": extra.residual is not None,
        "ACTIVATION": GATES.get(extra.activation, extra.activation),
        "GATED": extra.activation in GATES,
    }


def few(
    x: Tensor, weight: TiledWeight, extra: Extra, config: few_rows.FewRowsConfig,
    experts: Experts | None = None, columns: int = 0,
) -> Tensor:  # fmt: skip
    """By `few_rows_kernel`; columns: the rows of x in a block, 0: as many as x has."""
    config.require()
    x = _even(x)
    rows = None if experts is None else experts.rows
    z = x.new_empty(len(x if rows is None else rows), columns_of(weight.N, extra.activation))
    columns = columns or max(8, 1 << (len(x) - 1).bit_length())
    tiles, blocks = config.tiles(len(z), weight.N), 1
    if experts is not None:
        blocks = experts.blocks(len(z), columns)
    arguments = {
        **_arguments(x, weight, extra, z, experts),
        **parts_of(z, blocks * tiles, config.rows * columns, config.splits),
        "x_ptr": x,
        "x_stride": x.stride(0),
        "rows_ptr": rows,
        "GATHERED": rows is not None,
        "BLOCK_N": config.rows,
        "BLOCK_M": columns,
        "STAGES": config.num_stages,
    }
    grid, kernel = (blocks, tiles, config.splits), few_rows.few_rows_kernel
    launch(kernel, grid, arguments, num_warps=config.num_warps)
    return z


def many(
    x: Tensor, weight: TiledWeight, extra: Extra, config: many_rows.ManyRowsConfig,
    experts: Experts | None = None,
) -> Tensor:  # fmt: skip
    """By `many_rows_kernel`."""
    config.require(weight.bits, words_unit(weight.group_size))
    if experts is not None and experts.rows is not None:
        x = x.index_select(0, experts.rows)
    x = _even(x)
    z = x.new_empty(len(x), columns_of(weight.N, extra.activation))
    blocks = -(-len(x) // config.columns)
    if experts is not None:
        blocks = experts.blocks(len(x), config.columns)
    tiles = -(-weight.N // config.rows) * blocks
    arguments = {
        **_arguments(x, weight, extra, z, experts),
        **parts_of(z, tiles, config.rows * config.columns, config.splits),
        "blocks": blocks,
        "x_desc": described_in_shared(x, [config.columns, 64]),
        "BLOCK_N": config.rows,
        "BLOCK_M": config.columns,
        "STAGES": config.num_stages,
    }
    kernel = many_rows.many_rows_kernel
    launch(kernel, (tiles * config.splits,), arguments, num_warps=config.num_warps)
    return z


def _few_refusal(gpu: Gpu, M: int, bits: int, itemsize: int) -> str | None:
    if itemsize != 2:
        return "x is float32, and tensor cores take 16 bits"
    if M > few_rows.MOST_ROWS:
        return f"x has {M} rows, and it takes {few_rows.MOST_ROWS}"
    return None if gpu.capability >= 80 else f"{gpu} has no mma.sync of bfloat16"


def _many_refusal(gpu: Gpu, M: int, bits: int, itemsize: int) -> str | None:
    if itemsize != 2:
        return "x is float32, and tensor cores take 16 bits"
    return None if gpu.capability == 90 else f"{gpu} has no wgmma"


KERNELS = {
    "few_rows_kernel": Kernel(
        _few_refusal,
        few_rows.few_rows_config,
        few,
        f"takes up to {few_rows.MOST_ROWS} rows as fast as memory gives the weight",
    ),
    "many_rows_kernel": Kernel(
        _many_refusal,
        many_rows.many_rows_config,
        many,
        "wgmma takes the weight from registers, while the next 64 k become floats",
        lambda bits, unit: (bits, unit),
    ),
    "dequantize_kernel and cuBLAS": Kernel(
        lambda gpu, M, bits, itemsize: None,
        lambda gpu, M, N, K, bits, unit: None,
        with_floats,
        "serves every product",
    ),
}
"""The first that does not refuse serves a product."""


@choosing("weight_only_matmul")
def weight_only_choice(
    gpu: Gpu, M: int, N: int, K: int, bits: int = 4, itemsize: int = 2, group_size: int = 128
) -> Choice[Any]:
    """For x [M, K] by a weight [N, K] of so many bits, in groups."""
    refused, unit = list[tuple[str, str]](), words_unit(group_size)
    for name, kernel in KERNELS.items():
        refusal = kernel.refusal(gpu, M, bits, itemsize)
        if refusal is None:
            config, source = kernel.config(gpu, M, N, K, bits, unit), ""
            if config is not None:
                kind, facts = f"{bits} bits by {unit}", kernel.facts(bits, unit)
                config, source = measured(gpu, name, kind, (M, N, K), config, facts)
            return Choice(name, config, kernel.why, tuple(refused), source)
        refused.append((name, refusal))
    raise AssertionError("the last kernel serves every product")


def flattened(x: Tensor, extra: Extra, columns: int) -> tuple[Tensor, Extra]:
    """x [..., K] as rows without gaps between k, and what follows a product with so many columns,
    contiguous."""
    flat = x.reshape(-1, x.shape[-1])
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    rows = None if extra.residual is None else extra.residual.reshape(-1, columns).contiguous()
    return flat, Extra(
        None if extra.bias is None else extra.bias.contiguous(), rows, extra.activation
    )


def weight_only_matmul(
    x: Tensor,
    tiles: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    N: int,
    K: int,
    group_size: int,
    bits: int,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
) -> Tensor:
    """x [..., K], floats of any strides, by a weight whose fields follow: [..., N] or, with a
    gate, [..., N / 2]."""
    weight = TiledWeight(tiles, words, scale, zero, N, K, group_size, bits)
    columns = columns_of(N, activation)
    flat, extra = flattened(x, Extra(bias, residual, activation), columns)
    if not x.numel() or not N:
        z = finished(flat.new_zeros(len(flat), N), extra)
    else:
        choice = weight_only_choice(gpu_of(x.device), len(flat), N, K, bits, x.itemsize, group_size)
        z = KERNELS[choice.kernel].run(flat, weight, extra, choice.config)
    return z.view(*x.shape[:-1], columns)
