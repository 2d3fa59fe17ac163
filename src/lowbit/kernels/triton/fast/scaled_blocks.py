# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
"""Products of float8 (e4m3) with scales of blocks of 128 by 128, on Hopper (DeepSeek-V3, arXiv
2412.19437, section 3.3): the sums of each 128 k are scaled in float32.

Here x is the left operand, so that a thread has few rows, each with a scale of its own, and all
columns of a tile share one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lowbit.kernels.triton.fast.descriptors import described_in_shared
from lowbit.kernels.triton.fast.fragments import finish, part_of, tile_of
from lowbit.kernels.triton.fast.launch import Config, Gpu, launch, parts_of, too_much_shared
from lowbit.kernels.triton.fast.many_rows import barriers, load_by_tma, next_stage
from lowbit.kernels.triton.fast.tiles import Extra

REGISTERS = {1: 232, 2: 232, 3: 160}
"""Of a thread that multiplies, by the groups of a program."""


@dataclass(frozen=True)
class BlocksConfig(Config, splits=1, positive=("groups", "num_stages")):
    """Tiles of 64·groups rows of x by 128 of the weight, K cut in `splits`, `num_stages - 1` steps
    of 128 k ahead."""

    groups: int
    splits: int
    num_stages: int

    def misfit(self, itemsize: int) -> str | None:
        if self.groups not in (1, 2, 3):
            return f"groups is {self.groups}; give 1, 2 or 3"
        turned = 64 * 64 * self.groups * itemsize  # half a tile, to be stored
        return too_much_shared(self.num_stages * (64 * self.groups + 128) * 128 + turned)

    def tiles(self, M: int, N: int) -> int:
        """How many there are in all."""
        return -(-N // 128) * -(-M // (64 * self.groups))


def blocks_config(gpu: Gpu, M: int, N: int, K: int) -> BlocksConfig:
    """What takes the least time in rounds of programs, three groups a tenth less each than two; K
    is cut where there are few. Measured on an H200."""

    def time(groups: int) -> float:
        rounds = -(-BlocksConfig(groups, 1, 4).tiles(M, N) // gpu.multiprocessors)
        return rounds * groups * (0.9 if groups == 3 else 1.0)

    groups = 1 if M <= 64 else min((2, 3), key=time)
    few = 2 * BlocksConfig(groups, 1, 4).tiles(M, N) <= gpu.multiprocessors and K >= 2048
    return BlocksConfig(groups, 2 if few else 1, 4)


@gluon.jit
def _load(source, stages, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """What the warp does that only loads: 128 k after each other move into stages."""
    begin, end, n0, m0, w_desc, x_desc = source
    ws, xs, full, empty = stages
    stage, phase = 0, 1
    for step in range(begin, end):
        mbarrier.wait(empty.index(stage), phase)
        bar = full.index(stage)
        mbarrier.expect(bar, w_desc.block_type.nbytes + GROUPS * x_desc.block_type.nbytes)
        load_by_tma(w_desc, [n0, step * 128], bar, ws.index(stage))
        for i in gl.static_range(GROUPS):
            load_by_tma(x_desc, [m0 + 64 * i, step * 128], bar, xs.index(stage * GROUPS + i))
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _multiply(
    which, given, GROUPS: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
    ACTIVATION: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """What each of the groups of four warps does that multiply: 64 rows of x."""
    place, stages, inputs, outputs, sizes = given
    ws, xs, full, empty = stages
    begin, end, tile, split, n0, m0 = place
    w_scale_ptr, x_scale_ptr, bias_ptr, residual_ptr = inputs
    z_ptr, part_ptr, met_ptr = outputs
    M, N, K = sizes
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32]
    )
    blocks = (K + 127) // 128
    m0 += 64 * which
    m = m0 + gl.arange(0, 64, gl.SliceLayout(1, MMA))
    total = gl.zeros([64, 128], gl.float32, MMA)
    stage, phase = 0, 0
    for step in range(begin, end):
        of_w = gl.load(w_scale_ptr + (n0 // 128 * blocks + step))
        of_x = gl.load(x_scale_ptr + (m * blocks + step), mask=m < M, other=0.0)
        mbarrier.wait(full.index(stage), phase)
        sums = warpgroup_mma(xs.index(stage * GROUPS + which), ws.index(stage).permute((1, 0)),
                             gl.zeros([64, 128], gl.float32, MMA), use_acc=False,
                             is_async=True)  # fmt: skip
        sums = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(empty.index(stage), count=1)
        total += sums * gl.expand_dims(of_x * of_w, 1)
        stage, phase = next_stage(stage, phase, STAGES)
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    finish(total, tile + which, split, n0, m0, M, N, z_ptr, bias_ptr, residual_ptr, part_ptr,
           met_ptr, OUT, BIAS, RESIDUAL, ACTIVATION, SPLITS, TURNED=True)  # fmt: skip


@gluon.jit(do_not_specialize=["M"])
def scaled_blocks_kernel(
    w_desc, x_desc, w_scale_ptr, x_scale_ptr, z_ptr, bias_ptr, residual_ptr, part_ptr, met_ptr,
    M, N, K,
    BIAS: gl.constexpr, RESIDUAL: gl.constexpr, ACTIVATION: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr, SPLITS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """z[m, n] = Σ_k x[m, k]·w[n, k] · x_scale[m, k // 128]·w_scale[n // 128, k // 128].

    w_desc, x_desc: blocks [128, 128] and [64, 128]. GROUPS: of four warps, each with 64 m.
    """
    BLOCK_M: gl.constexpr = 64 * GROUPS
    tiles_m, tiles_n = (M + BLOCK_M - 1) // BLOCK_M, (N + 127) // 128
    tile, split, tile_n, tile_m = tile_of(gl.program_id(0), tiles_m, tiles_n, SPLITS)
    begin, end = part_of(split, K, SPLITS)
    n0, m0 = tile_n * 128, tile_m * BLOCK_M
    ws = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 128, 128], w_desc.layout)
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES * GROUPS, 64, 128], x_desc.layout)
    full, empty = barriers(STAGES), barriers(STAGES, GROUPS)
    place = begin, end, tile * GROUPS, split, n0, m0
    inputs = w_scale_ptr, x_scale_ptr, bias_ptr, residual_ptr
    stages = ws, xs, full, empty
    given = place, stages, inputs, (z_ptr, part_ptr, met_ptr), (M, N, K)
    source = begin, end, n0, m0, w_desc, x_desc
    if GROUPS == 3:
        gl.warp_specialize(
            [(_multiply, (0, given, GROUPS, BIAS, RESIDUAL, ACTIVATION, STAGES, SPLITS)),
             (_multiply, (1, given, GROUPS, BIAS, RESIDUAL, ACTIVATION, STAGES, SPLITS)),
             (_multiply, (2, given, GROUPS, BIAS, RESIDUAL, ACTIVATION, STAGES, SPLITS)),
             (_load, (source, stages, GROUPS, STAGES))],
            [4, 4, 1], [REGISTERS, REGISTERS, 24],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [(_multiply, (0, given, GROUPS, BIAS, RESIDUAL, ACTIVATION, STAGES, SPLITS)),
             (_multiply, (1, given, GROUPS, BIAS, RESIDUAL, ACTIVATION, STAGES, SPLITS)),
             (_load, (source, stages, GROUPS, STAGES))],
            [4, 1], [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_multiply, (0, given, GROUPS, BIAS, RESIDUAL, ACTIVATION, STAGES, SPLITS)),
             (_load, (source, stages, GROUPS, STAGES))],
            [1], [24],
        )  # fmt: skip


def launched(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, extra: Extra, dtype: torch.dtype,
    config: BlocksConfig,
) -> Tensor:  # fmt: skip
    """The product by `scaled_blocks_kernel`, cut as a configuration says, of aligned x and w."""
    config.require(dtype.itemsize)
    z = torch.empty(len(x), len(w), dtype=dtype, device=x.device)
    tiles = config.tiles(len(x), len(w))
    arguments = {
        **parts_of(z, tiles * config.groups, 64 * 128, config.splits),
        "w_desc": described_in_shared(w, [128, 128]),
        "x_desc": described_in_shared(x, [64, 128]),
        "w_scale_ptr": w_scale,
        "x_scale_ptr": x_scale,
        "z_ptr": z,
        "bias_ptr": extra.bias,
        "residual_ptr": extra.residual,
        "M": len(x),
        "N": len(w),
        "K": x.shape[1],
        "BIAS": extra.bias is not None,
        "RESIDUAL": extra.residual is not None,
        "ACTIVATION": extra.activation,
        "GROUPS": config.groups,
        "REGISTERS": REGISTERS[config.groups],
        "STAGES": config.num_stages,
    }
    launch(scaled_blocks_kernel, (tiles * config.splits,), arguments, num_warps=4)
    return z
