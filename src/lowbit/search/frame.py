"""What the vectors of an index have in common: their mean, and the scales of dimensions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.search.groups import Floats

Doubles = npt.NDArray[np.float64]

_LEAST_WEIGHT = 2.0**-10  # of a dimension, of the greatest: one that never varies has it


@dataclass(frozen=True)
class Frame:
    """What the vectors of an index have in common, as training found it.

    A vector v is kept as v ≈ centre + scale of v · weight ∘ integers.
    """

    centre: Floats
    """The mean of the vectors, [dim]."""
    weight: Floats | None
    """The scale of each dimension, [dim]; None: 1."""
    reach: float = math.inf
    """The greatest scale of a vector that was trained with; infinite: unknown."""

    def left(self, vectors: Floats) -> Floats:
        """Vectors [n, dim] less the centre, over the weights: what becomes integers."""
        with np.errstate(over="ignore", invalid="ignore"):
            rest = vectors - self.centre
            return rest if self.weight is None else np.divide(rest, self.weight, out=rest)

    def weighted(self, numbers: Any) -> Any:
        """Numbers [n, dim] times the weights."""
        return numbers if self.weight is None else numbers * self.weight


def weights(rest: Doubles) -> Floats:
    """The scales of dimensions, [dim], of vectors less their mean, [n, dim].

    They are the roots of standard deviations. Vectors are divided by them, and queries multiplied:
    so dimensions of large deviation take as little of the one's range as of the other's.
    """
    deviation = np.sqrt(np.einsum("nd,nd->d", rest, rest) / len(rest))
    greatest = float(deviation.max())
    if not greatest:
        return np.ones(rest.shape[1], np.float32)
    return np.maximum(np.sqrt(deviation / greatest), _LEAST_WEIGHT).astype(np.float32)
