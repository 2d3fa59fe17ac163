"""Weights of layers in panels, as the CPU's kernels take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.numerics import int_format, longest_sum
from lowbit.numerics.methods import QuantizedWeight
from lowbit.weights.format import Shape, WeightFormat
from lowbit.weights.panels import PackedMatrix, by_groups, group_refusal, one_group, pack

Array = npt.NDArray[Any]


class Panels:
    """Weights [out, in] as the CPU's kernels take them: the arrays of a PackedMatrix [in, out]."""

    parts = ("panels", "column_sums", "scale", "zero_points")

    def refusal(self, format: WeightFormat, in_features: int) -> str | None:
        """Why a weight of this format cannot be packed so; None if it can."""
        size = format.group_of(in_features)
        if size is not None and size < in_features and (refusal := group_refusal(size)):
            return refusal
        summed = size or in_features
        if size is None:
            most, instead = longest_sum("uint8", "int8", shifted=(True, False)), ""
        else:
            most, instead = longest_sum("int8", "uint4"), "; use groups"
        if summed > most:
            return (
                f"a sum over {summed} inputs could overflow int32; at most {most} cannot{instead}"
            )
        return None

    def group_size(self, format: WeightFormat, in_features: int) -> int:
        """How many k share a scale, 0 without groups: of one group, as many as the panels have."""
        size = format.group_of(in_features) or 0
        return size if size < in_features else one_group(in_features)

    def pack(self, weight: QuantizedWeight) -> dict[str, Array]:
        """The arrays of a weight, by name."""
        zeros = weight.zero_point
        packed = pack(weight.weight.T, zero_point=None if zeros is None else zeros.T)
        arrays = {name: getattr(packed, name) for name in self.parts}
        if packed.dtype == "uint4" and packed.zero_points is None:  # all of them in the middle
            arrays["zero_points"] = np.zeros(arrays["scale"].shape, np.int8)
        return {name: array for name, array in arrays.items() if array is not None}

    def unpack(
        self, arrays: Mapping[str, Array], format: WeightFormat, shape: Shape
    ) -> QuantizedWeight:
        """What `pack` was given."""
        out_features, in_features = shape
        size = self.group_size(format, in_features) or None
        sizes: dict[str, Any] = {"K": in_features, "N": out_features, "group_size": size}
        arrays, real = dict(arrays), None
        zeros = arrays.get("zero_points")
        if zeros is not None and size is not None and zeros.dtype.kind == "f":
            fmt = int_format(format.dtype)
            real = by_groups(zeros, in_features, out_features, size).T + np.float32(fmt.midpoint)
            low, high = fmt.qmin - fmt.midpoint, fmt.qmax - fmt.midpoint
            arrays["zero_points"] = np.clip(np.rint(zeros), low, high).astype(np.int8)
        q = PackedMatrix(**arrays, **sizes, dtype=format.dtype).quantized().T
        return QuantizedWeight(q, real)
