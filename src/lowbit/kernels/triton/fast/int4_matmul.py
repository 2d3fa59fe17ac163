# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportReturnType=false
"""Products with 4-bit weights: x [M, K] · dequantized weight [N, K]ᵀ, for few rows of x.

The weight lies in tiles of 64 rows by 128 k, contiguous, 16 words of 8 nibbles to a row:

    tile [n // 64, k // 128]:  row n % 64:  | word 0: k 0..7 | word 1: k 8..15 | ... | word 15 |

so that a program reads nothing but whole sectors, and 16 bytes a thread. Nibbles must not be turned
into floats one by one: conversions would take longer than the memory does.

- One row: x becomes integers of two digits of 8 bits for every 32 k, as on the CPU
  (docs/grouped-weights.md). A word's even nibbles, and its odd ones, are four bytes each with a
  mask, and DP4A multiplies four bytes at once. Each program makes the digits of all of x, keeps
  them in registers, and goes over its share of the rows of the weight.
- Up to 64 rows: a word of two halves, masked and OR-ed with the exponent of 128 (of 1024 for
  float16), is two floats 128 + n. The halves of all words are one plane of k for the tensor cores,
  and so are their second, third and fourth nibbles; x is brought into the order of these planes
  first. The 128 is taken off with the row sums of x, as the zero point is. float16 takes 1024 + 8
  off each nibble instead: sums of products with 1024 would lose bits in float32.
  Where there are few tiles, K is cut among several programs; the last of them adds the parts, in
  their order.

Larger M are served by dequantizing, see gpu/int4.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.kernels.triton.fast.config import not_powers, require
from lowbit.kernels.triton.fast.launch import has_assembly, launch, multiprocessors

TILE_ROWS, TILE_DEPTH = 64, 128
WORDS = TILE_DEPTH // 8
MIDDLE = 8  # the nibble that is taken off as it is; zero points are relative to it
MOST_ROWS = 64  # of x, that tensor cores take at once
MOST_DEPTH = 32768  # k of one row, whose digits fit into the registers of a program
_PART = 32  # k that share a scale of x's digits, and a thread of `one_row_kernel`
_PROGRAMS = 750  # of `rows_kernel` that keep an H200 busy, by measurement


@dataclass(frozen=True)
class VectorConfig:
    """How one row is multiplied: `rows` of the weight at once, and `programs` on each
    multiprocessor."""

    rows: int
    num_warps: int
    num_stages: int
    programs: int

    def refusal(self) -> str | None:
        """Why this is no configuration; None if it is."""
        if refusal := not_powers(self, "rows", "num_warps"):
            return refusal
        # The weight is padded to whole tiles, and loaded without a mask.
        if self.rows > TILE_ROWS:
            return f"rows is {self.rows}; a tile has {TILE_ROWS}"
        return None if self.programs >= 1 else f"programs is {self.programs}; it must be positive"


@dataclass(frozen=True)
class RowsConfig:
    """How many rows are multiplied: by `splits` programs along K for each tile of rows."""

    splits: int
    num_warps: int = 4
    num_stages: int = 3


def vector_config(n: int, depth: int, device: torch.device) -> VectorConfig:
    """What fits a weight [n, depth]: four loads of 16 bytes for each thread at once, if n suffices.

    Measured on an H200 (28672 x 8192, 8192 x 28672, 4096 x 4096); other GPUs are taken to be alike.
    """
    if multiprocessors(device) == 1:
        return VectorConfig(rows=16, num_warps=4, num_stages=1, programs=2)
    parts = _parts(depth)
    num_warps, programs = (4, 4) if parts <= 256 else (8, 2)
    rows = max(1, 4 * 32 * num_warps // parts)
    at_once = programs * multiprocessors(device)
    while rows > 1 and rows * at_once > n:
        rows //= 2
    # To load ahead pays only for programs that go on for a while.
    return VectorConfig(rows, num_warps, 3 if n > 4 * rows * at_once else 1, programs)


def rows_config(tiles: int, steps: int, device: torch.device) -> RowsConfig:
    """What fits a weight of so many tiles of rows and of K; one program along K in an interpreter.

    Measured on an H200, as `vector_config` is.
    """
    splits = 1
    if multiprocessors(device) > 1:
        while splits < 8 and splits * tiles < _PROGRAMS and splits * 2 <= steps:
            splits *= 2
    return RowsConfig(splits)


def _parts(depth: int) -> int:
    """How many times 32 k there are, rounded up to a power of two; at least a warp's 32."""
    return triton.next_power_of_2(max(triton.cdiv(depth, _PART), 32))


