"""Weights of layers as what multiplies them takes them: rows, panels, tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import _disable_current_modes

from lowbit.kernels.triton.fast.tiles import (
    GROUP_UNIT,
    MIDDLE,
    TILE_DEPTH,
    TiledWeight,
    to_values,
)
from lowbit.numerics import int_format, longest_sum
from lowbit.numerics.methods import QuantizedWeight
from lowbit.weights.format import Shape, WeightFormat
from lowbit.weights.panels import (
    Numbers,
    PackedMatrix,
    by_groups,
    group_refusal,
    one_group,
    pack,
)

# Weights in rows, as files hold them: for looking rows up, on any device.

Array = npt.NDArray[Any]


class Rows:
    """Weights [out, in] in the arrays of `WeightFormat.stored`, whose values are `integers` here.

    No kernel multiplies by them; embeddings look rows up.
    """

    parts = ("integers", "scale", "zero_point")

    def refusal(self, format: WeightFormat, in_features: int) -> str | None:
        """Why a weight of this format cannot be packed so: never."""
        return None

    def group_size(self, format: WeightFormat, in_features: int) -> int:
        """How many of a row share a scale."""
        return format.group_of(in_features) or in_features

    def pack(self, weight: QuantizedWeight) -> dict[str, Array]:
        """The arrays of a weight, by name."""
        q, method = weight.weight, "nearest" if weight.zero_point is None else "hqq"
        stored = WeightFormat(q.format.name, q.group_size, method=method).to_stored(weight)
        return {"integers": stored.pop("values"), **stored}

    def unpack(
        self, arrays: Mapping[str, Array], format: WeightFormat, shape: Shape
    ) -> QuantizedWeight:
        """What `pack` was given."""
        return format.from_stored({"values": arrays["integers"], **arrays}, shape)


class Bytes(Rows):
    """Weights [out, in] of int8 in rows, as products with 8-bit activations take them on GPUs:
    `integers`, `scale`, and `sums` of the rows, int32 [out]."""

    parts = ("integers", "scale", "sums")

    def refusal(self, format: WeightFormat, in_features: int) -> str | None:
        """Why a weight of this format cannot be packed so; None if it can."""
        return None if format.dtype == "int8" else f"they take int8 there, not {format.dtype}"

    def pack(self, weight: QuantizedWeight) -> dict[str, Array]:
        """The arrays of a weight, by name."""
        arrays = super().pack(weight)
        return {**arrays, "sums": arrays["integers"].sum(1, dtype=np.int32)}


# Weights of layers in panels, as the CPU's kernels take them.


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
        zeros = None if zeros is None else zeros.T
        packed = pack(weight.weight.T, zero_point=zeros, numbers=Numbers(False, False))
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


# Weights in tiles, as kernels for GPUs take them (kernels/triton/fast/tiles.py draws them).


class Tiles:
    """Weights [out, in] of 4 or 8 bits in tiles.

    tiles: int32 [4·ceil(out/64), 2·ceil(in/128), bits/4, 32, 4]. scale: float32 [out rounded up to
    64, groups]; zero: likewise, relative to the middle, int8, or float32 where zero points are no
    integers, and missing where the format has none. words: both as kernels take them.
    """

    parts = ("tiles", "words", "scale", "zero")

    def refusal(self, format: WeightFormat, in_features: int) -> str | None:
        """Why a weight of this format cannot be packed so; None if it can."""
        size = format.group_of(in_features)
        if size is not None and size < in_features and size % GROUP_UNIT:
            return f"group_size must be a multiple of {GROUP_UNIT} there, got {size}"
        return None

    def group_size(self, format: WeightFormat, in_features: int) -> int:
        """How many k share a scale: of one group, as many as the tiles have."""
        size = format.group_of(in_features) or in_features
        return size if size < in_features else -(-in_features // TILE_DEPTH) * TILE_DEPTH

    def pack(self, weight: QuantizedWeight) -> dict[str, Array]:
        """The arrays of a weight, by name."""
        q, real, bits = weight.weight, weight.zero_point, weight.weight.format.bits
        middle = MIDDLE[bits] - q.format.midpoint
        values = q.values.view(np.uint8) + np.uint8(middle)
        values &= np.uint8((1 << bits) - 1)
        zero = None
        if real is not None:
            zero = real - np.float32(q.format.midpoint)
        elif not q.format.signed:
            zero = (q.zero_point - q.format.midpoint).astype(np.int8)
        scale = q.scale[:, None] if q.scale.ndim == 1 else q.scale
        size = q.group_size if q.group_size and q.group_size < q.shape[1] else None
        size = size or -(-q.shape[1] // TILE_DEPTH) * TILE_DEPTH
        with _disable_current_modes():  # these are numbers, also where a caller's are not
            scales, integers = torch.from_numpy(scale), torch.from_numpy(values)
            zeros = None if zero is None else torch.from_numpy(zero)
            tiled = TiledWeight.of(integers, scales, zeros, size, bits)
            parts = {name: getattr(tiled, name) for name in self.parts}
            return {name: part.numpy() for name, part in parts.items() if part is not None}

    def unpack(
        self, arrays: Mapping[str, Array], format: WeightFormat, shape: Shape
    ) -> QuantizedWeight:
        """What `pack` was given."""
        (rows, depth), fmt = shape, int_format(format.dtype)
        with _disable_current_modes():
            values = to_values(torch.from_numpy(arrays["tiles"])).numpy()[:rows, :depth]
        values = (values - np.uint8(MIDDLE[fmt.bits] - fmt.midpoint)).view(fmt.storage)
        scale, zero = arrays["scale"][:rows].copy(), arrays.get("zero")
        zeros = np.full(scale.shape, fmt.midpoint, np.int32)
        if zero is not None:
            zeros = zeros.astype(np.float32 if zero.dtype.kind == "f" else np.int32) + zero[:rows]
        if format.group_of(depth) is None:
            scale, zeros = scale[:, 0], zeros[:, 0]
        return QuantizedWeight.of(values, scale, zeros, fmt, format.group_of(depth))
