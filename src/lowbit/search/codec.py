"""From vectors as users give them to vectors as an index keeps them, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from ml_dtypes import bfloat16

from lowbit.numerics import IntFormat, Range, int_format
from lowbit.numerics.float32 import float32_array
from lowbit.numerics.formats import first_index
from lowbit.product.arguments import array
from lowbit.search.groups import Floats
from lowbit.search.storage import Coded, Part
from lowbit.weights.quantize import quantize, quantize_into

Bits = Literal[8, 4]
Scale = Literal["vector", "dimension"]
Metric = Literal["dot", "cosine", "l2"]
FORMATS = {8: "int8", 4: "int4"}
# Of sixteen steps each counts; 8 bits would gain nothing for the time.
_RANGES: Mapping[int, Range] = {8: "minmax", 4: "mse"}
_CHUNK = 1 << 16  # vectors that are looked at together
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

    def trained(self, given: Floats) -> Floats:
        """The scales of dimensions that suit these vectors."""
        return quantize(given, self.format, axis=1, range=_RANGES[self.bits]).scale

    def coded(self, source: Floats, dimension_scale: Floats | None, first: int = 0) -> Coded:
        """Vectors that are not empty, as they are stored. ValueError names the first NaN or
        infinity, in a row whose number counts from `first`."""
        if self.metric == "cosine" or dimension_scale is not None:
            check_finite(source, "vectors", first)
        vectors = np.ascontiguousarray(self.normalized(source))
        if dimension_scale is None:
            codes, scale = np.empty(vectors.shape, np.int8), np.empty(len(vectors), np.float32)
            zero = np.empty(len(vectors), np.int32)
            finite = quantize_into(vectors, codes, scale, zero, self.format, True,
                                   _RANGES[self.bits])  # fmt: skip
            if not finite:
                check_finite(source, "vectors", first)
        else:
            most = 2 ** (self.bits - 1) - 1
            with np.errstate(over="ignore"):  # clamped below
                steps = np.rint(vectors / dimension_scale)
            codes = np.clip(steps, -most, most).astype(np.int8)
            scale = np.ones(len(vectors), np.float32)
        bias = None if self.metric != "l2" else self._bias(codes, scale, dimension_scale)
        return Coded(codes, scale, bias)

    def _bias(
        self, codes: npt.NDArray[np.int8], scale: Floats, dimension_scale: Floats | None
    ) -> Floats:
        """−|v|²/2 of vectors as they are stored."""
        if dimension_scale is None:
            # Sums of squares below 2^24 are exact in float32, in any order.
            exact = self.dim << 2 * (self.bits - 1) < 1 << 24
            wide = codes.astype(np.float32 if exact else np.float64)
        else:
            wide = codes * dimension_scale.astype(np.float64)
        squares = np.einsum("nd,nd->n", wide, wide).astype(np.float64)
        half = squares * scale.astype(np.float64) ** 2 / 2
        largest = float(half.max(initial=0))
        if largest > float(np.finfo(np.float32).max):
            raise ValueError(
                f"a squared length of {2 * largest:.4g} is beyond float32; scale the vectors down"
            )
        return (-half).astype(np.float32)

    def decoded(self, part: Part, dimension_scale: Floats | None) -> Floats:
        """The vectors of a part, float32 [n, dim]."""
        scale = part.arrays.scale[: part.count, None]
        if dimension_scale is not None:
            scale = scale * dimension_scale
        return part.chunk.matrix.unpack().T * scale


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
