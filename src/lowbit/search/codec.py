"""From vectors as users give them to vectors as an index keeps them, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from ml_dtypes import bfloat16

from lowbit.numerics import IntFormat, Range, int_format
from lowbit.numerics.float32 import float32_array
from lowbit.numerics.formats import first_index
from lowbit.product.arguments import array
from lowbit.search.frame import Doubles, Frame, weights
from lowbit.search.groups import Floats
from lowbit.search.storage import Coded, Part
from lowbit.weights.quantize import quantize_into

Bits = Literal[8, 4]
Scale = Literal["vector", "dimension"]
Metric = Literal["dot", "cosine", "l2"]
FORMATS = {8: "int8", 4: "int4"}
# Of sixteen steps each counts; 8 bits would gain nothing for the time.
_RANGES: Mapping[int, Range] = {8: "minmax", 4: "mse"}
_CHUNK = 1 << 16  # vectors that are looked at together
_BLOCK = 1 << 12  # vectors that are coded together: what that takes stays in the caches
_TRAINED = 1 << 16  # vectors that a frame is made of, at most
_LARGEST = float(np.finfo(np.float32).max)
_FLOAT32 = np.dtype(np.float32)
_FLOATS = tuple(map(np.dtype, (np.float32, np.float64, np.float16, bfloat16)))


@dataclass(frozen=True)
class Codec:
    """How vectors become integers and scales; see `VectorIndex`."""

    dim: int
    bits: int
    scale: str
    metric: str

    @property
    def format(self) -> IntFormat:
        return int_format(FORMATS[self.bits])

    @property
    def code_length(self) -> float:
        """No vector of integers is longer."""
        return 2.0 ** (self.bits - 1) * math.sqrt(self.dim)

    def shaped(self, given: Any, name: str) -> Floats:
        """A float32 matrix [n, dim]: of arrays or lists of floats, [n, dim], or [dim] for one."""
        source = floats(given, name)
        if source.ndim == 1:
            source = source[None]
        if source.ndim != 2 or source.shape[1] != self.dim:
            raise ValueError(
                f"{name} have shape {source.shape}, and the index holds vectors of {self.dim}: "
                f"expected [n, {self.dim}], or [{self.dim}] for one"
            )
        return source

    def checked(self, given: Any, name: str) -> Floats:
        """The same, of finite numbers."""
        source = self.shaped(given, name)
        check_finite(source, name)
        return source

    def normalized(self, source: Floats) -> Floats:
        """Vectors [n, dim] of length 1 for cosines, or 0; themselves for other metrics."""
        if self.metric != "cosine":
            return source
        wide = source.astype(np.float64)
        length = np.sqrt(np.einsum("nd,nd->n", wide, wide))
        return (wide / np.where(length > 0, length, 1)[:, None]).astype(np.float32)

    def trained(self, parts: Sequence[Floats]) -> Frame:
        """The frame that suits the vectors of these parts, finite, at least one. Of more than
        65,536, some that lie evenly among them are looked at."""
        step = -(-sum(map(len, parts)) // _TRAINED)
        sample = self.normalized(np.concatenate([part[::step] for part in parts]))
        wide = sample.astype(np.float64)
        centre = wide.mean(axis=0).astype(np.float32)
        weight = weights(wide - centre) if self.scale == "dimension" else None
        frame = Frame(centre, weight)
        codes, scale = self._integers(frame.left(sample))
        return Frame(centre, weight, float((scale * codes.any(axis=1)).max()))

    def _integers(self, left: Floats) -> tuple[npt.NDArray[np.int8], Floats]:
        """Integers [n, dim] and a scale each, of numbers [n, dim] without centre and weights.
        ValueError: not finite."""
        codes = np.empty(left.shape, np.int8)
        scale = np.empty(len(left), np.float32)
        zero = np.empty(len(left), np.int32)
        if not quantize_into(left, codes, scale, zero, self.format, True, _RANGES[self.bits]):
            raise ValueError(
                "vectors less their mean, over the scales of dimensions, are beyond float32; "
                "scale the vectors down"
            )
        return codes, scale

    def coded(self, source: Floats, frame: Frame, first: int = 0) -> Coded:
        """Vectors that are not empty, as they are stored. ValueError names the first NaN or
        infinity, in a row whose number counts from `first`."""
        starts = range(0, len(source), _BLOCK)
        try:
            blocks = [self._block(source[start : start + _BLOCK], frame) for start in starts]
        except ValueError:
            check_finite(source, "vectors", first)
            raise
        return Coded.joined(blocks)

    def _block(self, source: Floats, frame: Frame) -> Coded:
        left = frame.left(np.ascontiguousarray(self.normalized(source)))
        codes, coarse = self._integers(left)
        # With u the vector less the centre and x its integers times the weights, the scale is
        # |u|² / u·x. What is lost of u is then orthogonal to u.
        rest = frame.weighted(left)
        squares = _dots(rest, rest)
        along = _dots(frame.weighted(rest), codes.astype(np.float32))
        scale = np.where(along > 0, squares / np.where(along > 0, along, 1), 0)
        bias = -squares / 2 if self.metric == "l2" else _along(rest, frame.centre)
        largest = max(float(scale.max()), float(np.abs(bias).max()))
        if not largest <= _LARGEST:
            raise ValueError(
                f"a vector has a squared length of {float(squares.max()):.4g} beside the mean, "
                "which is beyond float32; scale the vectors down"
            )
        rounded = np.where(along > 0, coarse, 0).astype(np.float32)
        return Coded(codes, scale.astype(np.float32), bias.astype(np.float32), coarse=rounded)

    def decoded(self, part: Part, frame: Frame | None) -> Floats:
        """The vectors of a part, float32 [n, dim]."""
        assert frame is not None
        scale = part.arrays.scale[: part.count, None]
        return frame.weighted(part.chunk.matrix.unpack().T * scale) + frame.centre


def _along(rows: Floats, direction: Floats) -> Doubles:
    """The inner product of each row, [n, dim], and a direction, [dim]."""
    return np.einsum("nd,d->n", rows.astype(np.float64), direction.astype(np.float64))


def _dots(a: Floats, b: Floats) -> Doubles:
    """The inner product of each row of a and that of b, both [n, dim]."""
    with np.errstate(over="ignore", invalid="ignore"):
        sums = np.einsum("nd,nd->n", a, b).astype(np.float64)
    if np.isfinite(sums).all():
        return sums
    return np.einsum("nd,nd->n", a.astype(np.float64), b.astype(np.float64))


def floats(given: Any, name: str) -> Floats:
    """float32 of floats, in an array, a tensor or lists. TypeError: something else. ValueError:
    beyond float32."""
    if isinstance(given, list | tuple):
        try:
            given = np.asarray(given, np.float64)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name} must be numbers in lists of one length: {error}") from None
    source = array(given, name)
    if source.dtype == _FLOAT32:
        return source
    if source.dtype not in _FLOATS:
        raise TypeError(
            f"{name} must be of float32, float64, float16 or bfloat16, got {source.dtype}; convert "
            "them with astype"
        )
    return float32_array(source, name)


def check_finite(source: Floats, name: str, first: int = 0) -> None:
    """ValueError naming the first NaN or infinity in rows whose numbers count from `first`."""
    for start in range(0, len(source), _CHUNK):
        check_rows(source[start : start + _CHUNK], range(first + start, first + len(source)), name,
                   "remove or replace NaN and infinity")  # fmt: skip


def check_rows(source: Floats, numbers: Any, name: str, hint: str) -> None:
    """ValueError naming the first NaN or infinity in rows of these numbers."""
    bad = ~np.isfinite(source)
    if bad.any():
        row, column = first_index(bad)
        raise ValueError(f"{name}[{numbers[row]}, {column}] is {source[row, column]}; {hint}")
