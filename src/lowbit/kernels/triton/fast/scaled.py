# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false
"""Products of 8 bits by 8 bits on Hopper, int8 or float8 (e4m3): z = (x · wᵀ) · scales.

In Gluon, since Triton 3.6 waits for each product of int8 before it starts the next (its PTX has
`wgmma.wait_group 0` in the loop). The weight is the left
operand, so that few rows of x take no more than they are. Programs stay, and load for their next
tile while they store this one. Scales of blocks of 128 by 128 have a kernel of their own
(`scaled_blocks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lowbit.kernels.triton.fast.descriptors import aligned, described_in_shared
from lowbit.kernels.triton.fast.fragments import barrier, finish, tile_of
from lowbit.kernels.triton.fast.launch import (
    Choice,
    Gpu,
    TileConfig,
    cheapest,
    choosing,
    gpu_of,
    launch,
    parts_of,
)
from lowbit.kernels.triton.fast.many_rows import barriers, done_with, load_by_tma
from lowbit.kernels.triton.fast.scaled_blocks import BlocksConfig, blocks_config, launched
from lowbit.kernels.triton.fast.tables import measured
from lowbit.kernels.triton.fast.tiles import Extra, by_torch, finished


@dataclass(frozen=True)
class ScaledConfig(TileConfig):
    """Of 8-bit numbers, for a result of so many bytes an element."""

    def misfit(self, itemsize: int) -> str | None:
        return self.misfit_holding(self.held(itemsize))

    def held(self, itemsize: int) -> int:
        """The bytes of shared memory of a program; half a tile is turned there to be stored."""
        stages = 128 * (self.rows + self.columns) * self.num_stages
        return stages + self.rows * self.columns * itemsize // 2


_SHAPES = [
    (128, 256, 8, 4), (256, 128, 8, 4), (128, 128, 4, 4), (64, 256, 4, 4), (64, 128, 4, 4),
    (128, 64, 4, 6), (64, 64, 4, 6),
]  # fmt: skip
"""Rows, columns, warps and stages."""


def scaled_config(gpu: Gpu, M: int, N: int, K: int, itemsize: int = 2) -> ScaledConfig:
    """The cheapest tiles, of which none is half empty; for few rows of x small ones, and K cut
    where there are too few."""
    if M > 32:
        several = [
            ScaledConfig(rows, columns, 1, warps, stages).fitting(itemsize)
            for rows, columns, warps, stages in _SHAPES
            if columns == 64 or columns < 2 * M
        ]
        return cheapest(several, gpu, M, N, K, even=True)
    columns = max(16, 1 << (M - 1).bit_length())
    tall = -(-N // 128) * -(-M // columns) >= 0.8 * gpu.multiprocessors
    found = ScaledConfig(128 if tall else 64, columns, 1, 4, 6)
    splits, steps = 1, -(-K // 128)
    programs = gpu.multiprocessors * (2 if columns == 16 else 1)
    while (
        steps % (2 * splits) == 0
        and steps >= 8 * splits
        and 2 * splits * found.tiles(M, N) <= programs
    ):
        splits *= 2
    return replace(found, splits=splits)


@gluon.jit
def _load(step, steps, each, units, w_desc, x_desc, ws, xs, bars, tiles_m, tiles_n,
          SPLITS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The 128 k of a program's step, counted over all of its work, begin to move into a stage."""
    unit = gl.program_id(0) + step // each * gl.num_programs(0)
    there = unit < units
    _, split, tile_n, tile_m = tile_of(unit, tiles_m, tiles_n, SPLITS)
    k = (split * each + step % each) * 128
    stage = step % STAGES
    bar = bars.index(stage)
    mbarrier.expect(bar, w_desc.block_type.nbytes + x_desc.block_type.nbytes, pred=there)
    load_by_tma(w_desc, [tile_n * w_desc.block_type.shape[0], k], bar, ws.index(stage), pred=there)
    load_by_tma(x_desc, [tile_m * x_desc.block_type.shape[0], k], bar, xs.index(stage), pred=there)


@gluon.jit
def _scaled(total, n, m, M, N, split, w_scale_ptr, x_scale_ptr, x_zero_ptr, w_sum_ptr,
            ZERO: gl.constexpr):  # fmt: skip
    """Sums [n, m] less what the zero points of x add, once for all parts, times both scales."""
    if ZERO:
        zero = gl.load(x_zero_ptr + m, mask=(m < M) & (split == 0), other=0)
        of_w = gl.load(w_sum_ptr + n, mask=n < N, other=0)
        total -= gl.expand_dims(of_w, 1) * gl.expand_dims(zero, 0)
    of_x = gl.load(x_scale_ptr + m, mask=m < M, other=0.0)
    of_w = gl.load(w_scale_ptr + n, mask=n < N, other=0.0)
    return total.to(gl.float32) * gl.expand_dims(of_w, 1) * gl.expand_dims(of_x, 0)


