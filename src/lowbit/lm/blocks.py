"""The blocks in which GGUF stores rows of weights, as integers with scales and zero points.

A block is a run of neighbours of a row, an element is scale · q + offset, and each of its groups
has a scale and an offset of its own. So a block type is a quantized matrix with groups, and becomes
one without rounding: the zero point is −offset / scale, a real number. Of 5 and 6 bits eight are
kept.

Source: ggml's ggml-common.h and ggml-quants.c.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from lowbit.numerics import QTensor, int_format
from lowbit.numerics.methods import QuantizedWeight

Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]
# Bytes [blocks, n] -> q uint8 [blocks, groups, size], scale and offset float32 [blocks, groups]
Parts = tuple[Array, Array, Array]


@dataclass(frozen=True)
class Block:
    """A type of blocks: its number in GGUF, how many elements and bytes a block has, the bits of an
    element, and what reads blocks; None: elements are of `dtype`. offsets: whether they are real
    numbers, so that a weight's zero points are rounded."""

    code: int
    elements: int
    bytes: int
    bits: int = 0
    parts: Callable[[Bytes], Parts] | None = None
    dtype: Any = None
    offsets: bool = False

    def rows(self, rows: Bytes) -> npt.NDArray[np.float32]:
        """The numbers that `weight` has of rows of blocks [N, bytes], or floats, float32 [N, K]."""
        if self.parts is None or not self.offsets:
            return self.numbers(rows)
        # As nearly always: each step of a text reads a row, of which no weight need be made. It is
        # checked by lists, since NumPy's reductions are code that nothing else of a step needs.
        q, scale, offset = self.parts(rows.reshape(-1, self.bytes))
        scales = scale.ravel().tolist()
        if not (min(scales) > 0 and math.isfinite(sum(scales) + sum(offset.ravel().tolist()))):
            return self.weight(rows).dequantize()
        less_zero = offset / scale
        if self.bits > 4:
            middle = np.float32(1 << self.bits - 1)
            q, less_zero = q - middle, less_zero + middle
        made = np.multiply(scale[..., None], q + less_zero[..., None], dtype=np.float32)
        return made.reshape(*rows.shape[:-1], -1)

    def numbers(self, rows: Bytes) -> npt.NDArray[np.float32]:
        """What rows of blocks stand for: float32 [..., K]."""
        if self.parts is None:
            return rows.view(self.dtype).astype(np.float32)
        q, scale, offset = self.parts(rows.reshape(-1, self.bytes))
        return (q * scale[..., None] + offset[..., None]).reshape(*rows.shape[:-1], -1)

    def weight(self, rows: Bytes) -> QuantizedWeight:
        """Rows [N, bytes] as a quantized weight [N, K], uint4 or int8, with groups along K.

        The same numbers, but for the rounding of the zero point to float32. ValueError: a scale or
        an offset is not finite, or elements are floats."""
        if self.parts is None:
            raise ValueError("rows of floats are not quantized")
        q, scale, offset = self.parts(rows.reshape(-1, self.bytes))
        if not (np.isfinite(scale).all() and np.isfinite(offset).all()):
            raise ValueError("a block has a scale or an offset that is not finite")
        if (flat := (scale == 0) & (offset != 0)).any():  # all elements are the offset
            q = np.where(flat[..., None], np.uint8(0), q)
            scale = np.where(flat, np.abs(offset), scale)
        zero = -offset / np.where(scale == 0, np.float32(1), scale)
        shape = (len(rows), -1)
        parts = q.reshape(shape), scale.reshape(shape), zero.reshape(shape)
        return as_weight(*parts, self.bits, q.shape[-1])


def as_weight(q: Array, scale: Array, zero: Array, bits: int, size: int) -> QuantizedWeight:
    """scale · (q − zero) as a quantized weight [N, K], uint4 or int8, in the same numbers.

    q: uint8 [N, K] of so many bits. scale, of any sign, and zero, integers or real: [N, groups],
    of `size` neighbours along K each; a single group of 8 bits becomes none. ValueError: a scale is
    not finite."""
    scale, zero = scale.astype(np.float32), zero.astype(np.float32)
    top = np.uint8((1 << bits) - 1)
    if (turned := scale < 0).any():  # scales are positive: count from the other end
        q = np.where(_spread(turned, q, size), top - q, q)
        zero, scale = np.where(turned, top - zero, zero), np.abs(scale)
    if (dead := scale == 0).any():  # all elements are 0
        q = np.where(_spread(dead, q, size), np.uint8(0), q)
        zero, scale = np.where(dead, np.float32(0), zero), np.where(dead, np.float32(1), scale)
    fmt = int_format("uint4" if bits <= 4 else "int8")
    if fmt.name == "int8":
        middle = 1 << bits - 1
        q, zero = (q - np.uint8(middle)).view(np.int8), zero - np.float32(middle)
    near = np.clip(np.rint(zero), fmt.qmin, fmt.qmax)
    exact = bool((zero == near).all())
    if fmt.name == "int8" and exact and scale.shape[1] == 1:
        return QuantizedWeight(QTensor(q, scale[:, 0], near[:, 0].astype(np.int32), fmt, 0))
    return QuantizedWeight.of(q, scale, near.astype(np.int32) if exact else zero, fmt, size)


