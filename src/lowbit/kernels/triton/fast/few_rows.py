# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false
"""Up to 32 rows of x by a weight in tiles: as fast as memory gives the weight.

`mma.sync` and not `wgmma`: with few columns the latter takes as long as with 64, longer than the
memory does. x, words and scales come into
shared memory some steps of 128 k ahead. The sums of each group are scaled in float32, so weights
are not rounded. K is cut among several programs where there are few tiles; the last of them adds
the parts, in their order.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from lowbit.kernels.triton.fast.fragments import (
    barrier,
    block_of_rows,
    finish,
    load_async,
    load_weight,
    part_of,
    scales_of,
    weight_in_slots,
    weights,
)
from lowbit.kernels.triton.fast.launch import Config, Gpu, warps_misfit
from lowbit.kernels.triton.fast.tiles import TILE_DEPTH

MOST_ROWS = 32


@dataclass(frozen=True)
class FewRowsConfig(Config, rows=16, num_warps=1, splits=1, positive=("num_stages",)):
    """Tiles of `rows` of the weight, K cut in `splits`, `num_stages - 1` steps ahead."""

    rows: int
    splits: int
    num_warps: int = 4
    num_stages: int = 3

    def misfit(self) -> str | None:
        return warps_misfit(self.rows, self.num_warps, self.num_stages)

    def tiles(self, M: int, N: int) -> int:
        """How many there are in all: each takes all rows of x."""
        return -(-N // self.rows)


def few_rows_config(gpu: Gpu, M: int, N: int, K: int, bits: int, unit: int = 128) -> FewRowsConfig:
    """Enough programs that loads never pause: for each multiprocessor four to seven with up to
    eight rows of x, which wait for memory alone; with more, four of small tiles where large ones
    are too few, else one or two. Measured on an H200."""
    tall, steps = -(-N // 128), -(-K // TILE_DEPTH)
    small = steps < 64 if M <= 8 else tall < (0.45 if M <= 16 else 0.8) * gpu.multiprocessors
    rows, most = (64, 7 if M <= 8 else 4) if small else (128, 4 if M <= 8 else 2 if M <= 16 else 1)
    tiles, splits = -(-N // rows), 1
    while 2 * splits * tiles <= most * gpu.multiprocessors and steps >= 16 * splits:
        splits *= 2
    return FewRowsConfig(rows, splits)


@gluon.jit
def _load_x(step, end, stage, xs, of_x, xk, rows, K):
    """128 k of x, from 128·step on, begin to move into a stage; none past the end."""
    inside = gl.expand_dims(rows & (step < end), 1) & gl.expand_dims(step * 128 + xk < K, 0)
    load_async(xs.index(stage), of_x + step * 128, mask=inside)


@gluon.jit(do_not_specialize=["M"])
def few_rows_kernel(
    x_ptr, tiles_ptr, words_ptr, z_ptr, bias_ptr, residual_ptr, part_ptr, met_ptr, ends_ptr,
    rows_ptr, M, N, K, x_stride, padded, experts,
    PLANES: gl.constexpr, GROUP: gl.constexpr, REAL: gl.constexpr, HALF: gl.constexpr,
    BIAS: gl.constexpr, RESIDUAL: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr,
    EXPERTS: gl.constexpr, GATHERED: gl.constexpr,
):  # fmt: skip
    """z[m, n] = Σ_k x[m, k]·weight[n, k] for BLOCK_N n and BLOCK_M m; GROUP: the k that share a
    word; padded: the rows of tiles, N for each of EXPERTS. GATHERED: row m is x[rows[m]]."""
    WARPS: gl.constexpr = gl.num_warps()
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8])  # fmt: skip
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    OF_X: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    SCALED: gl.constexpr = GROUP < 128
    block, tile, split = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    m0, last, below = block_of_rows(block, M, N, ends_ptr, experts, BLOCK_M, EXPERTS)
    if EXPERTS > 0:  # noqa: SIM102  # the compiler takes the first, the GPU the second
        if m0 >= last:
            return
    begin, end = part_of(split, K, SPLITS)
    ws, ss, of_tile, of_words, inside = weight_in_slots(
        tiles_ptr, words_ptr, below + tile * BLOCK_N, K, padded, BLOCK_N, STAGES, PLANES, GROUP,
    )  # fmt: skip
    xm = m0 + gl.arange(0, BLOCK_M, gl.SliceLayout(1, OF_X))
    there = xm < last
    source = gl.load(rows_ptr + xm, mask=there, other=0) if GATHERED else xm
    xk = gl.arange(0, 128, gl.SliceLayout(0, OF_X))
    of_x = x_ptr + (gl.expand_dims(source.to(gl.int64) * x_stride, 1) + gl.expand_dims(xk, 0))
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    xs = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES, BLOCK_M, 128], swizzled)
    for ahead in gl.static_range(STAGES - 1):
        _load_x(begin + ahead, end, ahead, xs, of_x, xk, there, K)
        load_weight(begin + ahead, end, ahead, ws, ss, of_tile, of_words, inside, padded, PLANES,
                    GROUP)  # fmt: skip
    total = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)
    stage = 0
    for step in range(begin, end):
        async_copy.wait_group(STAGES - 2)
        barrier()
        into = (stage + STAGES - 1) % STAGES
        _load_x(step + STAGES - 1, end, into, xs, of_x, xk, there, K)
        load_weight(step + STAGES - 1, end, into, ws, ss, of_tile, of_words, inside, padded, PLANES,
                    GROUP)  # fmt: skip
        part = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)
        for half in gl.static_range(2):
            w = weights(ws.index(stage), ss.index(stage), half, A, PLANES, GROUP, SCALED, REAL,
                        HALF)  # fmt: skip
            x = xs.index(stage).slice(half * 64, 64, dim=1).permute((1, 0))
            part = mma_v2(w, x.load(gl.DotOperandLayout(1, MMA, 2)), part)
        if SCALED:
            total += part
        else:
            scale = scales_of(ss.index(stage).load(gl.SliceLayout(1, MMA)), REAL)
            total += part * gl.expand_dims(scale, 1)
        stage = (stage + 1) % STAGES
    met = block * gl.num_programs(1) + tile
    finish(total, met, split, tile * BLOCK_N, m0, last, N, z_ptr, bias_ptr, residual_ptr,
           part_ptr, met_ptr, None, BIAS, RESIDUAL, ACTIVATION, SPLITS, GATED)  # fmt: skip
