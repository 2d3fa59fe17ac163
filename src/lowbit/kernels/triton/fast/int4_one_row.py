# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportReturnType=false
"""One row of activations by a weight of 4 bits.

x becomes integers of two digits of 8 bits for every 32 k, as on the CPU (docs/grouped-weights.md).
A word's even nibbles, and its odd ones, are four bytes each with a mask, and DP4A multiplies four
bytes at once. Each program makes the digits of all of x, keeps them in registers, and goes over its
share of the rows of the weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.kernels.triton.fast.launch import Config, Gpu, gpu_of, launch
from lowbit.kernels.triton.fast.tiles import GROUP_UNIT, TILE_ROWS, Int4Weight

MOST_DEPTH = 32768  # k of one row, whose digits fit into the registers of a program


@dataclass(frozen=True)
class VectorConfig(Config, rows=1, num_warps=1, positive=("programs",)):
    """How one row is multiplied: `rows` of the weight at once, and `programs` on each
    multiprocessor."""

    rows: int
    num_warps: int
    num_stages: int
    programs: int

    def misfit(self) -> str | None:
        # The weight is padded to whole tiles, and loaded without a mask.
        return f"rows is {self.rows}; a tile has {TILE_ROWS}" if self.rows > TILE_ROWS else None


def refusal(M: int, K: int, group_size: int, itemsize: int) -> str | None:
    """Why the kernel does not serve a product; None if it does."""
    if itemsize != 2:
        return "x is float32, and its digits have 16 bits"
    if M != 1:
        return f"x has {M} rows, and it takes one"
    if K > MOST_DEPTH:
        return f"K is {K}; the digits of {MOST_DEPTH} fit into the registers of a program"
    return None


def vector_config(gpu: Gpu, N: int, K: int) -> VectorConfig:
    """What fits a weight [N, K]: four loads of 16 bytes for each thread at once, if N suffices.

    Measured on an H200 (28672 x 8192, 8192 x 28672, 4096 x 4096); other GPUs are taken to be alike.
    """
    if gpu.multiprocessors == 1:
        return VectorConfig(rows=16, num_warps=4, num_stages=1, programs=2)
    parts = _parts(K)
    num_warps, programs = (4, 4) if parts <= 256 else (8, 2)
    rows = max(1, 4 * 32 * num_warps // parts)
    at_once = programs * gpu.multiprocessors
    while rows > 1 and rows * at_once > N:
        rows //= 2
    # To load ahead pays only for programs that go on for a while.
    return VectorConfig(rows, num_warps, 3 if 4 * rows * at_once < N else 1, programs)


def _parts(depth: int) -> int:
    """How many times 32 k there are, rounded up to a power of two; at least a warp's 32."""
    return triton.next_power_of_2(max(triton.cdiv(depth, GROUP_UNIT), 32))


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
def _digits_of(x_ptr, K: tl.constexpr, PARTS: tl.constexpr, ASM: tl.constexpr):
    """x as digits of 8 bits, four k to a word, [PARTS, 4]: the high and the low ones of even k,
    those of odd k; the sums of both; and the scale of each part of 32 k, NaN if one of them is no
    finite number."""
    k = (
        tl.arange(0, PARTS)[:, None, None] * 32
        + tl.arange(0, 4)[None, :, None] * 8
        + tl.arange(0, 8)[None, None, :]
    )
    if K == 32 * PARTS:
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
    sums = tl.sum(sums, axis=1).to(tl.float32)
    scale = tl.where(greatest < float("inf"), scale, float("nan"))
    return high_even, low_even, high_odd, low_odd, sums, scale


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
    part, word = tl.arange(0, PARTS), tl.arange(0, 4)
    high_even, low_even, high_odd, low_odd, sums, scale = _digits_of(x_ptr, K, PARTS, ASM)
    sums, scale = sums[None, :], scale[None, :]
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


def vector(x: Tensor, weight: Int4Weight, config: VectorConfig) -> Tensor:
    """x [1, K] · weightᵀ → [1, N], K at most MOST_DEPTH; group_size is a multiple of 32.

    ValueError if `config` is none.
    """
    config.require()
    gpu = gpu_of(x.device)
    z = torch.empty(1, weight.N, dtype=x.dtype, device=x.device)
    arguments = {
        **weight.arguments(by_row=True),
        "x_ptr": x,
        "z_ptr": z,
        "ASM": gpu.assembly,
        "PARTS": _parts(weight.K),
        "ROWS": config.rows,
        "STAGES": config.num_stages,
    }
    programs = min(triton.cdiv(weight.N, config.rows), config.programs * gpu.multiprocessors)
    launch(one_row_kernel, (programs,), arguments, num_warps=config.num_warps)
    return z
