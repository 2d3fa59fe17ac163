# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
"""Two-dimensional convolution as a matrix product whose left operand is never written (implicit
GEMM): a row for each output pixel, a column for each output channel.

x is read in channels_last, in tiles of images, rows and columns that a tap shifts: where they hang
over, the zeros that they are filled with are the padding. x is copied where its format is another,
or its size no multiple of the stride. With few channels the taps of a row are channels of one.
Where there are few blocks of the result, the terms are cut among several programs; the last of them
adds the parts, in their order. With a kernel of one pixel NHWC is a plain matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from lowbit.kernels.triton.fast.batched_matmul import (
    MatmulConfig,
    batched_matmul,
    matmul_choice,
)
from lowbit.kernels.triton.fast.descriptors import (
    aligned,
    aligned_like,
    describable,
    described,
    tiles_of,
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
        wanted = self.splits or min(gpu.multiprocessors // blocks, _MOST_SPLITS)
        return max(1, min(wanted, steps // _LEAST_STEPS))


TABLE: Table[ConvConfig] = {
    90: {
        "few": ConvConfig(64, 64, 64, 4, 4),
        "narrow": ConvConfig(128, 64, 64, 4, 3),
        "wide": ConvConfig(128, 128, 64, 8, 4),
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
    blocks = triton.cdiv(channels, 128) * triton.cdiv(pixels or 1 << 30, 128)
    kind = "narrow" if channels <= 64 else "wide"
    kind = "float32" if itemsize == 4 else "few" if 2 * blocks < gpu.multiprocessors else kind
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
    x, w, bias_ptr, z_ptr, parts_ptr, met_ptr, x_sizes, w_sizes, z_sizes, z_strides, pitch,
    KW: tl.constexpr, TAPS: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr, DILATION: tl.constexpr,
    BIASED: tl.constexpr, PRECISION: tl.constexpr,
    TILE: tl.constexpr, CHANNELS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (tile of images, rows and columns; channels; part of the steps). A step takes DEPTH
    channels of one tap (u, v) of the kernel. Pixels outside of x are zeros that its tiles are
    filled with: the padding."""
    IMAGES: tl.constexpr = TILE[0]
    ROWS: tl.constexpr = TILE[1]
    COLUMNS: tl.constexpr = TILE[2]
    DEPTH: tl.constexpr = TILE[4]
    PIXELS: tl.constexpr = IMAGES * ROWS * COLUMNS
    x = tiles_of(x, x_sizes, (IMAGES, ROWS, COLUMNS, 1, DEPTH))
    w = tiles_of(w, w_sizes, (CHANNELS, 1, DEPTH))
    B, OUT, OH, OW = z_sizes
    z_b, z_c, z_h, z_w = z_strides
    down, across = tl.cdiv(OH, ROWS), tl.cdiv(OW, COLUMNS)
    b = tl.program_id(0) // (down * across) * IMAGES
    i = tl.program_id(0) // across % down * ROWS
    j = tl.program_id(0) % across * COLUMNS
    o = tl.program_id(1) * CHANNELS
    total = tl.zeros((PIXELS, CHANNELS), tl.float32)
    steps = TAPS * tl.cdiv(x_sizes[4], DEPTH)
    each = tl.cdiv(steps, SPLITS)
    first = tl.program_id(2) * each
    for step in range(first, tl.minimum(first + each, steps)):
        tap, c = step % TAPS, step // TAPS * DEPTH
        # From the first row and column at or before the padding's that a stride reaches.
        u = tap // KW * DILATION[0] + -PAD[0] % STRIDE[0]
        v = tap % KW * DILATION[1] + -PAD[1] % STRIDE[1]
        row = i + u // STRIDE[0] - (PAD[0] + STRIDE[0] - 1) // STRIDE[0]
        column = j + v // STRIDE[1] - (PAD[1] + STRIDE[1] - 1) // STRIDE[1]
        phase = u % STRIDE[0] * pitch + v % STRIDE[1]
        pixels = x.load([b, row, column, phase, c]).reshape(PIXELS, DEPTH)
        weights = w.load([o, tap, c]).reshape(CHANNELS, DEPTH).T
        total = tl.dot(pixels, weights, total, input_precision=PRECISION)
    pixel = tl.arange(0, PIXELS)
    b += pixel // (ROWS * COLUMNS)
    i += pixel // COLUMNS % ROWS
    j += pixel % COLUMNS
    o += tl.arange(0, CHANNELS)
    if BIASED:
        bias = tl.load(bias_ptr + o, mask=o < OUT, other=0.0).to(tl.float32)
        total += tl.where(tl.program_id(2) == 0, bias, 0.0)[None, :]
    to = z_ptr + (b.to(tl.int64) * z_b + i * z_h + j * z_w)[:, None] + (o * z_c)[None, :]
    inside = ((b < B) & (i < OH) & (j < OW))[:, None] & (o < OUT)[None, :]
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


