"""Weights in tiles, as kernels for GPUs take them (kernels/triton/fast/tiles.py draws them)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.kernels.triton.fast.tiles import (
    GROUP_UNIT,
    MIDDLE,
    TILE_DEPTH,
    TILE_ROWS,
    to_rows,
    to_tiles,
)
from lowbit.numerics import QTensor, from_int32, int_format, to_int32
from lowbit.numerics.methods import QuantizedWeight
from lowbit.weights.format import Shape, WeightFormat

Array = npt.NDArray[Any]


class Tiles:
    """Weights [out, in] of 4 bits in tiles.

    tiles: int32 [ceil(out/64), ceil(in/128), 64, 16]. row_scale: float32 [out rounded up to 64,
    groups], and scale the same by group; row_zero, zero: as these, int8, of the nibbles less 8, and
    missing where the format has no zero points.
    """

    parts = ("tiles", "scale", "row_scale", "zero", "row_zero")

    def refusal(self, format: WeightFormat, in_features: int) -> str | None:
        """Why a weight of this format cannot be packed so; None if it can."""
        size = format.group_of(in_features)
        if size is None:
            return f"tiles are of 4-bit integers, not of {format.dtype}"
        if size < in_features and size % GROUP_UNIT:
            return f"group_size must be a multiple of {GROUP_UNIT} there, got {size}"
        if format.layout != WeightFormat(format.dtype, format.group_size).layout:
            return f"what {format.method!r} gives beside integers has no place in tiles"
        return None

    def group_size(self, format: WeightFormat, in_features: int) -> int:
        """How many k share a scale: of one group, as many as the tiles have."""
        size = format.group_of(in_features) or in_features
        return size if size < in_features else -(-in_features // TILE_DEPTH) * TILE_DEPTH

    def pack(self, weight: QuantizedWeight) -> dict[str, Array]:
        """The arrays of a weight, by name."""
        q = weight.weight
        rows, depth = q.shape
        tall, deep = -(-rows // TILE_ROWS), -(-depth // TILE_DEPTH)
        nibbles = np.zeros((tall * TILE_ROWS, deep * TILE_DEPTH), np.uint8)
        nibbles[:rows, :depth] = q.values
        nibbles[:rows, :depth] += np.uint8(MIDDLE - q.format.midpoint)
        arrays = {"tiles": np.ascontiguousarray(to_tiles(to_int32(nibbles, axis=1)))}
        beside: dict[str, Array] = {"scale": q.scale}
        if not q.format.signed:
            beside["zero"] = (q.zero_point - q.format.midpoint).astype(np.int8)
        for name, given in beside.items():
            filled = np.zeros((len(nibbles), given.shape[1]), given.dtype)
            filled[:rows] = given
            arrays |= {f"row_{name}": filled, name: np.ascontiguousarray(filled.T)}
        return arrays

    def unpack(
        self, arrays: Mapping[str, Array], format: WeightFormat, shape: Shape
    ) -> QuantizedWeight:
        """What `pack` was given."""
        (rows, depth), fmt = shape, int_format(format.dtype)
        nibbles = from_int32(to_rows(arrays["tiles"]), axis=1)[:rows, :depth]
        values = (nibbles - np.uint8(MIDDLE - fmt.midpoint)).view(fmt.storage)
        scale = arrays["row_scale"][:rows].copy()
        zeros = np.full(scale.shape, fmt.midpoint, np.int32)
        if "row_zero" in arrays:
            zeros += arrays["row_zero"][:rows]
        q = QTensor(values, scale, zeros, fmt, 0, format.group_of(depth))
        return QuantizedWeight(q)
