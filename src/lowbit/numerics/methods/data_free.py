"""Equal ranges of two layers' weights, and a bias that takes a layer's mean error away.

Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction"
(arXiv:1906.04721): sections 4.1 and 4.2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.numerics.methods.method import positive_factors


def equalization(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Factors s [C] after which channel c has the same greatest magnitude in both weights.

    first: [C, K], second: [N, C], of y = second · f(first · x + bias), where f(s · x) = s · f(x)
    for s > 0, as ReLU, leaky ReLU and the identity have it. With

        first / s[:, None], bias / s, second · s

    in their places y is the same, but for rounding. s_c = √(r1_c / r2_c), with r the greatest
    magnitudes; 1 where one of them is 0. ValueError: the shapes do not fit.
    """
    if first.ndim != 2 or second.ndim != 2 or len(first) != second.shape[1]:
        raise ValueError(f"expected weights [C, K] and [N, C], got {first.shape}, {second.shape}")
    ranges = (np.abs(each.astype(np.float64)).max(axis=1, initial=0) for each in (first, second.T))
    with np.errstate(divide="ignore", invalid="ignore"):
        return positive_factors(np.sqrt(np.divide(*ranges)))


def bias_correction(
    weight: npt.NDArray[Any],
    quantized: npt.NDArray[Any],
    mean: npt.NDArray[Any],
    quantized_mean: npt.NDArray[Any] | None = None,
) -> npt.NDArray[np.float32]:
    """What to add to the bias [N], so that the outputs' mean is that of the float layer.

    weight, quantized: [N, K], in floats and as dequantized. mean: [K], of the inputs;
    quantized_mean: of the inputs that the quantized layer sees, where they differ. The expected
    error is E[Ŵ x̂] − E[W x] = Ŵ E[x̂] − W E[x].
    """
    seen = mean if quantized_mean is None else quantized_mean
    float_mean = weight.astype(np.float64) @ mean.astype(np.float64)
    return (float_mean - quantized.astype(np.float64) @ seen.astype(np.float64)).astype(np.float32)