@lru_cache(1024)
def _tile(pixels: int, *sizes: int) -> tuple[int, ...]:
    """Images, rows and columns of a block of so many pixels: as few blocks as can be."""
    powers = [1 << n for n in range(pixels.bit_length())]
    tiles = [(pixels // (h * w), h, w) for h in powers for w in powers if h * w <= pixels]
    return min(tiles, key=lambda tile: (prod(map(triton.cdiv, sizes, tile)), tile))


def _operands(
    x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair, width: int, depth: int
) -> tuple[Tensor, Tensor, Pair, Pair]:
    """x [B, H / stride, W / stride, phase, C] and weight [O, taps, C], with the stride and padding
    that are left to do. A phase is how many pixels of x one is after those that a stride reaches.

    Where that saves steps, the taps of a row are channels of one: pixels of x overlap.
    """
    x, weight = x.permute(0, 2, 3, 1), weight.permute(0, 2, 3, 1)
    (C, KW), unit = (x.shape[3], weight.shape[2]), 16 // x.itemsize
    more = -C % (unit // gcd(unit, stride[1]))
    merged = dilation[1] == 1 and triton.cdiv(KW * (C + more), depth) < KW * triton.cdiv(C, depth)
    if merged or x.shape[1] % stride[0] or x.shape[2] % stride[1]:
        down, right = (-(x.shape[1 + n] + 2 * padding[n]) % stride[n] for n in (0, 1))
        ends = (padding[1], padding[1] + right, padding[0], padding[0] + down)
        x, padding = pad(x, (0, more * merged, *ends)), (0, 0)
    if merged:
        b, h, w, _ = x.stride()
        shape = (*x.shape[:2], width, KW * x.shape[3])
        x, stride = x.as_strided(shape, (b, h, stride[1] * w, 1)), (stride[0], 1)
        weight = pad(weight, (0, more)).flatten(2)
    else:
        weight = weight.flatten(1, 2)
        if not describable(x) or x.stride(1) % x.stride(2):
            x = aligned_like(x).copy_(x)
    (down, across), (b, h, w, _) = stride, x.stride()
    shape = (len(x), x.shape[1] // down, x.shape[2] // across, (down - 1) * (h // w) + across)
    x = x.as_strided((*shape, x.shape[3]), (b, down * h, across * w, w, 1))
    return x, aligned(weight), stride, padding


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
    if not z.numel():
        return z
    stride, padding, dilation = ((a, b) for a, b in (stride, padding, dilation))
    operands = _operands(x, weight, stride, padding, dilation, z.shape[3], config.depth)
    x, w, stride, padding = operands
    depth = min(config.depth, max(LEAST_DOT, triton.next_power_of_2(x.shape[4])))
    sizes = (len(z), *z.shape[2:])
    tile = (*_tile(config.pixels, *sizes), 1, depth)
    grid = (prod(map(triton.cdiv, sizes, tile)), triton.cdiv(z.shape[1], config.channels))
    splits = config.parts(gpu, grid[0] * grid[1], w.shape[1] * triton.cdiv(x.shape[4], depth))
    held = (grid[0] * grid[1], splits if splits > 1 else 0, config.pixels, config.channels)
    arguments = {
        "x": described(x, tile),
        "w": described(w, (config.channels, 1, depth)),
        "bias_ptr": z if bias is None else bias.contiguous(),
        "z_ptr": z,
        "parts_ptr": torch.empty(held, dtype=torch.float32, device=x.device),
        "met_ptr": counters(x.device, held[0]) if splits > 1 else z,
        "x_sizes": tuple(x.shape),
        "w_sizes": tuple(w.shape),
        "z_sizes": tuple(z.shape),
        "z_strides": z.stride(),
        "pitch": x.stride(1) // stride[0] // x.stride(3),
        "KW": weight.shape[3] if w.shape[1] == taps else 1,
        "TAPS": w.shape[1],
        "STRIDE": stride,
        "PAD": padding,
        "DILATION": dilation,
        "BIASED": bias is not None,
        "PRECISION": "tf32" if tf32 else "ieee",
        "TILE": tile,
        "CHANNELS": config.channels,
        "SPLITS": splits,
    }
    launch(conv2d_kernel, (*grid, splits), arguments, **config.options)
    return z
