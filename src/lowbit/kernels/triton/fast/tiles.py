"""How weights of 4 and 8 bits [N, K] lie in memory for GPUs: as matrix units take them.

A unit is 16 rows by 64 k: 32 threads of 16 bytes, of which thread 4·g + t has, in word c, rows g
and g + 8 of k = 16·c + 8·h + 2·t + p (PTX ISA, "Matrix fragments for mma.m16n8k16", operand A):

    word c:  | p=1 h=1: row g+8, row g | p=1 h=0 | p=0 h=1 | p=0 h=0: row g+8, row g |   8 nibbles

so that no value changes its thread, for any number of rows of x. Integers of 8 bits are two such
units, of their high and of their low nibbles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

TILE_ROWS, TILE_DEPTH = 64, 128  # that a weight is filled up to multiples of
GROUP_UNIT = 32  # k, of which a group is a multiple
MIDDLE = {4: 8, 8: 128}
"""By bits: what is added to signed integers; zero points are relative to it."""

_UNIT = (2, 8), (4, 2, 4, 2)  # (row half, g), (c, h, t, p)
_TO_TILES, _TO_VALUES = (0, 3, 2, 6, 4, 7, 5, 1), (0, 7, 2, 1, 4, 6, 3, 5)


def to_tiles(values: Tensor, bits: int) -> Tensor:
    """uint8 [64·a, 128·b], below 2^bits, as int32 [4·a, 2·b, bits // 4, 32, 4], on any device."""
    (rows, depth), (low, deep) = values.shape, _UNIT
    ordered = values.reshape(rows // 16, *low, depth // 64, *deep).permute(_TO_TILES)
    pairs = ordered.reshape(rows // 16, depth // 64, 32, 16, 2)
    planes = [pairs >> shift & 15 for shift in range(bits - 4, -4, -4)]
    held = torch.stack([one[..., 0] | one[..., 1] << 4 for one in planes], 2)
    return held.contiguous().view(torch.int32)


def to_values(tiles: Tensor) -> Tensor:
    """What `to_tiles` was given."""
    tall, deep, planes = tiles.shape[:3]
    held = tiles.contiguous().view(torch.uint8)
    pairs = torch.stack([held & 15, held >> 4], -1)
    value = pairs[:, :, 0]
    for plane in range(1, planes):
        value = value << 4 | pairs[:, :, plane]
    ordered = value.reshape(tall, deep, 8, 4, 4, 2, 2, 2).permute(_TO_VALUES)
    return ordered.reshape(tall * 16, deep * 64)


def words_unit(group_size: int) -> int:
    """How many k share a word of `to_words`: a divisor of 128, or a multiple."""
    return group_size if group_size % TILE_DEPTH == 0 else gcd(group_size, TILE_DEPTH)


def to_words(scale: Tensor, zero: Tensor | None, middle: int, K: int, group_size: int) -> Tensor:
    """Scale and zero point of each group in a word, int32 [ceil(K / unit), N].

    scale: [N, groups]; zero: likewise, relative to `middle`, or None. Integers: the scale is the
    upper 24 bits of a float32, rounded to nearest even, and the zero point, `middle` added, a byte
    (0 for 8 bits). Real zero points: the scale is a bfloat16, the lower half, and so is the zero
    point, the upper.
    """
    if zero is not None and zero.is_floating_point():
        low, high = (one.bfloat16().view(torch.int16).int() for one in (scale, zero))
        words = (low & 0xFFFF) | high << 16
    else:
        bits = scale.float().contiguous().view(torch.int32)
        words = (bits + (0x7F + (bits >> 8 & 1))) & ~0xFF
        words |= middle % 128 if zero is None else zero.int() + middle
    unit = words_unit(group_size)
    units = -(-K // TILE_DEPTH) * (TILE_DEPTH // unit) or -(-K // unit)
    at = torch.arange(units, device=words.device) * unit
    groups = (at // group_size).clamp(max=words.shape[1] - 1)
    return words[:, groups].T.contiguous()


@dataclass(frozen=True)
class TiledWeight:
    """A weight [N, K] in tiles: int32 [4·ceil(N / 64), 2·ceil(K / 128), bits // 4, 32, 4]; or those
    of several experts, one after another.

    words: as `to_words` makes them. scale: floats [N rounded up to 64, groups]; zero: likewise,
    relative to the middle, int8 or floats, or None where all of them are 0. group_size: the k that
    share a scale. bits: 4 or 8.
    """

    tiles: Tensor
    words: Tensor
    scale: Tensor
    zero: Tensor | None
    N: int
    K: int
    group_size: int
    bits: int

    @classmethod
    def of(
        cls, values: Tensor, scale: Tensor, zero: Tensor | None, group_size: int, bits: int
    ) -> TiledWeight:
        """Of values uint8 [N, K], below 2^bits; scale and zero [N, groups], zero as here; or of all
        with a dimension of experts before them."""
        N, K = values.shape[-2:]
        below, beside = -N % TILE_ROWS, -K % TILE_DEPTH

        def filled(x: Tensor) -> Tensor:
            return pad(x, (0, 0, 0, below)).flatten(0, -2).contiguous()

        scale, zero = filled(scale), None if zero is None else filled(zero)
        experts = values if values.dim() == 3 else values[None]
        tiles = [to_tiles(pad(one, (0, beside, 0, below)), bits) for one in experts]
        return cls(
            tiles[0] if len(tiles) == 1 else torch.cat(tiles),
            to_words(scale, zero, MIDDLE[bits], K, group_size),
            scale, zero, N, K, group_size, bits,
        )  # fmt: skip

    @property
    def experts(self) -> int:
        """How many matrices [N, K] it holds."""
        return len(self.scale) // max(self.N + -self.N % TILE_ROWS, 1)

    def expert(self, index: int) -> TiledWeight:
        """One of the matrices, by itself."""
        rows = len(self.scale) // self.experts
        own = slice(index * rows, (index + 1) * rows)
        zero = None if self.zero is None else self.zero[own]
        tiles, words = self.tiles[own.start // 16 : own.stop // 16], self.words[:, own].contiguous()
        return replace(self, tiles=tiles, words=words, scale=self.scale[own], zero=zero)

    def dequantized(self) -> Tensor:
        """float64 [N, K], of one matrix, by plain PyTorch."""
        q = to_values(self.tiles)[: self.N, : self.K].double() - MIDDLE[self.bits]
        group = torch.arange(self.K, device=q.device) // self.group_size
        if self.zero is not None:
            q = q - self.zero.double()[: self.N, group]
        return q * self.scale.double()[: self.N, group]


# What follows a product.


class Extra(NamedTuple):
    """What follows a product: activation(product + bias) + residual. activation: of `ACTIVATIONS`,
    or of `GATES`, by which rows of weights become half as many columns."""

    bias: Tensor | None = None
    residual: Tensor | None = None
    activation: str = ""

    def to(self, dtype: torch.dtype) -> Extra:
        """The same, its tensors in a dtype."""
        bias, residual = (None if one is None else one.to(dtype) for one in self[:2])
        return Extra(bias, residual, self.activation)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
}


GATES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}
"""Gated units and their functions."""

_FUNCTIONS = ACTIVATIONS | {"gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh")}


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """The rows of a gated unit's two weights [N, ...], or of what belongs to them, by eights:
    [2 N, ...], so that a unit's threads hold both. ValueError: N isn't a multiple of 8."""
    if gate.shape != up.shape or len(gate) % 8:
        raise ValueError(
            f"interleaved: gate has the shape {list(gate.shape)} and up {list(up.shape)}; they "
            "must be alike, with rows that are a multiple of 8"
        )
    return torch.stack([one.unflatten(0, (-1, 8)) for one in (gate, up)], 1).flatten(0, 2)


def columns_of(N: int, activation: str) -> int:
    """How many columns a product with N rows of a weight has."""
    return N // 2 if activation in GATES else N


def finished(z: Tensor, extra: Extra) -> Tensor:
    """What follows a product, by PyTorch."""
    if extra.bias is not None:
        z = z + extra.bias.to(z.dtype)
    if extra.activation in GATES:
        a, b = z.unflatten(-1, (-1, 2, 8)).unbind(-2)
        z = (_FUNCTIONS[GATES[extra.activation]](a) * b).flatten(-2)
    else:
        z = ACTIVATIONS[extra.activation](z)
    return z if extra.residual is None else z + extra.residual


def by_expert(x: Tensor, ends: Tensor, N: int, weight_of: Callable[[int], Tensor]) -> Tensor:
    """x [M, K] by the weight [N, K] of each row's expert, one expert after another.

    While a CUDA graph is recorded, which cannot wait for `ends`, all rows by each weight, of which
    those of its own are taken."""
    z = x.new_zeros(len(x), N)
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        of = torch.searchsorted(ends, torch.arange(len(x), device=x.device), right=True)
        for index in range(len(ends)):
            z = torch.where(of[:, None] == index, x @ weight_of(index).T, z)
        return z
    for index, (begin, end) in enumerate(pairwise([0, *ends.tolist()])):
        if begin < end:
            z[begin:end] = x[begin:end] @ weight_of(index).T
    return z


def by_torch(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, x_zero: Tensor | None, extra: Extra,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The product of 8-bit rows [M, K] and [N, K] with their scales, computed in a dtype."""
    wide, right = x.to(dtype), w.to(dtype)
    if x_zero is not None:
        wide = wide - x_zero.to(dtype)[:, None]
    scales = [one.to(dtype) for one in (x_scale, w_scale)]
    if w_scale.dim() == 2:  # of blocks of 128
        (N, K) = w.shape
        wide = wide * scales[0].repeat_interleave(128, 1)[:, :K]
        wide_scale = scales[1].repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)
        z = wide @ (right * wide_scale[:, :K]).T
    else:
        z = (wide @ right.T) * (scales[0][:, None] * scales[1])
    return finished(z, extra.to(dtype))
