"""Moving what is hard to quantize from the activations into the weight.

Xiao et al. 2022, "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language
Models" (arXiv:2211.10438). The product stays the same (equation 3), y = (x / s) (W · s)ᵀ, with
factors s_k = max|x_k|^α / max|W_k|^(1 − α) (equation 4) for each input k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from lowbit.numerics.methods.activations import Activations, Floats
from lowbit.numerics.methods.method import Method, QuantizedWeight, methods, positive_factors


def smoothquant_factors(
    largest: npt.NDArray[Any], weight: npt.NDArray[Any], alpha: float
) -> npt.NDArray[np.float32]:
    """Factors [K] that x is divided and the columns of the weight multiplied by.

    largest: [K], the greatest |x|; weight: [N, K], or those of all layers that read x, one below
    the other. Where an input or a column is all 0, its factor is 1; others are within 2⁻³² to 2³².
    """
    columns = np.abs(weight.astype(np.float64)).max(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = largest.astype(np.float64) ** alpha / columns ** (1 - alpha)
    return positive_factors(np.where((largest > 0) & (columns > 0), factors, 1.0))


@methods.register("smoothquant")
@dataclass(frozen=True, kw_only=True)
class SmoothQuant(Method):
    """For layers whose activations are quantized too; the weight alone does not gain.

    - alpha: within 0 to 1. The share of the difficulty that goes to the weight.
    """

    alpha: float = 0.5

    scales_inputs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"expected alpha within 0 to 1, got {self.alpha}")

    def _quantize(self, w: Floats, activations: Activations) -> QuantizedWeight:
        factors = smoothquant_factors(activations.largest, w, self.alpha)
        return QuantizedWeight(self.nearest(w * factors), input_scale=factors)
