# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false
"""Products of 8-bit rows of x by a weight of 4 bits in tiles, on Hopper: `wgmma` of int8 or float8
(e4m3), with the weight in registers.

The tiles are those of W4A16 (`tiles.py`). A byte of a word has row g in its low and row g + 8 in
its high nibble, so a word is four values of 8 bits of either row, of k = 8·h + 2·t + p in the
order of (p, h). `wgmma` of 8 bits takes these from thread t as k = 4·t to 4·t + 3: thus within
every 16 columns x lies in that order too (`quantize_rows`, `for_tiles`), and no value moves.

The integers n of a nibble less their zero point stay integers: a byte of float8 below 17 is itself
times 2^-9. The sums of each group are scaled in float32, while those of the next columns are
multiplied: the tile of a program is cut into parts that follow each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lowbit.kernels.triton.fast.descriptors import described_in_shared
from lowbit.kernels.triton.fast.fragments import (
    barrier,
    finish,
    load_weight,
    part_of,
    scales_of,
    tile_of,
    weight_in_slots,
)
from lowbit.kernels.triton.fast.launch import (
    Choice,
    Gpu,
    TileConfig,
    choosing,
    gpu_of,
    launch,
    parts_of,
)
from lowbit.kernels.triton.fast.many_rows import barriers, done_with, load_by_tma, next_stage
from lowbit.kernels.triton.fast.quantize_rows import quantize_rows
from lowbit.kernels.triton.fast.tiles import Extra, TiledWeight, words_unit
from lowbit.kernels.triton.fast.weight_only import (
    flattened,
    weight_only_choice,
    weight_only_matmul,
)


@dataclass(frozen=True)
class EightByFourConfig(TileConfig):
    """Of a weight of 4 bits, of which `unit` k share a word; each warp has 16 rows of it."""

    def misfit(self, unit: int) -> str | None:
        if self.rows != 16 * self.num_warps:
            return f"rows is {self.rows}; each of {self.num_warps} warps takes 16"
        weight = self.rows * (64 + 4 * max(1, 128 // unit))
        return self.misfit_holding(self.num_stages * (128 * self.columns + weight))

    @property
    def wide(self) -> int:
        """Columns multiplied at a time: of the largest tiles, so many that registers hold both
        their sums and the totals."""
        return self.columns if self.columns <= 128 else 64


def eight_by_four_config(gpu: Gpu, M: int, N: int, K: int, unit: int = 128) -> EightByFourConfig:
    """The largest tiles that leave most multiprocessors one, else programs of which several fit
    into a multiprocessor. Measured on an H200."""

    def tiles(rows: int, columns: int) -> int:
        return -(-N // rows) * -(-M // columns)

    if M > 128 and unit >= 128 and tiles(128, 256) >= 0.8 * gpu.multiprocessors:
        return EightByFourConfig(128, 256, 1, 8, 4)
    columns = 64 if M <= 64 else 128
    splits = 2 if 2 * tiles(64, columns) <= gpu.multiprocessors and K >= 2048 else 1
    return EightByFourConfig(64, columns, splits, 4, 4 if columns == 64 else 3)


# Row g and row g + 8 of a word.
_BYTES = gl.constexpr(
    "{ .reg .b32 t; and.b32 $0, $2, 0x0F0F0F0F; shr.u32 t, $2, 4; and.b32 $1, t, 0x0F0F0F0F; }"
)
# n - z in each byte: with 128 added nothing is borrowed from the next (z is 127 at most).
_INTEGERS = gl.constexpr(
    "{ .reg .b32 t; or.b32 t, $1, 0x80808080; sub.u32 t, t, $2; xor.b32 $0, t, 0x80808080; }"
)
# 16·(n - 8), for weights without zero points.
_MIDDLE = gl.constexpr(
    "{ .reg .b32 t; shl.b32 t, $2, 4; lop3.b32 $0, t, 0xF0F0F0F0, 0x80808080, 0x6A;"
    " lop3.b32 $1, $2, 0xF0F0F0F0, 0x80808080, 0x6A; }"
)
# The same as sign and magnitude: t = 128 + n - z; m: which are not negative; d or -d with a sign.
_FLOATS = gl.constexpr(
    "{ .reg .b32 t, m, n; or.b32 t, $1, 0x80808080; sub.u32 t, t, $2; prmt.b32 m, t, t, 0xBA98;"
    " lop3.b32 t, t, m, 0x7F7F7F7F, 0x87; lop3.b32 n, m, 0x01010101, 0, 0x0C;"
    " add.u32 $0, t, n; }"
)


@gluon.jit
def _eight_bits(held, words, A: gl.constexpr, INT: gl.constexpr, ZERO: gl.constexpr):
    """int8 [2·rows, b] of units as numbers of 8 bits [rows, 4·b]; values stay in their threads."""
    rows: gl.constexpr = held.shape[0] // 2
    count: gl.constexpr = held.shape[1] // 4
    MIDDLE: gl.constexpr = INT and not ZERO
    low, high = gl.inline_asm_elementwise(
        _MIDDLE if MIDDLE else _BYTES, "=r,=r,r", [held], dtype=(gl.int8, gl.int8), is_pure=True,
        pack=4,
    )  # fmt: skip
    w = gl.reshape(gl.join(low, high), [rows // 16, 8, 4, count, 4, 2])  # unit, g, t, c, i, half
    w = gl.reshape(gl.permute(w, [0, 5, 1, 3, 2, 4]), [rows, 16 * count])
    w = gl.convert_layout(w, A, assert_trivial=True)
    if not MIDDLE:
        zero = gl.expand_dims((words & 0xFF).to(gl.int8), 1)
        w, zero = gl.broadcast(w, zero)
        w = gl.inline_asm_elementwise(
            _INTEGERS if INT else _FLOATS, "=r,r,r", [w, zero], dtype=gl.int8, is_pure=True, pack=4
        )
    return w


@gluon.jit
def _fragment(weight, stage, SUB: gl.constexpr, A: gl.constexpr, MMA: gl.constexpr,
              PIECE: gl.constexpr, INT: gl.constexpr, ZERO: gl.constexpr):  # fmt: skip
    """The SUB-th PIECE k of those of a stage in 8 bits, and their scales.

    weight: what `weight_in_slots` gives; a stage has units int8 [4·rows, 16], and words int32
    [128 / group, or 1, · rows].
    """
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = 16 * WARPS
    NATIVE: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [WARPS, 1], [1, 0])
    units, held = weight[0].index(stage), weight[1].index(stage).slice(SUB * ROWS, ROWS)
    words = held.load(gl.SliceLayout(1, A))
    w = units.slice(SUB * PIECE // 64 * 2 * ROWS, 2 * ROWS).load(NATIVE)
    if PIECE == 128:
        w = _eight_bits(w, words, A, INT, ZERO)
        v = _eight_bits(units.slice(2 * ROWS, 2 * ROWS).load(NATIVE), words, A, INT, ZERO)
        w = gl.reshape(gl.permute(gl.join(w, v), [0, 2, 1]), [ROWS, 128])
        w = gl.convert_layout(w, A, assert_trivial=True)
    else:
        if PIECE == 32:
            left, right = gl.split(gl.permute(gl.reshape(w, [2 * ROWS, 2, 8]), [0, 2, 1]))
            w = left if SUB % 2 == 0 else right
        w = _eight_bits(w, words, A, INT, ZERO)
    scale = scales_of(held.load(gl.SliceLayout(1, MMA)), False)
    return w if INT else w.to(gl.float8e4nv, bitcast=True), scale


@gluon.jit
def _added(total, AT: gl.constexpr, sums, scale):
    """A tuple of tensors, to one of which sums are added, times the scales of their rows."""
    more = total[AT] + sums.to(gl.float32) * gl.expand_dims(scale, 1)
    return total[:AT] + (more,) + total[AT + 1 :]  # noqa: RUF005  # as Triton adds tuples


@gluon.jit
def _store(total, tile, split, n0, m0, M, N, x_scale_ptr, z_ptr, bias_ptr, residual_ptr, part_ptr,
           met_ptr, INT: gl.constexpr, ZERO: gl.constexpr, BIAS: gl.constexpr,
           RESIDUAL: gl.constexpr, ACTIVATION: gl.constexpr, SPLITS: gl.constexpr):  # fmt: skip
    """A tuple of tensors, the columns of a tile, times x's scales, as z."""
    PARTS: gl.constexpr = len(total)
    MMA: gl.constexpr = total[0].type.layout
    WIDE: gl.constexpr = total[0].shape[1]
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, gl.num_warps()], [0, 1])
    # What the bytes of the weight stand for.
    UNIT: gl.constexpr = 512.0 if not INT else 1.0 if ZERO else 0.0625
    for i in gl.static_range(PARTS):
        m = m0 + i * WIDE + gl.arange(0, WIDE, gl.SliceLayout(0, MMA))
        of_x = gl.load(x_scale_ptr + m, mask=m < M, other=0.0) * UNIT
        finish(total[i] * gl.expand_dims(of_x, 0), tile * PARTS + i, split, n0, m0 + i * WIDE, M, N,
               z_ptr, bias_ptr, residual_ptr, part_ptr, met_ptr, OUT, BIAS, RESIDUAL, ACTIVATION,
               SPLITS)  # fmt: skip


