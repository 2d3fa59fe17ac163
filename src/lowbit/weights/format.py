"""What a weight is quantized to, and how a file holds its numbers, in plain rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit.numerics import QTensor, Range, int_format, pack_nibbles, quantize, unpack_nibbles

Array = npt.NDArray[Any]
Shape = tuple[int, int]


class WeightFormat(NamedTuple):
    """What a weight [out, in] is quantized to, and how.

    - dtype: "int8" or "int4", without zero points, or "uint4", with one for each scale.
    - group_size: of 4-bit integers, how many neighbours along `in` share a scale, a multiple of 8;
      the last group may be shorter. None: a whole output channel.
    - range: what scales and zero points are chosen from, see `lowbit.quantize`.
    """

    dtype: str
    group_size: int | None = None
    range: Range = "minmax"

    @property
    def layout(self) -> tuple[str, int | None]:
        """What decides how a weight is held. Where it is the same, weights can be exchanged."""
        return self.dtype, self.group_size

    @property
    def four_bits(self) -> bool:
        """Whether two of the integers are in a byte."""
        return self.dtype != "int8"

    @property
    def zero_points(self) -> bool:
        """Whether the integers have zero points."""
        return self.dtype == "uint4"

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the arrays in which a file holds such a weight; see `stored`."""
        return ("values", "scale", "zero_point") if self.zero_points else ("values", "scale")

    def group_of(self, in_features: int) -> int | None:
        """How many inputs share a scale; None for 8-bit integers, which are not in groups."""
        if not self.four_bits:
            return None
        return in_features if self.group_size is None else min(self.group_size, in_features)

    def quantize(self, weight: Array) -> QTensor:
        """A float weight [out, in], quantized. ValueError names the first NaN or infinity."""
        return quantize(
            weight,
            self.dtype,
            axis=0,
            group_size=self.group_of(weight.shape[1]),
            symmetric=not self.zero_points,
            range=self.range,
        )

    def stored(self, shape: Shape) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The arrays in which a file holds a weight of `shape`, by name: dtype and shape.

        "values": int8 [out, in], or uint8 [out, ceil(in / 2)] with the first of two in the low
        half; "scale": float32 [out] or [out, groups]; "zero_point": uint8 [out, groups].
        """
        rows, depth = shape
        group = self.group_of(depth)
        if group is None:
            return {"values": ("int8", shape), "scale": ("float32", (rows,))}
        each = rows, -(-depth // group)
        described = {
            "values": ("uint8", (rows, -(-depth // 2))),
            "scale": ("float32", each),
            "zero_point": ("uint8", each),
        }
        return {name: described[name] for name in self.parts}

    def to_stored(self, q: QTensor) -> dict[str, Array]:
        """What `stored` describes, of a weight [out, in] of this format."""
        values = pack_nibbles(q.values) if self.four_bits else np.ascontiguousarray(q.values)
        arrays = {"values": values, "scale": np.ascontiguousarray(q.scale)}
        if self.zero_points:
            arrays["zero_point"] = q.zero_point.astype(np.uint8, order="C")
        return arrays

    def from_stored(self, arrays: Mapping[str, Array], shape: Shape) -> QTensor:
        """The inverse of `to_stored`. ValueError for zero points above 15."""
        values, scale = arrays["values"], arrays["scale"]
        if self.four_bits:
            values = unpack_nibbles(values, shape[1], self.dtype)
        zeros = arrays.get("zero_point", np.zeros(scale.shape, np.uint8)).astype(np.int32)
        fmt = int_format(self.dtype)
        return QTensor(values, scale, zeros, fmt, 0, self.group_of(shape[1]))

    def __str__(self) -> str:
        if not self.four_bits:
            return "int8, one scale per row"
        group = f"{self.group_size} of a row" if self.group_size else "row"
        each = f"one scale{' and zero point' * self.zero_points} per {group}"
        return f"{self.dtype}, {each}, range {self.range}"


INT8 = WeightFormat("int8")
