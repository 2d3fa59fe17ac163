"""Weights in rows, as files hold them: for looking rows up, on any device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from lowbit.numerics.methods import QuantizedWeight
from lowbit.weights.format import Shape, WeightFormat

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
