# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportReturnType=false
"""Products with 4-bit weights: x [M, K] · dequantized weight [N, K]ᵀ, for few rows of x.

The weight lies in tiles of 64 rows by 128 k, contiguous, 16 words of 8 nibbles to a row:

    tile [n // 64, k // 128]:  row n % 64:  | word 0: k 0..7 | word 1: k 8..15 | ... | word 15 |

so that a program reads nothing but whole sectors, and 16 bytes a thread. Nibbles must not be turned
into floats one by one: conversions would take longer than the memory does.

- One row: x becomes integers of two digits of 8 bits for every 32 k, as on the CPU
  (docs/grouped-weights.md). A word's even nibbles, and its odd ones, are four bytes each with a
  mask, and DP4A multiplies four bytes at once.
- Up to 64 rows: a word of two halves, masked and OR-ed with the exponent of 128 (of 1024 for
  float16), is two floats 128 + n. The halves of all words are one plane of k for the tensor cores,
  and so are their second, third and fourth nibbles; x is brought into the order of these planes
  first. The 128 is taken off with the row sums of x, as the zero point is.

Where there are few tiles, K is cut among several programs; the last of them adds the parts, in
their order. Larger M are served by dequantizing, see gpu/int4.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.kernels.triton.fast.launch import compute_capability, launch, multiprocessors

TILE_ROWS, TILE_DEPTH = 64, 128
WORDS = TILE_DEPTH // 8
MIDDLE = 8  # the nibble that is taken off as it is; zero points are relative to it
MOST_ROWS = 64  # of x, that tensor cores take at once
_PART = 32  # k that share a scale of x's digits, and a thread of `vector_kernel`
CHUNK = 8192  # k of a program of it; for more of them, tensor cores take less time
_PROGRAMS = 1500  # that keep an H200 busy, by measurement


@dataclass(frozen=True)
class Int4Config:
    """How the work is cut: tiles in a program and programs along K (`splits`), for many rows; rows
    of the weight at once and how often (`rows`, `turns`), for one."""

    splits: int
    rows: int = 4
    turns: int = 32
    num_warps: int = 4
    num_stages: int = 3


def config_for(m: int, tiles: int, steps: int, device: torch.device) -> Int4Config:
    """What fits a weight of so many tiles of rows and of K; one program for all in an interpreter.

    Measured on an H200 (28672 x 8192, 8192 x 28672, 4096 x 4096); other GPUs are taken to be alike.
    """
    if multiprocessors(device) == 1:
        return Int4Config(splits=1)
    splits = 1
    while splits < 8 and splits * tiles < _PROGRAMS // 2 and splits * 2 <= steps:
        splits *= 2
    turns = 32
    while turns > 4 and tiles * TILE_ROWS // (4 * turns) < multiprocessors(device):
        turns //= 2
    return Int4Config(splits, turns=turns)


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
def digits_kernel(
    x_ptr, even_ptr, odd_ptr, sum_ptr, scale_ptr, met_ptr, K, met,
    BLOCK: tl.constexpr, MET: tl.constexpr,
):  # fmt: skip
    """One row of x as digits: for each 32 k a scale, the sum, and the bytes of both digits.

    even, odd: int32 [2, K / 8], the even and the odd k of each word. Counters become zeros.
    """
    at = tl.program_id(0) * MET + tl.arange(0, MET)
    tl.store(met_ptr + at, tl.zeros((MET,), tl.int32), mask=at < met)
    part = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word, lane = tl.arange(0, 4), tl.arange(0, 8)
    k = part[:, None, None] * 32 + word[None, :, None] * 8 + lane[None, None, :]
    x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    greatest = tl.max(tl.max(tl.abs(x), axis=2), axis=1)
    scale = tl.where(greatest > 0, greatest / 32639.0, 1.0)
    q = tl.floor(x / scale[:, None, None] + 0.5).to(tl.int32)
    low = ((q + 128) & 255) - 128
    high = (q - low) >> 8
    inside = part < (K + 31) // 32
    tl.store(sum_ptr + part, tl.sum(tl.sum(q, axis=2), axis=1).to(tl.float32), mask=inside)
    tl.store(scale_ptr + part, scale, mask=inside)
    words = (K + 127) // 128 * 16
    to = part[:, None] * 4 + word[None, :]
    kept = to < words
    is_even = (lane % 2 == 0)[None, None, :]
    shift = (lane // 2 * 8)[None, None, :]
    for digit in tl.static_range(2):
        byte = ((high if digit == 0 else low) & 255) << shift
        even = tl.sum(tl.where(is_even, byte, 0), axis=2)
        odd = tl.sum(tl.where(is_even, 0, byte), axis=2)
        tl.store(even_ptr + digit * words + to, even, mask=kept)
        tl.store(odd_ptr + digit * words + to, odd, mask=kept)


@triton.jit
def vector_kernel(
    tiles_ptr, weight_scale_ptr, zero_ptr, even_ptr, odd_ptr, sum_ptr, scale_ptr, z_ptr,
    partial_ptr, met_ptr, N, K: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr, ASM: tl.constexpr, T: tl.constexpr,
    ROWS: tl.constexpr, TURNS: tl.constexpr, SPLITS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """z[n] = Σ_k x[k]·weight[n, k] for one row: a thread holds 32 k of x, for all rows n.

    MASKED: rows and K do not fill the programs. The compiler loads less at once then.
    """
    split = tl.program_id(1)
    part = split * T + tl.arange(0, T)
    word = part[:, None] * 4 + tl.arange(0, 4)[None, :]
    steps = (K + 127) // 128
    known = part * 32 < K
    words = steps * 16
    inside = word < words
    high_even = tl.load(even_ptr + word, mask=inside, other=0)[None, :, :]
    high_odd = tl.load(odd_ptr + word, mask=inside, other=0)[None, :, :]
    low_even = tl.load(even_ptr + words + word, mask=inside, other=0)[None, :, :]
    low_odd = tl.load(odd_ptr + words + word, mask=inside, other=0)[None, :, :]
    sums = tl.load(sum_ptr + part, mask=known, other=0.0)
    scale = tl.load(scale_ptr + part, mask=known, other=0.0)
    nothing = tl.zeros((ROWS, T, 4), tl.int32)
    # Within a row of tiles, where 32 bits are enough.
    along = (word // 16 * 1024 + word % 16)[None, :, :]
    group = part * 32 // GROUP
    groups = (K + GROUP - 1) // GROUP
    for turn in tl.range(0, TURNS):
        n = (tl.program_id(0) * TURNS + turn) * ROWS + tl.arange(0, ROWS)
        there = (n < N)[:, None] & known[None, :]
        first = (n // 64).to(tl.int64) * (steps * 1024) + n % 64 * 16
        at = tiles_ptr + first[:, None, None] + along
        if MASKED:
            packed = tl.load(at, mask=(n < N)[:, None, None] & inside[None, :, :], other=0)
        else:
            packed = tl.load(at)
        at = n[:, None] * groups + group[None, :]
        if MASKED:
            s = tl.load(weight_scale_ptr + at, mask=there, other=0.0).to(tl.float32)
        else:
            s = tl.load(weight_scale_ptr + at).to(tl.float32)
        even, odd = packed & 0x0F0F0F0F, (packed >> 4) & 0x0F0F0F0F
        high = _dot4(even, high_even + nothing, nothing, ASM)
        high = _dot4(odd, high_odd + nothing, high, ASM)
        low = _dot4(even, low_even + nothing, nothing, ASM)
        low = _dot4(odd, low_odd + nothing, low, ASM)
        total = tl.sum(high * 256 + low, axis=2).to(tl.float32)
        middle = 8.0
        if ZERO:
            middle += tl.load(zero_ptr + at, mask=there, other=0.0).to(tl.float32)
        z = tl.sum((total - middle * sums[None, :]) * s * scale[None, :], axis=1)
        if SPLITS == 1:
            tl.store(z_ptr + n, z.to(z_ptr.dtype.element_ty), mask=n < N)
        else:
            tl.store(partial_ptr + split * N + n, z, mask=n < N)
    if SPLITS > 1:
        tl.debug_barrier()
        if tl.atomic_add(met_ptr + tl.program_id(0), 1, sem="acq_rel") == SPLITS - 1:
            tl.debug_barrier()
            n = tl.program_id(0) * (TURNS * ROWS) + tl.arange(0, TURNS * ROWS)
            z = tl.zeros((TURNS * ROWS,), tl.float32)
            for i in tl.range(0, SPLITS):
                z += tl.load(partial_ptr + i * N + n, mask=n < N, other=0.0, cache_modifier=".cg")
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
        lop3.b32 $3, t, 0x000F000F, 0x64006400, 0xEA; }""",
        "=r,=r,=r,=r,r", [halves], dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _plane(halves, number: tl.constexpr, HALF: tl.constexpr):
    nibble = (halves >> (4 * number)) & 15
    if HALF:
        return (nibble | 0x6400).to(tl.float16, bitcast=True)
    else:  # noqa: RET505  # Triton's compiler looks into code after a return.
        return (nibble | 0x4300).to(tl.bfloat16, bitcast=True)