@gluon.jit
def _load(step, end, stage, x_desc, row, xs, bars, weight, padded, GROUP: gl.constexpr):
    """128 k of x and of the weight, from 128·step on, begin to move into a stage; none past the
    end."""
    PIECE: gl.constexpr = x_desc.block_type.shape[1]
    SUBS: gl.constexpr = 128 // PIECE
    there = step < end
    bar = bars.index(stage)
    mbarrier.expect(bar, SUBS * x_desc.block_type.nbytes, pred=there)
    for sub in gl.static_range(SUBS):
        at = [row, step * 128 + sub * PIECE]
        load_by_tma(x_desc, at, bar, xs.index(stage * SUBS + sub), pred=there)
    ws, ss, of_tile, of_words, inside = weight
    load_weight(step, end, stage, ws, ss, of_tile, of_words, inside, padded, 1, GROUP)


@gluon.jit(do_not_specialize=["M"])
def eight_by_four_kernel(
    x_desc, x_scale_ptr, tiles_ptr, words_ptr, z_ptr, bias_ptr, residual_ptr, part_ptr, met_ptr,
    M, N, K, padded,
    GROUP: gl.constexpr, ZERO: gl.constexpr,
    BIAS: gl.constexpr, RESIDUAL: gl.constexpr, ACTIVATION: gl.constexpr,
    WIDE: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """z[m, n] = x_scale[m] · Σ_k x[m, k]·weight[n, k] for 16 n of each warp and BLOCK_M m.

    x_desc: blocks [BLOCK_M, min(GROUP, 128)]; GROUP: the k that share a word; padded: N rounded
    up, as tiles have it. ZERO: whether there are zero points. WIDE: columns multiplied at a time.
    """
    INT: gl.constexpr = x_desc.dtype == gl.int8
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    PIECE: gl.constexpr = x_desc.block_type.shape[1]
    ROWS: gl.constexpr = 16 * gl.num_warps()
    PARTS: gl.constexpr = BLOCK_M // WIDE
    SUBS: gl.constexpr = 128 // PIECE
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, WIDE, 32]
    )
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    tiles_m, tiles_n = (M + BLOCK_M - 1) // BLOCK_M, (N + ROWS - 1) // ROWS
    tile, split, tile_n, tile_m = tile_of(gl.program_id(0), tiles_m, tiles_n, SPLITS)
    begin, end = part_of(split, K, SPLITS)
    weight = weight_in_slots(tiles_ptr, words_ptr, tile_n * ROWS, K, padded, ROWS, STAGES, 1, GROUP)
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES * SUBS, BLOCK_M, PIECE], x_desc.layout)
    bars = barriers(STAGES)
    row = tile_m * BLOCK_M
    for ahead in gl.static_range(STAGES - 1):
        _load(begin + ahead, end, ahead, x_desc, row, xs, bars, weight, padded, GROUP)
    total = (gl.zeros([ROWS, WIDE], gl.float32, MMA),) * PARTS
    stage, phase = 0, 0
    for step in range(begin, end):
        async_copy.wait_group(STAGES - 2)
        barrier()  # all are done with the stage before
        w, scale = _fragment(weight, stage, 0, A, MMA, PIECE, INT, ZERO)
        mbarrier.wait(bars.index(stage), phase)
        for i in gl.static_range(PARTS * SUBS):  # columns in turn, then k
            x = xs.index(stage * SUBS + i // PARTS).slice(i % PARTS * WIDE, WIDE).permute((1, 0))
            new = gl.zeros([ROWS, WIDE], gl.int32 if INT else gl.float32, MMA)
            new = warpgroup_mma(w, x, new, use_acc=False, is_async=True)
            if i == 0:
                _load(step + STAGES - 1, end, (stage + STAGES - 1) % STAGES, x_desc, row, xs, bars,
                      weight, padded, GROUP)  # fmt: skip
            new_scale = scale
            if i % PARTS == PARTS - 1 and i + 1 < PARTS * SUBS:
                w, scale = _fragment(weight, stage, i // PARTS + 1, A, MMA, PIECE, INT, ZERO)
            if i > 0:
                sums = warpgroup_mma_wait(1, deps=(sums,))  # noqa: F821
                total = _added(total, (i - 1) % PARTS, sums, old)  # noqa: F821
            sums, old = new, new_scale
        # Sums that went on into the next iteration would be copied, which waits for them.
        sums = warpgroup_mma_wait(0, deps=(sums,))
        total = _added(total, PARTS - 1, sums, old)
        stage, phase = next_stage(stage, phase, STAGES)
    done_with(bars, STAGES)
    _store(total, tile, split, tile_n * ROWS, row, M, N, x_scale_ptr, z_ptr, bias_ptr, residual_ptr,
           part_ptr, met_ptr, INT, ZERO, BIAS, RESIDUAL, ACTIVATION, SPLITS)  # fmt: skip


@choosing("int4_dynamic_matmul")
def eight_by_four_choice(
    gpu: Gpu, M: int, N: int, K: int, itemsize: int = 2, group_size: int = 128, real: bool = False
) -> Choice[Any]:
    """For x [M, K] by a weight [N, K] of 4 bits in groups; real: zero points are no integers."""
    refusal = (
        f"{gpu} has no wgmma" if gpu.capability != 90
        else "zero points are no integers" if real
        else None
    )  # fmt: skip
    name = "eight_by_four_kernel"
    other = weight_only_choice(gpu, M, N, K, 4, itemsize, group_size)
    if refusal is None and other.kernel == "few_rows_kernel":
        refusal = "with few rows memory is the limit, so x stays as it is"
    if refusal:
        return Choice(other.kernel, other.config, other.why, ((name, refusal), *other.refused))
    config = eight_by_four_config(gpu, M, N, K, words_unit(group_size))
    return Choice(name, config, "wgmma takes 8 bits of both, the weight from registers")


def int4_dynamic_matmul(
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
    dtype: torch.dtype,
) -> Tensor:
    """x [..., K], whose rows become 8 bits of a dtype, by a weight whose fields follow."""
    weight = TiledWeight(tiles, words, scale, zero, N, K, group_size, bits)
    flat, extra = flattened(x, Extra(bias, residual, activation), N)
    gpu, real = gpu_of(x.device), zero is not None and zero.is_floating_point()
    choice = eight_by_four_choice(gpu, len(flat), N, K, x.itemsize, group_size, real)
    if choice.kernel != "eight_by_four_kernel" or not flat.numel() or not N:
        if choice.kernel != "few_rows_kernel":
            q, of_x, _ = quantize_rows(flat, dtype, symmetric=True, blocks=False)
            flat = (q.float() * of_x[:, None]).to(x.dtype)
        wide = flat.view(x.shape)
        return weight_only_matmul(wide, *vars(weight).values(), bias, residual, activation)
    return _launched(flat, weight, extra, dtype, choice.config).view(*x.shape[:-1], N)


def _launched(
    x: Tensor, weight: TiledWeight, extra: Extra, dtype: torch.dtype, config: EightByFourConfig
) -> Tensor:
    """The product by `eight_by_four_kernel`, cut as a configuration says."""
    unit = words_unit(weight.group_size)
    config.require(unit)
    q, scale, _ = quantize_rows(x, dtype, symmetric=True, blocks=False, tiled=True)
    z = x.new_empty(len(x), weight.N)
    tiles, parts = config.tiles(*z.shape), config.columns // config.wide
    arguments = {
        **parts_of(z, tiles * parts, config.rows * config.wide, config.splits),
        "x_desc": described_in_shared(q, [config.columns, min(unit, 128)]),
        "x_scale_ptr": scale,
        "tiles_ptr": weight.tiles.view(torch.int8),
        "words_ptr": weight.words,
        "z_ptr": z,
        "bias_ptr": extra.bias,
        "residual_ptr": extra.residual,
        "M": len(x),
        "N": weight.N,
        "K": q.shape[1],
        "padded": weight.words.shape[1],
        "GROUP": unit,
        "ZERO": weight.zero is not None,
        "BIAS": extra.bias is not None,
        "RESIDUAL": extra.residual is not None,
        "ACTIVATION": extra.activation,
        "WIDE": config.wide,
        "STAGES": config.num_stages,
    }
    grid = (tiles * config.splits,)
    launch(eight_by_four_kernel, grid, arguments, num_warps=config.num_warps)
    return z
