"""What the methods need to know of a layer's inputs: a few means, however many there were."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lowbit.numerics.affine import check_finite
from lowbit.numerics.qtensor import float_array

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Activations:
    """Of the inputs x [K] of a layer, in float64; those of two sets of inputs add up with `+`.

    - count: how many there were.
    - mean, magnitude, largest: [K], the means of x and of |x|, and the greatest |x|.
    - gram: [K, K], the mean of x xᵀ. The mean squared error of an output, for an error e [K] of its
      weights, is eᵀ gram e.
    """

    count: int
    mean: Floats
    magnitude: Floats
    largest: Floats
    gram: Floats

    @classmethod
    def of(cls, x: npt.ArrayLike) -> Activations:
        """Of the inputs x [..., K], floats. ValueError names the first NaN or infinity."""
        values = float_array(x)
        if values.ndim == 0:
            raise ValueError("expected inputs of shape [..., K], got a single number")
        check_finite(values)
        rows = values.reshape(-1, values.shape[-1]) if values.size else values[:0].reshape(0, 0)
        if not len(rows):
            raise ValueError(f"no data: expected inputs of shape [..., K], got {values.shape}")
        rows = rows.astype(np.float64)
        size = np.abs(rows)
        return cls(
            len(rows), rows.mean(axis=0), size.mean(axis=0), size.max(axis=0),
            rows.T @ rows / len(rows),
        )  # fmt: skip

    def __add__(self, other: Activations) -> Activations:
        if len(self.mean) != len(other.mean):
            raise ValueError(f"expected inputs of {len(self.mean)}, got {len(other.mean)}")
        count = self.count + other.count
        mine, its = self.count / count, other.count / count
        return Activations(
            count,
            mine * self.mean + its * other.mean,
            mine * self.magnitude + its * other.magnitude,
            np.maximum(self.largest, other.largest),
            mine * self.gram + its * other.gram,
        )

    def divided(self, factors: npt.NDArray[np.floating]) -> Activations:
        """Of the inputs x / factors, for factors [K] above 0."""
        f = factors.astype(np.float64)
        return Activations(
            self.count, self.mean / f, self.magnitude / f, self.largest / f,
            self.gram / np.multiply.outer(f, f),
        )  # fmt: skip
