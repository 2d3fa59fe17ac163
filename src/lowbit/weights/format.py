"""What a weight is quantized to, and how a file holds its numbers, in plain rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit.numerics import Range, int_format, pack_nibbles, unpack_nibbles
from lowbit.numerics.methods import Activations, Method, QuantizedWeight, methods
from lowbit.weights.quantize import quantize

Array = npt.NDArray[Any]
Shape = tuple[int, int]

_ZERO_STEPS = 1 << 18  # real zero points, below 64, are multiples of its inverse


class WeightFormat(NamedTuple):
    """What a weight [out, in] is quantized to, and how.

    - dtype: "int8" or "int4", without zero points, or "uint4", with one for each scale.
    - group_size: of 4-bit integers, how many neighbours along `in` share a scale, a multiple of 8;
      the last group may be shorter. None: a whole output channel.
    - range: what scales and zero points are chosen from, see `lowbit.quantize`.
    - method: how numbers are rounded, by its name in `lowbit.numerics.methods`.
    """

    dtype: str
    group_size: int | None = None
    range: Range = "minmax"
    method: str = "nearest"

    @property
    def layout(self) -> tuple[Any, ...]:
        """What decides how a weight is held. Where it is the same, weights can be exchanged."""
        kind = self._method
        return self.dtype, self.group_size, kind.real_zero_points, kind.scales_inputs

    @property
    def _method(self) -> type[Method]:
        return methods.get(self.method)

    @property
    def needs_activations(self) -> bool:
        """Whether `quantize` has to know the layer's inputs."""
        return self._method.needs_activations

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
        parts = ("values", "scale", "zero_point") if self.zero_points else ("values", "scale")
        return (*parts, "input_scale") if self._method.scales_inputs else parts

    def group_of(self, in_features: int) -> int | None:
        """How many inputs share a scale; None for 8-bit integers, which are not in groups."""
        if not self.four_bits:
            return None
        return in_features if self.group_size is None else min(self.group_size, in_features)

    def quantize(self, weight: Array, activations: Activations | None = None) -> QuantizedWeight:
        """A float weight [out, in], quantized; activations: its inputs, where they are needed.

        ValueError names the first NaN or infinity, or says that activations are missing."""
        how: dict[str, Any] = {
            "group_size": self.group_of(weight.shape[1]),
            "symmetric": not self.zero_points,
            "range": self.range,
        }
        if self.method == "nearest":  # without a copy in float64
            return QuantizedWeight(quantize(weight, int_format(self.dtype), axis=0, **how))
        made = self._method(dtype=self.dtype, **how).quantize(weight, activations)
        zeros, factors = made.zero_point, made.input_scale
        if zeros is not None:  # so that they are the same less 8, as kernels have them
            zeros = (np.rint(zeros * _ZERO_STEPS) / _ZERO_STEPS).astype(np.float32)
        if factors is None and self._method.scales_inputs:
            factors = np.ones(weight.shape[1], np.float32)
        return QuantizedWeight(made.weight, zeros, factors)

    def stored(self, shape: Shape) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The arrays in which a file holds a weight of `shape`, by name: dtype and shape.

        "values": int8 [out, in], or uint8 [out, ceil(in / 2)] with the first of two in the low
        half; "scale": float32 [out] or [out, groups]; "zero_point": uint8 [out, groups], float32
        where they are real; "input_scale": float32 [in], by which inputs are to be divided.
        """
        rows, depth = shape
        group = self.group_of(depth)
        each = (rows,) if group is None else (rows, -(-depth // group))
        described: dict[str, tuple[str, tuple[int, ...]]] = {
            "values": ("uint8", (rows, -(-depth // 2))) if self.four_bits else ("int8", shape),
            "scale": ("float32", each),
            "zero_point": ("float32" if self._method.real_zero_points else "uint8", each),
            "input_scale": ("float32", (depth,)),
        }
        return {name: described[name] for name in self.parts}

    def to_stored(self, weight: QuantizedWeight) -> dict[str, Array]:
        """What `stored` describes, of a weight [out, in] of this format."""
        q, zeros = weight.weight, weight.zero_point
        arrays = {
            "values": pack_nibbles(q.values) if self.four_bits else np.ascontiguousarray(q.values),
            "scale": np.ascontiguousarray(q.scale),
            "zero_point": q.zero_point.astype(np.uint8, order="C") if zeros is None else zeros,
            "input_scale": weight.input_scale,
        }
        return {name: np.ascontiguousarray(arrays[name]) for name in self.parts}

    def from_stored(self, arrays: Mapping[str, Array], shape: Shape) -> QuantizedWeight:
        """The inverse of `to_stored`. ValueError for zero points above 15."""
        values, scale = arrays["values"], arrays["scale"]
        if self.four_bits:
            values = unpack_nibbles(values, shape[1], self.dtype)
        fmt = int_format(self.dtype)
        zeros = arrays.get("zero_point", np.zeros(scale.shape, np.uint8))
        size, factors = self.group_of(shape[1]), arrays.get("input_scale")
        return QuantizedWeight.of(values, scale, zeros, fmt, size, factors)

    def cut(
        self, arrays: Mapping[str, Any], shape: Shape, axis: int, start: int, stop: int
    ) -> dict[str, Any]:
        """What `stored` describes, arrays or tensors, of some rows (axis 0) or columns (1) of a
        weight of `shape`: views. ValueError: columns begin or end within a group or a byte."""
        if axis == 0:
            whole = "input_scale"  # which rows share
            return {name: a if name == whole else a[start:stop] for name, a in arrays.items()}
        depth = shape[1]
        group, unit = self.group_of(depth) or depth, 2 if self.four_bits else 1
        step = group if group < depth else unit
        for end in (start, stop):
            if end % step and end != depth:
                raise ValueError(
                    f"columns {start} to {stop} of {depth} do not end where "
                    f"{'groups' if group < depth else 'bytes'} of {step} do"
                )
        columns = slice(start // unit, -(-stop // unit))
        groups = slice(start // group, -(-stop // group)) if group < depth else slice(None)
        taken = {"values": columns, "input_scale": slice(start, stop)}
        return {
            name: a if a.ndim == 1 and name == "scale" else a[..., taken.get(name, groups)]
            for name, a in arrays.items()
        }

    def __str__(self) -> str:
        how = f", {self.method}" if self.method != "nearest" else ""
        if not self.four_bits:
            return f"int8, one scale per row{how}"
        group = f"{self.group_size} of a row" if self.group_size else "row"
        each = f"one scale{' and zero point' * self.zero_points} per {group}"
        return f"{self.dtype}, {each}, range {self.range}{how}"


INT8 = WeightFormat("int8")