@triton.jit
def _dot4(a, b, c, ASM: tl.constexpr):
    """c + the products of four bytes, those of `a` unsigned, those of `b` signed."""
    if ASM:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    for i in tl.static_range(4):
        c += ((a >> (8 * i)) & 255) * ((b << (24 - 8 * i)) >> 24)
    return c


@triton.jit
def _sum4(b, c, ASM: tl.constexpr):
    """c + the four signed bytes."""
    return _dot4(0x01010101, b, c, ASM)


@triton.jit
def _greater(pairs):
    """The greater of each two, NaN if one is."""
    a, b = tl.split(pairs)
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _digits(four, ASM: tl.constexpr):
    """Four numbers [..., 2, 2], 128 added, as two words of their signed digits: high and low."""
    a, b = tl.split(four)
    first, third = tl.split(a)
    second, fourth = tl.split(b)
    if ASM:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 a, b;
            prmt.b32 a, $2, $3, 0x5140; prmt.b32 b, $4, $5, 0x5140;
            prmt.b32 $0, a, b, 0x7632; prmt.b32 a, a, b, 0x5410; xor.b32 $1, a, 0x80808080; }""",
            "=r,=r,r,r,r,r", [first, second, third, fourth], dtype=(tl.int32, tl.int32),
            is_pure=True, pack=1,
        )  # fmt: skip
    else:  # noqa: RET505  # Triton's compiler looks into code after a return.
        low = (first & 255) | (second & 255) << 8 | (third & 255) << 16 | fourth << 24
        high = ((first & 0xFF00) >> 8) | (second & 0xFF00) | (third & 0xFF00) << 8
        high |= (fourth & 0xFF00) << 16
        return high, low ^ -0x7F7F7F80  # 128 is subtracted again, in each of the four bytes


@triton.jit
def one_row_kernel(
    tiles_ptr, weight_scale_ptr, zero_ptr, x_ptr, z_ptr, N, K: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr, ASM: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """z[n] = Σ_k x[k]·weight[n, k] for one row: a thread holds parts of 32 k of x, for all rows n.

    NaN and infinity in x make every z NaN.
    """
    whole: tl.constexpr = K == 32 * PARTS
    part = tl.arange(0, PARTS)
    word, lane = tl.arange(0, 4), tl.arange(0, 8)
    k = part[:, None, None] * 32 + word[None, :, None] * 8 + lane[None, None, :]
    if whole:
        x = tl.load(x_ptr + k).to(tl.float32)
    else:
        x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    greatest = _greater(tl.abs(x).reshape(PARTS, 4, 4, 2))
    greatest = _greater(_greater(greatest.reshape(PARTS, 4, 2, 2)))
    # As integers, positive floats have the same order, and NaN comes last.
    greatest = tl.max(greatest.to(tl.int32, bitcast=True), axis=1).to(tl.float32, bitcast=True)
    scale = tl.maximum(greatest * (1 / 32639), 2.0**-126)  # 1 / scale must be finite
    # Rounded by adding 1.5·2²³: the last bits are the integer's. 128 more, for the digits.
    q = (x * (1.0 / scale)[:, None, None] + (12582912.0 + 128.0)).to(tl.int32, bitcast=True)
    of_even, of_odd = tl.split(q.reshape(PARTS, 4, 2, 2, 2))
    high_even, low_even = _digits(of_even, ASM)
    high_odd, low_odd = _digits(of_odd, ASM)
    sums = _sum4(high_odd, _sum4(high_even, 0, ASM), ASM) * 256
    sums = _sum4(low_odd, _sum4(low_even, sums, ASM), ASM)
    sums = tl.sum(sums, axis=1).to(tl.float32)[None, :]
    scale = tl.where(greatest < float("inf"), scale, float("nan"))[None, :]
    high_even, high_odd = high_even[None, :, :], high_odd[None, :, :]
    low_even, low_odd = low_even[None, :, :], low_odd[None, :, :]
    words = part[:, None] * 4 + word[None, :]
    # Within a row of tiles, where 32 bits are enough.
    along = (words // 16 * 1024 + words % 16)[None, :, :]
    steps: tl.constexpr = (K + 127) // 128
    inside = (words < steps * 16)[None, :, :]
    group = part * 32 // GROUP
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    known = (part * 32 < K)[None, :]
    for start in tl.range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS, num_stages=STAGES):
        n = start + tl.arange(0, ROWS)  # past N the tile and the scales go on
        first = (n // 64).to(tl.int64) * (steps * 1024) + n % 64 * 16
        at = tiles_ptr + first[:, None, None] + along
        to = n[:, None] * groups + group[None, :]
        # Without a mask, the compiler loads more at once.
        if whole:
            packed = tl.load(at)
            s = tl.load(weight_scale_ptr + to).to(tl.float32)
        else:
            packed = tl.load(at, mask=inside, other=0)
            s = tl.load(weight_scale_ptr + to, mask=known, other=0.0).to(tl.float32)
        even, odd = packed & 0x0F0F0F0F, (packed >> 4) & 0x0F0F0F0F
        high = _dot4(odd, high_odd, _dot4(even, high_even, 0, ASM), ASM)
        low = _dot4(odd, low_odd, _dot4(even, low_even, 0, ASM), ASM)
        total = tl.sum(high * 256 + low, axis=2).to(tl.float32)
        middle = 8.0
        if ZERO:
            middle += tl.load(zero_ptr + to, mask=known, other=0.0).to(tl.float32)
        z = tl.sum((total - middle * sums) * s * scale, axis=1)
        tl.store(z_ptr + n, z.to(z_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def planes_kernel(
    x_ptr, planes_ptr, sums_ptr, met_ptr, M, K, x_stride, met,
    BLOCK_M: tl.constexpr, MET: tl.constexpr,
):  # fmt: skip
    """x for the tensor cores: [4, K / 4, BLOCK_M], plane i holding each k % 4 == i; and the sums
    of each 128 k, float32 [K / 128, BLOCK_M]. Rows past M are zeros; so are counters."""
    step = tl.program_id(0)
    at = step * MET + tl.arange(0, MET)
    tl.store(met_ptr + at, tl.zeros((MET,), tl.int32), mask=at < met)
    m, e, i = tl.arange(0, BLOCK_M), tl.arange(0, 32), tl.arange(0, 4)
    k = step * 128 + e[:, None] * 4 + i[None, :]
    inside = (k < K)[None, :, :] & (m < M)[:, None, None]
    at = m[:, None, None].to(tl.int64) * x_stride + k[None, :, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    sums = tl.sum(tl.sum(x.to(tl.float32), axis=2), axis=1)
    tl.store(sums_ptr + step * BLOCK_M + m, sums)
    rows = (K + 127) // 128 * 32
    to = i[None, None, :] * rows + (step * 32 + e)[None, :, None]
    tl.store(planes_ptr + to * BLOCK_M + m[:, None, None], x)


@triton.jit
def _planes_bfloat16(halves):
    return tl.inline_asm_elementwise(
        """{ .reg .b32 t;
        lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA; shr.u32 t, $4, 4;
        lop3.b32 $1, t, 0x000F000F, 0x43004300, 0xEA; shr.u32 t, $4, 8;
        lop3.b32 $2, t, 0x000F000F, 0x43004300, 0xEA; shr.u32 t, $4, 12;
        lop3.b32 $3, t, 0x000F000F, 0x43004300, 0xEA; }""",
        "=r,=r,=r,=r,r", [halves], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _planes_float16(halves):
    return tl.inline_asm_elementwise(
        """{ .reg .b32 t;
        lop3.b32 $0, $4, 0x000F000F, 0x64006400, 0xEA; shr.u32 t, $4, 4;
        lop3.b32 $1, t, 0x000F000F, 0x64006400, 0xEA; shr.u32 t, $4, 8;
        lop3.b32 $2, t, 0x000F000F, 0x64006400, 0xEA; shr.u32 t, $4, 12;
        lop3.b32 $3, t, 0x000F000F, 0x64006400, 0xEA; mov.b32 t, 0x64086408;
        sub.f16x2 $0, $0, t; sub.f16x2 $1, $1, t; sub.f16x2 $2, $2, t; sub.f16x2 $3, $3, t; }""",
        "=r,=r,=r,=r,r", [halves], dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _plane(halves, number: tl.constexpr, HALF: tl.constexpr):
    nibble = (halves >> (4 * number)) & 15
    if HALF:
        return (nibble | 0x6400).to(tl.float16, bitcast=True) - 1032.0
    else:  # noqa: RET505  # Triton's compiler looks into code after a return.
        return (nibble | 0x4300).to(tl.bfloat16, bitcast=True)


@triton.jit
def _planes(halves, ASM: tl.constexpr, HALF: tl.constexpr):
    """The four nibbles of each 16-bit half of a word, as 128 + n in bfloat16, or n - 8 in float16
    (`HALF`): the nibble becomes the lowest bits of the significand of 128, or of 1024."""
    if ASM and HALF:
        return _planes_float16(halves)
    elif ASM:  # noqa: RET505
        return _planes_bfloat16(halves)
    else:
        return (
            _plane(halves, 0, HALF),
            _plane(halves, 1, HALF),
            _plane(halves, 2, HALF),
            _plane(halves, 3, HALF),
        )


@triton.jit
def rows_kernel(
    tiles_ptr, weight_scale_ptr, zero_ptr, planes_ptr, sums_ptr, z_ptr, partial_ptr, met_ptr,
    M, N, K,
    GROUP: tl.constexpr, ZERO: tl.constexpr, ASM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_M: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """z[m, n] = Σ_k x[m, k]·weight[n, k] for a tile of 64 n and all m; GROUP a multiple of 128."""
    tile, split = tl.program_id(0), tl.program_id(1)
    row, e, m = tl.arange(0, 64), tl.arange(0, 32), tl.arange(0, BLOCK_M)
    n = tile * 64 + row
    steps = (K + 127) // 128
    each = (steps + SPLITS - 1) // SPLITS
    rows, padded = steps * 32, tl.num_programs(0) * 64
    offset = 0.0 if HALF else 128.0 + 8.0
    total = tl.zeros((64, BLOCK_M), tl.float32)
    for step in tl.range(split * each, tl.minimum(split * each + each, steps)):
        at = (tile.to(tl.int64) * steps + step) * 2048 + row[:, None] * 32 + e[None, :]
        halves = tl.load(tiles_ptr + at)
        group = step * 128 // GROUP * padded + n
        s = tl.load(weight_scale_ptr + group).to(tl.float32)
        sums = tl.load(sums_ptr + step * BLOCK_M + m)
        a, b, c, d = _planes(halves, ASM, HALF)
        x = planes_ptr + (step * 32 + e[:, None]) * BLOCK_M + m[None, :]
        plane = rows * BLOCK_M
        part = tl.dot(a, tl.load(x))
        part = tl.dot(b, tl.load(x + plane), part)
        part = tl.dot(c, tl.load(x + 2 * plane), part)
        part = tl.dot(d, tl.load(x + 3 * plane), part)
        if ZERO:
            zero = offset + tl.load(zero_ptr + group).to(tl.float32)
            total += (part - zero[:, None] * sums[None, :]) * s[:, None]
        elif HALF:
            total += part * s[:, None]
        else:
            total += (part - offset * sums[None, :]) * s[:, None]
    inside = (n < N)[:, None] & (m < M)[None, :]
    at = m[None, :] * N + n[:, None]
    if SPLITS == 1:
        tl.store(z_ptr + at, total.to(z_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(partial_ptr + split * (M * N) + at, total, mask=inside)
        tl.debug_barrier()
        if tl.atomic_add(met_ptr + tile, 1, sem="acq_rel") == SPLITS - 1:
            tl.debug_barrier()
            total = tl.zeros((64, BLOCK_M), tl.float32)
            for i in tl.range(0, SPLITS):
                part = partial_ptr + i * (M * N) + at
                total += tl.load(part, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(z_ptr + at, total.to(z_ptr.dtype.element_ty), mask=inside)


@triton.jit
def dequantize_kernel(
    tiles_ptr, weight_scale_ptr, zero_ptr, w_ptr, N, K, first,
    GROUP: tl.constexpr, ZERO: tl.constexpr, ASM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One tile, from tile row `first` on, as floats: w [rows, K]; scales and zeros by row."""
    tile, step = tl.program_id(0), tl.program_id(1)
    row, e, steps = tl.arange(0, 64), tl.arange(0, 32), tl.num_programs(1)
    at = ((first + tile).to(tl.int64) * steps + step) * 2048 + row[:, None] * 32 + e[None, :]
    a, b, c, d = _planes(tl.load(tiles_ptr + at), ASM, HALF)
    # The k of a half are its four planes: a, b, c, d side by side.
    values = tl.join(tl.join(a, c), tl.join(b, d)).reshape(64, 128).to(tl.float32)
    n, k = (first + tile) * 64 + row, step * 128 + tl.arange(0, 128)
    there = (n < N)[:, None] & (k < K)[None, :]
    groups = (K + GROUP - 1) // GROUP
    middle = 0.0 if HALF else 128.0 + 8.0
    if GROUP % 128 == 0:  # one scale for a row of the tile
        at = (n * groups + step * 128 // GROUP)[:, None]
        known = (n < N)[:, None]
    else:
        at = n[:, None] * groups + (k // GROUP)[None, :]
        known = there
    if ZERO:
        middle += tl.load(zero_ptr + at, mask=known, other=0.0).to(tl.float32)
    w = (values - middle) * tl.load(weight_scale_ptr + at, mask=known, other=0.0).to(tl.float32)
    at = (tile * 64 + row)[:, None].to(tl.int64) * K + k[None, :]
    tl.store(w_ptr + at, w.to(w_ptr.dtype.element_ty), mask=there)


@dataclass(frozen=True)
class Weight:
    """tiles: int32 [N / 64, K / 128, 64, 16]; scale, zero: floats [groups, N], and again by row,
    [N, groups]; the zeros, of the nibbles less 8, may be None. Tensors have N rounded up to 64."""

    tiles: Tensor
    scale: Tensor
    row_scale: Tensor
    zero: Tensor | None
    row_zero: Tensor | None
    N: int
    group_size: int

    def arguments(self, by_row: bool) -> dict[str, Tensor | int | bool]:
        scale, zero = (self.row_scale, self.row_zero) if by_row else (self.scale, self.zero)
        return {
            "tiles_ptr": self.tiles,
            "weight_scale_ptr": scale,
            "zero_ptr": scale if zero is None else zero,
            "N": self.N,
            "GROUP": self.group_size,
            "ZERO": zero is not None,
        }


def vector(x: Tensor, weight: Weight, config: VectorConfig | None = None) -> Tensor:
    """x [1, K] · weightᵀ → [1, N], K at most MOST_DEPTH; group_size is a multiple of 32.

    ValueError if `config` is none.
    """
    depth, device = x.shape[1], x.device
    config = config or vector_config(weight.N, depth, device)
    require(config)
    at_once = config.programs * multiprocessors(device)
    z = torch.empty(1, weight.N, dtype=x.dtype, device=device)
    launch(
        one_row_kernel,
        (min(triton.cdiv(weight.N, config.rows), at_once),),
        {
            **weight.arguments(by_row=True), "x_ptr": x, "z_ptr": z, "K": depth,
            "ASM": has_assembly(device), "PARTS": _parts(depth), "ROWS": config.rows,
            "STAGES": config.num_stages,
        },
        num_warps=config.num_warps,
    )  # fmt: skip
    return z


def rows(x: Tensor, weight: Weight, config: RowsConfig | None = None) -> Tensor:
    """x [M, K] · weightᵀ → [M, N], M at most 64; group_size is a multiple of 128."""
    (m, depth), device = x.shape, x.device
    tiles, steps = weight.tiles.shape[:2]
    config = config or rows_config(tiles, steps, device)
    block = max(16, triton.next_power_of_2(m))
    planes = torch.empty(4, steps * 32, block, dtype=x.dtype, device=device)
    sums = torch.empty(steps, block, dtype=torch.float32, device=device)
    met = torch.empty(tiles, dtype=torch.int32, device=device)
    partial = torch.empty(config.splits if config.splits > 1 else 0, m, weight.N, device=device)
    launch(
        planes_kernel,
        (steps,),
        {
            "x_ptr": x, "planes_ptr": planes, "sums_ptr": sums, "met_ptr": met, "M": m, "K": depth,
            "x_stride": x.stride(0), "met": tiles, "BLOCK_M": block,
            "MET": triton.next_power_of_2(triton.cdiv(tiles, steps)),
        },
    )  # fmt: skip
    z = torch.empty(m, weight.N, dtype=x.dtype, device=device)
    launch(
        rows_kernel,
        (tiles, config.splits),
        {
            **weight.arguments(by_row=False), "tiles_ptr": weight.tiles.view(torch.int16),
            "planes_ptr": planes, "sums_ptr": sums, "z_ptr": z,
            "partial_ptr": partial if config.splits > 1 else sums, "met_ptr": met,
            "M": m, "K": depth, "ASM": has_assembly(device), "HALF": x.dtype == torch.float16,
            "BLOCK_M": block, "SPLITS": config.splits,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
    return z


def dequantize(weight: Weight, depth: int, dtype: torch.dtype, first: int, count: int) -> Tensor:
    """`count` tiles of rows of the weight, from tile `first` on, as floats [rows, K]."""
    left = min(count * TILE_ROWS, weight.N - first * TILE_ROWS)
    w = torch.empty(left, depth, dtype=dtype, device=weight.tiles.device)
    arguments = {
        **weight.arguments(by_row=True), "tiles_ptr": weight.tiles.view(torch.int16), "w_ptr": w,
        "K": depth, "first": first, "ASM": has_assembly(w.device),
        "HALF": dtype == torch.float16,
    }  # fmt: skip
    launch(dequantize_kernel, (triton.cdiv(left, TILE_ROWS), weight.tiles.shape[1]), arguments)
    return w