@triton.jit
def _planes(halves, ASM: tl.constexpr, HALF: tl.constexpr):
    """The four nibbles of each 16-bit half of a word, as 128 + n in bfloat16, or 1024 + n in
    float16 (`HALF`): the nibble becomes the lowest bits of the significand."""
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
    offset = 1024.0 + 8.0 if HALF else 128.0 + 8.0
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
    middle = 1024.0 + 8.0 if HALF else 128.0 + 8.0
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
    """tiles: int32 [N / 64, K / 128, 64, 16]; scale, zero: floats [groups, N], N rounded up to 64,
    and again by row, [N, groups]; the zeros, of the nibbles less 8, may be None."""

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


def vector(x: Tensor, weight: Weight, config: Int4Config | None = None) -> Tensor:
    """x [1, K] · weightᵀ → [1, N]; group_size is a multiple of 32."""
    depth, device = x.shape[1], x.device
    tiles, steps = weight.tiles.shape[:2]
    config = config or config_for(1, tiles, steps, device)
    parts = triton.cdiv(depth, _PART)
    largest = min(triton.next_power_of_2(max(parts, 32)), CHUNK // _PART)
    # Programs that K fills need no masks.
    whole = (c for c in (largest, largest // 2, largest // 4) if c >= 32 and parts % c == 0)
    chunk = next(whole, largest)
    splits = triton.cdiv(parts, chunk)
    programs = triton.cdiv(weight.N, config.rows * config.turns)
    words = torch.empty(2, 2, steps * WORDS, dtype=torch.int32, device=device)
    floats = torch.empty(2, parts, dtype=torch.float32, device=device)
    met = torch.empty(programs, dtype=torch.int32, device=device)
    partial = torch.empty(splits if splits > 1 else 1, weight.N, device=device)
    block = 32
    blocks = triton.cdiv(steps * 4, block)
    launch(
        digits_kernel,
        (blocks,),
        {
            "x_ptr": x, "even_ptr": words[0], "odd_ptr": words[1], "sum_ptr": floats[0],
            "scale_ptr": floats[1], "met_ptr": met, "K": depth, "met": programs, "BLOCK": block,
            "MET": triton.next_power_of_2(triton.cdiv(programs, blocks)),
        },
    )  # fmt: skip
    z = torch.empty(1, weight.N, dtype=x.dtype, device=device)
    launch(
        vector_kernel,
        (programs, splits),
        {
            **weight.arguments(by_row=True), "even_ptr": words[0], "odd_ptr": words[1],
            "sum_ptr": floats[0],
            "scale_ptr": floats[1], "z_ptr": z, "partial_ptr": partial, "met_ptr": met, "K": depth,
            "ASM": _has_assembly(device), "T": chunk, "ROWS": config.rows, "TURNS": config.turns,
            "SPLITS": splits,
            "MASKED": depth % (_PART * chunk) + weight.N % (config.rows * config.turns) > 0,
        },
        num_warps=config.num_warps,
    )  # fmt: skip
    return z


def rows(x: Tensor, weight: Weight, config: Int4Config | None = None) -> Tensor:
    """x [M, K] · weightᵀ → [M, N], M at most 64; group_size is a multiple of 128."""
    (m, depth), device = x.shape, x.device
    tiles, steps = weight.tiles.shape[:2]
    config = config or config_for(m, tiles, steps, device)
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
            "M": m, "K": depth, "ASM": _has_assembly(device), "HALF": x.dtype == torch.float16,
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
        "K": depth, "first": first, "ASM": _has_assembly(w.device),
        "HALF": dtype == torch.float16,
    }  # fmt: skip
    launch(dequantize_kernel, (triton.cdiv(left, TILE_ROWS), weight.tiles.shape[1]), arguments)
    return w


def _has_assembly(device: torch.device) -> bool:
    """Whether PTX can be written into the kernels: not in the interpreter."""
    return compute_capability(device) >= 80
