# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false
"""More than 32 rows of x by a weight in tiles, on Hopper: `wgmma` with the weight in registers.

The weight is the left operand, for that is the one which may come from registers; x is the right
one, in shared memory, where the bulk copy engine (TMA) puts it. While 64 k are multiplied the next
64 become floats. Warps that only load, others that only convert, and programs that stay were tried
on an H200 and took longer, since converting takes the most: all warps share it here. K is cut among
several programs where there are few tiles, as in `few_rows`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lowbit.kernels.triton.fast.fragments import (
    barrier,
    block_of_rows,
    finish,
    load_weight,
    part_of,
    tile_of,
    weight_in_slots,
    weights,
)
from lowbit.kernels.triton.fast.launch import Gpu, TileConfig, cheapest

load_by_tma = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@dataclass(frozen=True)
class ManyRowsConfig(TileConfig):
    """Of a weight of so many bits, of which `unit` k share a word."""

    def misfit(self, bits: int, unit: int) -> str | None:
        weight = self.rows * (16 * bits + 4 * max(1, 128 // unit)) * (self.num_stages + 1)
        return self.misfit_holding(256 * self.columns * self.num_stages + weight)


_SHAPES = [(128, 256, 8), (64, 256, 4), (128, 128, 4), (64, 128, 4), (128, 64, 4), (64, 64, 4)]
"""Rows, columns and warps."""


def many_rows_config(
    gpu: Gpu, M: int, N: int, K: int, bits: int, unit: int = 128
) -> ManyRowsConfig:
    """The cheapest tiles, of which none is half empty; for up to 64 rows of x up to three programs
    for each multiprocessor. unit: the k that share a word. Measured on an H200."""
    if M <= 64:
        rows = 64 if gpu.multiprocessors * 128 > N else 128
        found = ManyRowsConfig(rows, 64, 1, 4, 3).fitting(bits, unit)
        most = min(3 * gpu.multiprocessors // found.tiles(M, N), K // 512)
        return replace(found, splits=4 if most >= 4 else 2 if most >= 2 else 1)
    several = [
        ManyRowsConfig(rows, columns, 1, warps, 3).fitting(bits, unit)
        for rows, columns, warps in _SHAPES
        if columns == 64 or columns < 2 * M
    ]
    found = cheapest(several, gpu, M, N, K)
    # With two stages of the largest two programs fit into a multiprocessor.
    twice = found.rows == found.columns == 128
    twice = twice and found.tiles(M, N) * found.splits > gpu.multiprocessors
    return replace(found, num_stages=2) if twice else found


@gluon.jit
def barriers(STAGES: gl.constexpr, COUNT: gl.constexpr = 1):
    """Memory barriers that say when a stage has arrived, or that COUNT are done with it."""
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), count=COUNT)
    fence_async_shared()
    return bars


@gluon.jit
def done_with(bars, STAGES: gl.constexpr):
    """Give the memory of barriers back."""
    for stage in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(stage))


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The stage after one, and the phase of its barrier."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def _load_x(step, end, stage, x_desc, row, xs, bars):
    """128 k of x, from 128·step on, begin to move into a stage; none past the end."""
    there = step < end
    bar = bars.index(stage)
    mbarrier.expect(bar, 2 * x_desc.block_type.nbytes, pred=there)
    load_by_tma(x_desc, [row, step * 128], bar, xs.index(stage * 2), pred=there)
    load_by_tma(x_desc, [row, step * 128 + 64], bar, xs.index(stage * 2 + 1), pred=there)


@gluon.jit(do_not_specialize=["M", "blocks"])
def many_rows_kernel(
    x_desc, tiles_ptr, words_ptr, z_ptr, bias_ptr, residual_ptr, part_ptr, met_ptr, ends_ptr,
    M, N, K, padded, experts, blocks,
    PLANES: gl.constexpr, GROUP: gl.constexpr, REAL: gl.constexpr, HALF: gl.constexpr,
    BIAS: gl.constexpr, RESIDUAL: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr,
    EXPERTS: gl.constexpr,
):  # fmt: skip
    """z[m, n] = Σ_k x[m, k]·weight[n, k] for BLOCK_N n and BLOCK_M m. x_desc: blocks [BLOCK_M, 64];
    blocks: how many of m there are; the rest as of `few_rows_kernel`."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BLOCK_M, 16]
    )
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    # The weight is a step farther ahead than x, since the next 64 k are converted beforehand.
    SLOTS: gl.constexpr = STAGES + 1
    tile, split, tile_n, block = tile_of(
        gl.program_id(0), blocks, (N + BLOCK_N - 1) // BLOCK_N, SPLITS)  # fmt: skip
    row, last, below = block_of_rows(block, M, N, ends_ptr, experts, BLOCK_M, EXPERTS)
    if EXPERTS > 0:  # noqa: SIM102  # the compiler takes the first, the GPU the second
        if row >= last:
            return
    begin, end = part_of(split, K, SPLITS)
    ws, ss, of_tile, of_words, inside = weight_in_slots(
        tiles_ptr, words_ptr, below + tile_n * BLOCK_N, K, padded, BLOCK_N, SLOTS, PLANES,
        GROUP)  # fmt: skip
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 2, BLOCK_M, 64], x_desc.layout)
    bars = barriers(STAGES)
    for ahead in gl.static_range(STAGES):
        if ahead < STAGES - 1:
            _load_x(begin + ahead, end, ahead, x_desc, row, xs, bars)
        load_weight(begin + ahead, end, ahead, ws, ss, of_tile, of_words, inside, padded, PLANES,
                    GROUP)  # fmt: skip
    total = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)
    async_copy.wait_group(STAGES - 1)
    barrier()
    a = weights(ws.index(0), ss.index(0), 0, A, PLANES, GROUP, True, REAL, HALF)
    b, stage, phase, slot = a, 0, 0, 0
    for step in range(begin, end):
        mbarrier.wait(bars.index(stage), phase)
        total = warpgroup_mma(a, xs.index(stage * 2).permute((1, 0)), total, is_async=True)
        # The step before is done with its stage; the weight of the next has arrived.
        total, b = warpgroup_mma_wait(1, deps=(total, b))
        async_copy.wait_group(STAGES - 2)
        barrier()
        _load_x(step + STAGES - 1, end, (stage + STAGES - 1) % STAGES, x_desc, row, xs, bars)
        load_weight(step + STAGES, end, (slot + STAGES) % SLOTS, ws, ss, of_tile, of_words, inside,
                    padded, PLANES, GROUP)  # fmt: skip
        b = weights(ws.index(slot), ss.index(slot), 1, A, PLANES, GROUP, True, REAL, HALF)
        total = warpgroup_mma(b, xs.index(stage * 2 + 1).permute((1, 0)), total, is_async=True)
        total, a = warpgroup_mma_wait(1, deps=(total, a))
        stage, phase = next_stage(stage, phase, STAGES)
        slot = (slot + 1) % SLOTS
        a = weights(ws.index(slot), ss.index(slot), 0, A, PLANES, GROUP, True, REAL, HALF)
    total, b = warpgroup_mma_wait(0, deps=(total, b))
    done_with(bars, STAGES)
    TALL: gl.constexpr = 8 if GATED and BLOCK_N == 64 else 16
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [TALL, 32 // TALL], [1, gl.num_warps()], [0, 1])
    finish(total, tile, split, tile_n * BLOCK_N, row, last, N, z_ptr, bias_ptr, residual_ptr,
           part_ptr, met_ptr, OUT, BIAS, RESIDUAL, ACTIVATION, SPLITS, GATED)  # fmt: skip
