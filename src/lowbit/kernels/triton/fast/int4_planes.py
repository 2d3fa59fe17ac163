# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportReturnType=false
# pyright: reportAssignmentType=false
"""Up to 64 rows of activations by a weight of 4 bits, on tensor cores; and the weight as floats.

Nibbles must not be turned into floats one by one: conversions would take longer than the memory
does. A word of two halves, masked and OR-ed with the exponent of 128 (of 1024 for float16), is two
floats 128 + n. The halves of all words are one plane of k for the tensor cores, and so are their
second, third and fourth nibbles; x is brought into the order of these planes first. The 128 is
taken off with the row sums of x, as the zero point is. float16 takes 1024 + 8 off each nibble
instead: sums of products with 1024 would lose bits in float32. Where there are few tiles, K is cut
among several programs; the last of them adds the parts, in their order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.kernels.triton.fast.launch import Config, Gpu, gpu_of, launch
from lowbit.kernels.triton.fast.tiles import TILE_DEPTH, TILE_ROWS, Int4Weight

MOST_ROWS = 64  # of x, that tensor cores take at once
MOST_BY_ROWS = 128  # of x, from which on writing the weight as floats takes less time
_PROGRAMS = 750  # of `rows_kernel` that keep an H200 busy, by measurement


@dataclass(frozen=True)
class RowsConfig(Config):
    """How many rows are multiplied: by `splits` programs along K for each tile of rows."""

    splits: int
    num_warps: int = 4
    num_stages: int = 3


def refusal(M: int, K: int, group_size: int, itemsize: int) -> str | None:
    """Why `rows_kernel` does not serve a product; None if it does."""
    if itemsize != 2:
        return "x is float32, and tensor cores take 16 bits"
    if M > MOST_BY_ROWS:
        return f"x has {M} rows; above {MOST_BY_ROWS} it takes less time to write the weight anew"
    if group_size % TILE_DEPTH:
        return f"groups of {group_size} are no multiple of the {TILE_DEPTH} k of a tile"
    return None


def rows_config(gpu: Gpu, N: int, K: int) -> RowsConfig:
    """What fits a weight [N, K]; one program along K in an interpreter.

    Measured on an H200, as `vector_config` is.
    """
    tiles, steps, splits = triton.cdiv(N, TILE_ROWS), triton.cdiv(K, TILE_DEPTH), 1
    if gpu.multiprocessors > 1:
        while splits < 8 and splits * tiles < _PROGRAMS and splits * 2 <= steps:
            splits *= 2
    return RowsConfig(splits)


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


def _text(exponent: str, less: str = "") -> str:
    """PTX for the four nibbles of both halves of a word, with the bits of an exponent; less: two
    float16 to subtract from each pair."""
    nibbles = [f"lop3.b32 $0, $4, 0x000F000F, {exponent}, 0xEA;"]
    for i in range(1, 4):
        nibbles += [f"shr.u32 t, $4, {4 * i};", f"lop3.b32 ${i}, t, 0x000F000F, {exponent}, 0xEA;"]
    if less:
        nibbles += [f"mov.b32 t, {less};", *(f"sub.f16x2 ${i}, ${i}, t;" for i in range(4))]
    return f"{{ .reg .b32 t; {' '.join(nibbles)} }}"


_BFLOAT16 = tl.constexpr(_text("0x43004300"))
_FLOAT16 = tl.constexpr(_text("0x64006400", "0x64086408"))


@triton.jit
def _planes(halves, ASM: tl.constexpr, HALF: tl.constexpr):
    """The four nibbles of each 16-bit half of a word, as 128 + n in bfloat16, or n - 8 in float16
    (`HALF`): the nibble becomes the lowest bits of the significand of 128, or of 1024."""
    kind: tl.constexpr = tl.float16 if HALF else tl.bfloat16
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            _FLOAT16 if HALF else _BFLOAT16, "=r,=r,=r,=r,r", [halves],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        bits: tl.constexpr = 0x6400 if HALF else 0x4300
        a, b = halves & 15 | bits, (halves >> 4) & 15 | bits
        c, d = (halves >> 8) & 15 | bits, (halves >> 12) & 15 | bits
    a, b = a.to(kind, bitcast=True), b.to(kind, bitcast=True)
    c, d = c.to(kind, bitcast=True), d.to(kind, bitcast=True)
    if HALF and not ASM:
        a, b, c, d = a - 1032.0, b - 1032.0, c - 1032.0, d - 1032.0
    return a, b, c, d


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


def rows(x: Tensor, weight: Int4Weight, config: RowsConfig) -> Tensor:
    """x [M, K] · weightᵀ → [M, N]; group_size is a multiple of 128."""
    parts = [_up_to_64(part, weight, config) for part in x.split(MOST_ROWS)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _up_to_64(x: Tensor, weight: Int4Weight, config: RowsConfig) -> Tensor:
    m, device = len(x), x.device
    tiles, steps = weight.tiles.shape[:2]
    block = max(16, triton.next_power_of_2(m))
    planes = torch.empty(4, steps * 32, block, dtype=x.dtype, device=device)
    sums = torch.empty(steps, block, dtype=torch.float32, device=device)
    met = torch.empty(tiles, dtype=torch.int32, device=device)
    partial = torch.empty(config.splits if config.splits > 1 else 0, m, weight.N, device=device)
    shared = {"planes_ptr": planes, "sums_ptr": sums, "met_ptr": met, "M": m, "BLOCK_M": block}
    arguments = {
        **shared,
        "x_ptr": x,
        "K": weight.K,
        "x_stride": x.stride(0),
        "met": tiles,
        "MET": triton.next_power_of_2(triton.cdiv(tiles, steps)),
    }
    launch(planes_kernel, (steps,), arguments)
    z = torch.empty(m, weight.N, dtype=x.dtype, device=device)
    arguments = {
        **shared,
        **_arguments(weight, by_row=False, dtype=x.dtype),
        "z_ptr": z,
        "partial_ptr": partial if config.splits > 1 else sums,
        "SPLITS": config.splits,
    }
    launch(rows_kernel, (tiles, config.splits), arguments, **config.options)
    return z


def _arguments(weight: Int4Weight, by_row: bool, dtype: torch.dtype) -> dict[str, object]:
    """What the kernels of planes take of a weight: halves of its words."""
    halves = {"tiles_ptr": weight.tiles.view(torch.int16), "HALF": dtype == torch.float16}
    return {**weight.arguments(by_row), **halves, "ASM": gpu_of(weight.tiles.device).assembly}


def dequantize(weight: Int4Weight, dtype: torch.dtype, first: int, count: int) -> Tensor:
    """`count` tiles of rows of the weight, from tile `first` on, as floats [rows, K]."""
    left = min(count * TILE_ROWS, weight.N - first * TILE_ROWS)
    w = torch.empty(left, weight.K, dtype=dtype, device=weight.tiles.device)
    arguments = {**_arguments(weight, by_row=True, dtype=dtype), "w_ptr": w, "first": first}
    launch(dequantize_kernel, (triton.cdiv(left, TILE_ROWS), weight.tiles.shape[1]), arguments)
    return w