@gluon.jit(do_not_specialize=["M"])
def scaled_kernel(
    w_desc, x_desc, w_scale_ptr, x_scale_ptr, x_zero_ptr, w_sum_ptr, z_ptr, bias_ptr, residual_ptr,
    part_ptr, met_ptr, M, N, K,
    ZERO: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
    ACTIVATION: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """z[m, n] = Σ_k (x[m, k] - x_zero[m])·w[n, k] · x_scale[m]·w_scale[n], if ZERO with the sums of
    the weight's rows, w_sum[n]. w_desc, x_desc: blocks [BLOCK_N, 128] and [BLOCK_M, 128]."""
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    SUM: gl.constexpr = gl.int32 if w_desc.dtype == gl.int8 else gl.float32
    # Products of int8 have at most 224 columns (PTX ISA, wgmma.mma_async).
    WIDE: gl.constexpr = 128 if BLOCK_M > 128 and gl.int32 == SUM else BLOCK_M
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, WIDE, 32]
    )
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, gl.num_warps()], [0, 1])
    tiles_m, tiles_n = (M + BLOCK_M - 1) // BLOCK_M, (N + BLOCK_N - 1) // BLOCK_N
    units = tiles_m * tiles_n * SPLITS
    each = (K + 127) // 128 // SPLITS
    ws = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_N, 128], w_desc.layout)
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, 128], x_desc.layout)
    bars = barriers(STAGES)
    for ahead in gl.static_range(STAGES - 1):
        _load(ahead, K, each, units, w_desc, x_desc, ws, xs, bars, tiles_m, tiles_n, SPLITS, STAGES)
    step = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        tile, split, tile_n, tile_m = tile_of(unit, tiles_m, tiles_n, SPLITS)
        n = tile_n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, MMA))
        m = tile_m * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, MMA))
        total = gl.zeros([BLOCK_N, BLOCK_M], SUM, MMA)
        for _ in range(each):
            stage = step % STAGES
            mbarrier.wait(bars.index(stage), step // STAGES & 1)
            x = xs.index(stage).permute((1, 0))
            total = warpgroup_mma(ws.index(stage), x, total, is_async=True)
            total = warpgroup_mma_wait(1, deps=(total,))
            barrier()  # all are done with the stage before
            _load(step + STAGES - 1, K, each, units, w_desc, x_desc, ws, xs, bars, tiles_m, tiles_n,
                  SPLITS, STAGES)  # fmt: skip
            step += 1
        total = warpgroup_mma_wait(0, deps=(total,))
        scaled = _scaled(total, n, m, M, N, split, w_scale_ptr, x_scale_ptr, x_zero_ptr, w_sum_ptr,
                         ZERO)  # fmt: skip
        finish(scaled, tile, split, tile_n * BLOCK_N, tile_m * BLOCK_M, M, N, z_ptr, bias_ptr,
               residual_ptr, part_ptr, met_ptr, OUT, BIAS, RESIDUAL, ACTIVATION,
               SPLITS)  # fmt: skip
    done_with(bars, STAGES)


def _cublas_refusal(M: int, N: int, K: int, kind: str, blocks: bool, itemsize: int) -> str | None:
    """Why cuBLAS, measured on an H200, does not multiply float8 here."""
    least, step, deep = (65, 128, 512) if blocks else (256, 16, 16)
    if kind == "int8" or itemsize != 2:
        return "it multiplies float8 to 16 bits"
    if least > M:
        return f"x has {M} rows, and it is the faster from {least} on"
    if N % step or K % deep or (blocks and M % 16):
        return f"N is no multiple of {step}, or K of {deep}" + ", or M of 16" * blocks
    if blocks and (torch.__version__ < (2, 9) or (torch.version.cuda or "0") < "12.9"):
        return "scales of blocks need PyTorch 2.9 and CUDA 12.9"
    return None


@choosing("scaled_matmul")
def scaled_choice(
    gpu: Gpu, M: int, N: int, K: int, kind: str = "int8", blocks: bool = False, itemsize: int = 2
) -> Choice[ScaledConfig | BlocksConfig | None]:
    """For x [M, K] by a weight [N, K] of a kind, "int8" or "float8_e4m3fn", with scales of blocks
    of 128 or of whole rows, and a result of so many bytes an element."""
    if gpu.capability != 90:
        refused = (("scaled_kernel", f"{gpu} has no wgmma"),)
        return Choice("PyTorch in float32", None, "serves every product", refused)
    refusal = _cublas_refusal(M, N, K, kind, blocks, itemsize)
    if refusal is None:
        why = "is at the limit of the hardware there (torch._scaled_mm)"
        return Choice("cuBLAS", None, why)
    refused = (("cuBLAS", refusal),)
    if blocks:
        why = "groups of warps scale the sums of 128 k in turn, while others multiply"
        return Choice("scaled_blocks_kernel", blocks_config(gpu, M, N, K), why, refused)
    rule, name = scaled_config(gpu, M, N, K, itemsize), "scaled_kernel"
    what = f"{kind} to {8 * itemsize} bits"
    config, source = measured(gpu, name, what, (M, N, K), rule, (itemsize,))
    why = "wgmma takes both operands from shared memory"
    return Choice(name, config, why, refused, source)


def scaled_matmul(
    x: Tensor,
    w: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    x_zero: Tensor | None,
    w_sum: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    dtype: torch.dtype,
) -> Tensor:
    """x [M, K] by w [N, K], with their scales: [M, N] of a dtype."""
    extra, (M, K), N = Extra(bias, residual, activation), x.shape, len(w)
    blocks = w_scale.dim() == 2
    choice = scaled_choice(gpu_of(x.device), M, N, K, str(w.dtype)[6:], blocks, dtype.itemsize)
    if not (M and N and K):
        return finished(torch.zeros(M, N, dtype=dtype, device=x.device), extra)
    if choice.kernel == "cuBLAS" and dtype is torch.bfloat16:  # the only one that it gives
        scales = x_scale.contiguous()[:, None], w_scale.contiguous()[None, :]
        if blocks:
            scales = x_scale.T.contiguous().T, w_scale.contiguous().T
        x, w = aligned(x.contiguous()), aligned(w.contiguous())
        multiply: Any = torch.ops.aten._scaled_mm.default
        z = multiply(x, w.T, *scales, out_dtype=dtype, use_fast_accum=not blocks)
        if extra == Extra():
            return z
        return finished(z.float(), extra.to(torch.float32)).to(dtype)
    if choice.kernel == "PyTorch in float32":
        return by_torch(x, w, x_scale, w_scale, x_zero, extra, torch.float32).to(dtype)
    scales = x_scale, w_scale, x_zero, w_sum
    rule: Any = blocks_config if blocks else scaled_config
    config = choice.config or rule(gpu_of(x.device), M, N, K)
    return _launched(aligned(x), aligned(w), scales, extra, dtype, config)


def _launched(
    x: Tensor,
    w: Tensor,
    scales: Sequence[Tensor | None],
    extra: Extra,
    dtype: torch.dtype,
    config: ScaledConfig | BlocksConfig,
) -> Tensor:
    """The product by the kernel that a configuration is of, cut as it says."""
    given = (None if one is None else one.contiguous() for one in (*scales, *extra[:2]))
    x_scale, w_scale, x_zero, w_sum, bias, residual = given
    if isinstance(config, BlocksConfig):
        extra = Extra(bias, residual, extra.activation)
        return launched(x, w, x_scale, w_scale, extra, dtype, config)
    # A residual is added before the result is narrowed.
    itemsize = 4 if residual is not None else dtype.itemsize
    config = config.fitting(itemsize)
    config.require(itemsize)
    z = torch.empty(len(x), len(w), dtype=dtype, device=x.device)
    tiles = config.tiles(len(x), len(w))
    arguments = {
        **parts_of(z, tiles, config.rows * config.columns, config.splits),
        "w_desc": described_in_shared(w, [config.rows, 128]),
        "x_desc": described_in_shared(x, [config.columns, 128]),
        "w_scale_ptr": w_scale,
        "x_scale_ptr": x_scale,
        "x_zero_ptr": x_zero,
        "w_sum_ptr": w_sum,
        "z_ptr": z,
        "bias_ptr": bias,
        "residual_ptr": residual,
        "M": len(x),
        "N": len(w),
        "K": x.shape[1],
        "ZERO": x_zero is not None,
        "BIAS": bias is not None,
        "RESIDUAL": residual is not None,
        "ACTIVATION": extra.activation,
        "STAGES": config.num_stages,
    }
    # One program of this size fits into a multiprocessor, or two.
    most = gpu_of(x.device).multiprocessors * max(1, (220 << 10) // config.held(itemsize))
    grid = (min(tiles * config.splits, most),)
    launch(scaled_kernel, grid, arguments, num_warps=config.num_warps)
    return z