def _spread(each: Array, q: Array, size: int) -> Array:
    """What groups have [N, groups], for each of their elements [N, K]."""
    return np.repeat(each, size, 1)[:, : q.shape[1]]


def _half(data: Bytes, at: int) -> Array:
    """The float16 at a place of each block, as float32 [blocks, 1]."""
    return data.view(np.float16)[:, at // 2, None].astype(np.float32)


def _nibbles(data: Bytes) -> Array:
    """Low halves of bytes, then high ones."""
    return np.concatenate([data & 15, data >> 4], -1)


def _q4_0(b: Bytes) -> Parts:
    scale = _half(b, 0)
    return _nibbles(b[:, None, 2:]), scale, -8 * scale


def _q4_1(b: Bytes) -> Parts:
    return _nibbles(b[:, None, 4:]), _half(b, 0), _half(b, 2)


def _fifth(data: Bytes, bits: Bytes) -> Array:
    """Nibbles with a fifth bit from a field of 32."""
    high = np.unpackbits(bits, -1, bitorder="little") << 4
    return (_nibbles(data) | high)[:, None]


def _q5_0(b: Bytes) -> Parts:
    scale = _half(b, 0)
    return _fifth(b[:, 6:], b[:, 2:6]), scale, -16 * scale


def _q5_1(b: Bytes) -> Parts:
    return _fifth(b[:, 8:], b[:, 4:8]), _half(b, 0), _half(b, 2)


def _q8_0(b: Bytes) -> Parts:
    scale = _half(b, 0)
    return b[:, None, 2:] + np.uint8(128), scale, -128 * scale


def _six_bits(b: Bytes) -> tuple[Array, Array]:
    """Eight scales and eight offsets of 6 bits, [blocks, 8], of 12 bytes."""
    low, mid, high = b[:, :4], b[:, 4:8], b[:, 8:]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], -1)
    offsets = np.concatenate([mid & 63, high >> 4 | (mid >> 6) << 4], -1)
    return scales.astype(np.float32), offsets.astype(np.float32)


def _q4_k(b: Bytes) -> Parts:
    scales, offsets = _six_bits(b[:, 4:16])
    q = np.stack([b[:, 16:].reshape(-1, 4, 32) & 15, b[:, 16:].reshape(-1, 4, 32) >> 4], 2)
    return q.reshape(-1, 8, 32), _half(b, 0) * scales, -_half(b, 2) * offsets


def _q5_k(b: Bytes) -> Parts:
    q, scale, offset = _q4_k(np.concatenate([b[:, :16], b[:, 48:]], -1))
    high = b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return q | high << 4, scale, offset


def _q6_k(b: Bytes) -> Parts:
    low, high = b[:, :128].reshape(-1, 2, 2, 32), b[:, 128:192].reshape(-1, 2, 1, 32)
    low = np.stack([low & 15, low >> 4], 2)  # [blocks, 2, nibble, half, 32]
    shift = np.arange(0, 8, 2, dtype=np.uint8).reshape(4, 1)
    q = low.reshape(-1, 2, 4, 32) | (high >> shift & 3) << 4
    scale = _half(b, 208) * b[:, 192:208].view(np.int8)
    return q.reshape(-1, 16, 16), scale, -32 * scale


BLOCKS = {
    "F32": Block(0, 1, 4, dtype=np.dtype("<f4")),
    "F16": Block(1, 1, 2, dtype=np.dtype("<f2")),
    "BF16": Block(30, 1, 2, dtype=ml_dtypes.bfloat16),
    "Q4_0": Block(2, 32, 18, 4, _q4_0),
    "Q4_1": Block(3, 32, 20, 4, _q4_1, offsets=True),
    "Q5_0": Block(6, 32, 22, 5, _q5_0),
    "Q5_1": Block(7, 32, 24, 5, _q5_1, offsets=True),
    "Q8_0": Block(8, 32, 34, 8, _q8_0),
    "Q4_K": Block(12, 256, 144, 4, _q4_k, offsets=True),
    "Q5_K": Block(13, 256, 176, 5, _q5_k, offsets=True),
    "Q6_K": Block(14, 256, 210, 6, _q6_k),
}
"""By GGUF's names."""
