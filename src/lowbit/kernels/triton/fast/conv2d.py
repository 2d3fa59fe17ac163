"""Two-dimensional convolution as a matrix product whose left operand is never written (implicit
GEMM): a row for each output pixel, a column for each output channel.

Every tensor is reached through its strides, so NCHW and NHWC (channels_last) are one text. With
many channels x is copied to NHWC where it is not; the result is written in the caller's format.
Where there are few blocks of the result, the terms are cut among several programs; the last of them
adds the parts, in their order. With a kernel of one pixel NHWC is a plain matrix product.
"""

# Triton turns numbers into its own types, which its annotations do not say.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.kernels.triton.fast.batched_matmul import (
    MatmulConfig,
    batched_matmul,
    matmul_choice,
)
from lowbit.kernels.triton.fast.launch import (
    LEAST_DOT,
    Choice,
    Config,
    Gpu,
    Table,
    choosing,
    counters,
    from_table,
    gpu_of,
    launch,
)

Pair = tuple[int, int]


@dataclass(frozen=True)
class ConvConfig(
    Config,
    pixels=LEAST_DOT,
    channels=LEAST_DOT,
    depth=LEAST_DOT,
    num_warps=1,
    positive=("num_stages",),
):
    """A program computes `pixels` by `channels` of the result, `depth` terms at a time; `splits`
    programs share the terms, or as many as keep the GPU busy."""

    pixels: int
    channels: int
    depth: int
    num_warps: int
    num_stages: int
    splits: int | None = None

    def parts(self, gpu: Gpu, blocks: int, steps: int) -> int:
        """How many programs share the `steps` of each of so many blocks of the result."""
        wanted = self.splits or min(2 * gpu.multiprocessors // blocks, _MOST_SPLITS)
        return max(1, min(wanted, steps // _LEAST_STEPS))


TABLE: Table[ConvConfig] = {
    90: {
        "few": ConvConfig(64, 64, 64, 4, 4),
        "narrow": ConvConfig(128, 64, 64, 4, 4),
        "wide": ConvConfig(128, 128, 64, 8, 3),
        "float32": ConvConfig(64, 64, 32, 8, 3),
    },
}
"""Where blocks are so few that half of the GPU would have none, else for at most 64 channels, and
for more; for float32."""
_ANY = {
    "few": ConvConfig(64, 64, 32, 4, 3),
    "narrow": ConvConfig(128, 64, 32, 4, 3),
    "wide": ConvConfig(128, 128, 32, 8, 3),
    "float32": ConvConfig(64, 64, 32, 8, 2),
}
_NARROW = 64
_LEAST_STEPS, _MOST_SPLITS = 4, 8  # of a program, where several share them, and how many do


@choosing("conv2d")
def conv_choice(
    gpu: Gpu, channels: int, itemsize: int, pixels: int | None = None, pointwise: bool = False
) -> Choice[ConvConfig | MatmulConfig]:
    """For so many output channels and pixels. pointwise: a kernel of one pixel that neither steps
    nor is padded, x in channels_last, and no bias."""
    if pointwise and itemsize == 2:
        product = matmul_choice(gpu, itemsize)
        return Choice(product.kernel, product.config, "each pixel is a row of a plain product")
    kind = "narrow" if channels <= _NARROW else "wide"
    blocks = triton.cdiv(channels, 128) * triton.cdiv(pixels or 1 << 30, 128)
    if 2 * blocks < gpu.multiprocessors:
        kind = "few"
    if itemsize == 4:
        kind = "float32"
    what = f"{channels} channels of {itemsize} bytes{', few pixels,' * (kind == 'few')}"
    return from_table("conv2d_kernel", TABLE, gpu, kind, what, _ANY[kind])


@triton.jit
def add_parts(part, to, inside, parts_ptr, met_ptr, SPLITS: tl.constexpr):
    """Store the sum of what the programs of a block have, along the last axis of the grid, once all
    have it."""
    SIZE: tl.constexpr = part.shape[0] * part.shape[1]
    block = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    row, column = tl.arange(0, part.shape[0]), tl.arange(0, part.shape[1])
    first = parts_ptr + block.to(tl.int64) * (SPLITS * SIZE)
    first += row[:, None] * part.shape[1] + column[None, :]
    tl.store(first + tl.program_id(2) * SIZE, part)
    tl.debug_barrier()
    if tl.atomic_add(met_ptr + block, 1, sem="acq_rel") == SPLITS - 1:
        tl.debug_barrier()
        total = tl.zeros(part.shape, tl.float32)
        for n in tl.range(0, SPLITS, loop_unroll_factor=4):
            total += tl.load(first + n * SIZE, cache_modifier=".cg")
        tl.store(to, total.to(to.dtype.element_ty), mask=inside)
        tl.atomic_xchg(met_ptr + block, 0, sem="relaxed")


@triton.jit
def conv2d_kernel(
    x_ptr, w_ptr, bias_ptr, z_ptr, parts_ptr, met_ptr, pixels, x_sizes, z_sizes, KW, taps,
    x_strides, w_strides, z_strides,
    STRIDE: tl.constexpr, PAD: tl.constexpr, DILATION: tl.constexpr,
    FLAT: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (pixels, channels, part of the steps). A step takes DEPTH channels of one tap (u, v)
    of the kernel; with few channels (FLAT) it takes DEPTH pairs of tap and channel, so that little
    of the product is zeros. The mask is the padding."""
    C, H, W = x_sizes
    OUT, OH, OW = z_sizes
    x_b, x_c, x_h, x_w = x_strides
    w_o, w_c, w_h, w_w = w_strides
    z_b, z_c, z_h, z_w = z_strides
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    b = (pixel // (OH * OW)).to(tl.int64)
    i = pixel // OW % OH
    j = pixel % OW
    o = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    lane = tl.arange(0, DEPTH)
    blocks = tl.cdiv(C, DEPTH)
    total = tl.zeros((PIXELS, CHANNELS), tl.float32)
    steps = tl.cdiv(taps * C, DEPTH) if FLAT else taps * blocks
    each = tl.cdiv(steps, SPLITS)
    first = tl.program_id(2) * each
    for step in range(first, tl.minimum(first + each, steps)):
        if FLAT:
            term = step * DEPTH + lane
            tap, c = term // C, term % C
        else:
            tap, c = step // blocks + tl.zeros((DEPTH,), tl.int32), step % blocks * DEPTH + lane
        u, v = tap // KW, tap % KW
        known = (tap < taps) & (c < C)
        row = (i * STRIDE[0] - PAD[0])[:, None] + (u * DILATION[0])[None, :]
        column = (j * STRIDE[1] - PAD[1])[:, None] + (v * DILATION[1])[None, :]
        inside = (row >= 0) & (row < H) & (column >= 0) & (column < W)
        inside &= (pixel < pixels)[:, None] & known[None, :]
        at = (b * x_b)[:, None] + row * x_h + column * x_w + (c * x_c)[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=0.0)
        at = (o * w_o)[None, :] + (u * w_h + v * w_w + c * w_c)[:, None]
        w = tl.load(w_ptr + at, mask=known[:, None] & (o < OUT)[None, :], other=0.0)
        total = tl.dot(x, w, total, input_precision=PRECISION)
    if BIASED:
        bias = tl.load(bias_ptr + o, mask=o < OUT, other=0.0).to(tl.float32)
        total += tl.where(tl.program_id(2) == 0, bias, 0.0)[None, :]
    to = z_ptr + (b * z_b + i * z_h + j * z_w)[:, None] + (o * z_c)[None, :]
    inside = (pixel < pixels)[:, None] & (o < OUT)[None, :]
    if SPLITS == 1:
        tl.store(to, total.to(z_ptr.dtype.element_ty), mask=inside)
    else:
        add_parts(total, to, inside, parts_ptr, met_ptr, SPLITS)


def is_channels_last(x: Tensor) -> bool:
    """Whether neighbours in memory are channels of one pixel."""
    return x.stride(1) == 1 and x.shape[1] > 1


def _output(x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """Memory for the result, in the format of x."""
    sizes = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    shape = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes]
    memory = torch.channels_last if is_channels_last(x) else torch.contiguous_format
    made = {"dtype": x.dtype, "device": x.device, "memory_format": memory}
    return torch.empty((len(x), len(weight), *shape), **made)


def _pointwise(x: Tensor, weight: Tensor, config: MatmulConfig) -> Tensor:
    """The product of pixels, rows of x, by a weight [O, C, 1, 1]: channels_last."""
    rows = x.permute(0, 2, 3, 1)
    z = batched_matmul(rows.flatten(0, 2)[None], weight.flatten(1).mT[None], False, config)
    return z.view(*rows.shape[:3], len(weight)).permute(0, 3, 1, 2)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    tf32: bool,
    config: ConvConfig | None = None,
) -> Tensor:
    """x [B, C, H, W] with weight [O, C, KH, KW], in the dtype and memory format of x.

    ValueError if `config` is none.
    """
    gpu, z = gpu_of(x.device), _output(x, weight, stride, padding, dilation)
    pixels, taps = z.shape[0] * z.shape[2] * z.shape[3], weight.shape[2] * weight.shape[3]
    if config is None:
        plain = taps == 1 and {*stride} == {1} and {*padding} == {0} and bias is None
        plain &= is_channels_last(x) and x.permute(0, 2, 3, 1).is_contiguous()
        chosen = conv_choice(gpu, len(weight), x.element_size(), pixels, plain).config
        if isinstance(chosen, MatmulConfig):
            return _pointwise(x, weight, chosen)
        config = chosen
    config.require()
    flat = x.shape[1] % config.depth != 0 and x.shape[1] < 2 * config.depth
    if not flat:
        # In NCHW neighbours are pixels, which the taps shift: a copy costs less than narrow loads.
        x = x.contiguous(memory_format=torch.channels_last)
    if is_channels_last(x):
        weight = weight.contiguous(memory_format=torch.channels_last)
    grid = (triton.cdiv(pixels, config.pixels), triton.cdiv(z.shape[1], config.channels))
    steps = taps * triton.cdiv(x.shape[1], config.depth)
    splits = config.parts(gpu, max(1, grid[0] * grid[1]), steps)
    held = (grid[0] * grid[1], splits if splits > 1 else 0, config.pixels, config.channels)
    arguments = {
        "x_ptr": x,
        "w_ptr": weight,
        "bias_ptr": x if bias is None else bias.contiguous(),
        "z_ptr": z,
        "parts_ptr": torch.empty(held, dtype=torch.float32, device=x.device),
        "met_ptr": counters(x.device, held[0]) if splits > 1 else x,
        "pixels": pixels,
        "x_sizes": tuple(x.shape[1:]),
        "z_sizes": tuple(z.shape[1:]),
        "KW": weight.shape[3],
        "taps": taps,
        **{f"{name}_strides": one.stride() for name, one in (("x", x), ("w", weight), ("z", z))},
        "STRIDE": tuple(stride),
        "PAD": tuple(padding),
        "DILATION": tuple(dilation),
        "FLAT": flat,
        "BIASED": bias is not None,
        "PRECISION": "tf32" if tf32 else "ieee",
        "PIXELS": config.pixels,
        "CHANNELS": config.channels,
        "DEPTH": config.depth,
        "SPLITS": splits,
    }
    launch(conv2d_kernel, (*grid, splits), arguments, **config.options)
    return z
