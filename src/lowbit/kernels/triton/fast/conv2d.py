"""Two-dimensional convolution as a matrix product whose left operand is never written (implicit
GEMM): a row for each output pixel, a column for each output channel.

Every tensor is reached through its strides, so NCHW and NHWC (channels_last) are one text. With
many channels x is copied to NHWC where it is not; the result is written in the caller's format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.kernels.triton.fast.launch import (
    LEAST_DOT,
    Choice,
    Config,
    Gpu,
    Table,
    choosing,
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
    """A program computes `pixels` by `channels` of the result, `depth` terms at a time."""

    pixels: int
    channels: int
    depth: int
    num_warps: int
    num_stages: int


TABLE: Table[ConvConfig] = {
    90: {
        "narrow": ConvConfig(128, 64, 64, 4, 4),
        "wide": ConvConfig(128, 128, 64, 8, 3),
        "float32": ConvConfig(64, 64, 32, 8, 3),
    },
}
"""For at most 64 channels, for more, and for float32."""
_ANY = {
    "narrow": ConvConfig(128, 64, 32, 4, 3),
    "wide": ConvConfig(128, 128, 32, 8, 3),
    "float32": ConvConfig(64, 64, 32, 8, 2),
}
_NARROW = 64


@choosing("conv2d")
def conv_choice(gpu: Gpu, channels: int, itemsize: int) -> Choice[ConvConfig]:
    """For so many output channels."""
    kind = "float32" if itemsize == 4 else "narrow" if channels <= _NARROW else "wide"
    what = f"{channels} channels of {itemsize} bytes"
    return from_table("conv2d_kernel", TABLE, gpu, kind, what, _ANY[kind])


@triton.jit
def conv2d_kernel(
    x_ptr, w_ptr, bias_ptr, z_ptr, pixels, x_sizes, z_sizes, KW, taps,
    x_strides, w_strides, z_strides,
    STRIDE: tl.constexpr, PAD: tl.constexpr, DILATION: tl.constexpr,
    FLAT: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A step takes DEPTH channels of one tap (u, v) of the kernel; with few channels (FLAT) it
    takes DEPTH pairs of tap and channel, so that little of the product is zeros. The mask is the
    padding."""
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
    for step in range(tl.cdiv(taps * C, DEPTH) if FLAT else taps * blocks):
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
        total += tl.load(bias_ptr + o, mask=o < OUT, other=0.0).to(tl.float32)[None, :]
    at = (b * z_b + i * z_h + j * z_w)[:, None] + (o * z_c)[None, :]
    inside = (pixel < pixels)[:, None] & (o < OUT)[None, :]
    tl.store(z_ptr + at, total.to(z_ptr.dtype.element_ty), mask=inside)


def is_channels_last(x: Tensor) -> bool:
    """Whether neighbours in memory are channels of one pixel."""
    return x.stride(1) == 1 and x.shape[1] > 1


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
    config = config or conv_choice(gpu_of(x.device), len(weight), x.element_size()).config
    config.require()
    sizes = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    shape = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes]
    memory = torch.channels_last if is_channels_last(x) else torch.contiguous_format
    made = {"dtype": x.dtype, "device": x.device, "memory_format": memory}
    z = torch.empty((len(x), len(weight), *shape), **made)
    flat = x.shape[1] % config.depth != 0 and x.shape[1] < 2 * config.depth
    if not flat:
        # In NCHW neighbours of a thread's load are pixels, which the taps shift: loads of one
        # element each. A copy costs less than those.
        x = x.contiguous(memory_format=torch.channels_last)
    if is_channels_last(x):
        weight = weight.contiguous(memory_format=torch.channels_last)
    pixels = z.shape[0] * z.shape[2] * z.shape[3]
    arguments = {
        "x_ptr": x,
        "w_ptr": weight,
        "bias_ptr": x if bias is None else bias.contiguous(),
        "z_ptr": z,
        "pixels": pixels,
        "x_sizes": tuple(x.shape[1:]),
        "z_sizes": tuple(z.shape[1:]),
        "KW": weight.shape[3],
        "taps": weight.shape[2] * weight.shape[3],
        "x_strides": x.stride(),
        "w_strides": weight.stride(),
        "z_strides": z.stride(),
        "STRIDE": tuple(stride),
        "PAD": tuple(padding),
        "DILATION": tuple(dilation),
        "FLAT": flat,
        "BIASED": bias is not None,
        "PRECISION": "tf32" if tf32 else "ieee",
        "PIXELS": config.pixels,
        "CHANNELS": config.channels,
        "DEPTH": config.depth,
    }
    grid = (triton.cdiv(pixels, config.pixels), triton.cdiv(z.shape[1], config.channels))
    launch(conv2d_kernel, grid, arguments, **config.options)
    return z
