"""What all methods have: their parameters, how they are called, and what they return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from lowbit.numerics.affine import check_finite
from lowbit.numerics.formats import int_format
from lowbit.numerics.methods.activations import Activations, Floats
from lowbit.numerics.qtensor import QTensor, float_array, quantize
from lowbit.numerics.ranges import Range
from lowbit.registry import Registry


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A quantized weight, and what its layer must do with it: y ≈ (x / input_scale) @ Wᵀ.

    - weight: [N, K], a scale for each row or for each group of it.
    - zero_point: float32 of the shape of the scales, or None. Real zero points to be used in place
      of those of `weight`, which are the nearest integers: lowbit.pack(weight.T, zero_point=...T).
    - input_scale: float32 [K], or None for ones. The layer before, or a normalization, can be
      divided by it once and for all.
    """

    weight: QTensor
    zero_point: npt.NDArray[np.float32] | None = None
    input_scale: npt.NDArray[np.float32] | None = None

    def dequantize(self) -> npt.NDArray[np.float32]:
        """The weight [N, K] that x, as it is, is multiplied by: y ≈ x @ Wᵀ."""
        t = self.weight
        if self.zero_point is None:
            weight = t.dequantize()
        else:
            weight = t.spread(t.scale) * (t.values - t.spread(self.zero_point))
        return weight if self.input_scale is None else weight / self.input_scale


def output_error(error: npt.NDArray[Any], activations: Activations) -> float:
    """The mean squared error of a layer's outputs, for an error [N, K] of its weight."""
    e = error.astype(np.float64)
    return float(np.vdot(e @ activations.gram, e)) / len(e)


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A way to quantize a weight [N, K], whose layer computes y = x @ Wᵀ.

    dtype, group_size (along K), symmetric and range are those of `quantize`.
    """

    dtype: str = "int8"
    group_size: int | None = None
    symmetric: bool = True
    range: Range = "minmax"

    needs_activations: ClassVar[bool] = True
    real_zero_points: ClassVar[bool] = False
    scales_inputs: ClassVar[bool] = False
    """Whether results may have a `zero_point`, and an `input_scale`."""

    def quantize(
        self, weight: npt.ArrayLike, activations: Activations | None = None
    ) -> QuantizedWeight:
        """Quantize a float weight [N, K] for inputs like those of `activations`.

        ValueError: a value is not finite (the first is named), shapes do not fit, or the method
        needs activations and there are none.
        """
        w = float_array(weight)
        if w.ndim != 2 or w.size == 0:
            raise ValueError(f"expected a weight [N, K] that is not empty, got {w.shape}")
        check_finite(w)
        if activations is None:
            if self.needs_activations:
                raise ValueError(
                    f"{type(self).__name__} needs to know the layer's inputs; "
                    "pass Activations.of(x)"
                )
        elif len(activations.mean) != w.shape[1]:
            raise ValueError(
                f"expected activations of {w.shape[1]} inputs, got {len(activations.mean)}"
            )
        return self._quantize(w.astype(np.float64), activations)

    @abstractmethod
    def _quantize(self, w: Floats, activations: Any) -> QuantizedWeight:
        """The same of float64; activations is None only where they are not needed."""

    def nearest(self, w: Floats) -> QTensor:
        """Each number rounded to the nearest."""
        return quantize(
            w, int_format(self.dtype), axis=0, group_size=self.group_size, symmetric=self.symmetric,
            range=self.range,
        )  # fmt: skip


methods: Registry[type[Method]] = Registry("method", "lowbit.numerics.methods")
"""By name: "nearest", "smoothquant", "awq", "hqq", "gptq"."""


@methods.register("nearest")
@dataclass(frozen=True, kw_only=True)
class Nearest(Method):
    """Each number rounded for itself, as `quantize` does; what the others are compared with."""

    needs_activations: ClassVar[bool] = False

    def _quantize(self, w: Floats, activations: Any) -> QuantizedWeight:
        return QuantizedWeight(self.nearest(w))


def positive_factors(factors: Floats) -> npt.NDArray[np.float32]:
    """As float32, within 2⁻³² to 2³², and 1 where they are not finite or not above 0."""
    good = np.isfinite(factors) & (factors > 0)
    return np.clip(np.where(good, factors, 1.0), 2.0**-32, 2.0**32).astype(np.float32)


def groups(t: QTensor) -> Iterator[tuple[slice, tuple[slice | int, ...]]]:
    """For each group of columns: which they are, and where its scales [N] are in those of t."""
    if t.group_size is None:
        yield slice(None), (slice(None),)
        return
    for group in range(t.scale.shape[1]):
        start = group * t.group_size
        yield slice(start, start + t.group_size), (slice(None), group)
