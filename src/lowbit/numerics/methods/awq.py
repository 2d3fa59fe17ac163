"""Finer steps for the weights that large activations meet.

Lin et al. 2023, "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration"
(arXiv:2306.00978). A column of W that is multiplied by s, while its input is divided by s, has
errors 1/s as large, as long as the scale of its group stays. The factors are s_x^α (equation 5),
with s_x the mean |x| of each input, and α on a grid of [0, 1] the one of least output error
(equation 4). Then each group's range is narrowed to where the output error of the group is least.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from lowbit.numerics.affine import affine_parameters, dequantize_affine, quantize_affine
from lowbit.numerics.formats import IntFormat
from lowbit.numerics.methods.activations import Activations, Floats
from lowbit.numerics.methods.method import (
    Method,
    QuantizedWeight,
    groups,
    methods,
    output_error,
    positive_factors,
)
from lowbit.numerics.qtensor import QTensor

_NARROWER = tuple(1 - i / 20 for i in range(1, 11))


@methods.register("awq")
@dataclass(frozen=True, kw_only=True)
class AWQ(Method):
    """Factors, then ranges, of least output error; never above that of the nearest numbers.

    - steps: how many α are tried, from 0 (no factors) to 1.
    - clip: whether the ranges of groups are searched for, down to half of the whole.
    """

    steps: int = 20
    clip: bool = True

    scales_inputs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"expected at least one step, got {self.steps}")

    def _quantize(self, w: Floats, activations: Activations) -> QuantizedWeight:
        best = QuantizedWeight(self.nearest(w))
        least = output_error(best.dequantize() - w, activations)
        factors = np.ones(w.shape[1], np.float32)
        for alpha in np.linspace(0, 1, self.steps)[1:]:
            one = _factors(activations, alpha)
            tried = QuantizedWeight(self.nearest(w * one), input_scale=one)
            error = output_error(tried.dequantize() - w, activations)
            if error < least:
                best, least, factors = tried, error, one
        if self.clip:
            narrow = self._narrowed(w * factors, best.weight, activations.divided(factors))
            tried = QuantizedWeight(narrow, input_scale=best.input_scale)
            # Errors of different groups add up with signs, which the search does not see.
            if output_error(tried.dequantize() - w, activations) < least:
                return tried
        return best

    def _narrowed(self, w: Floats, t: QTensor, activations: Activations) -> QTensor:
        """w as t, with the range of each group, of [N] at once, narrowed to its least error."""
        fmt = t.format
        scale, zero_point = t.scale.copy(), t.zero_point.copy()
        for columns, where in groups(t):
            part, gram = w[:, columns], activations.gram[columns, columns]
            low, high = part.min(axis=1, initial=0), part.max(axis=1, initial=0)
            least = _errors(part, gram, scale[where], zero_point[where], fmt)
            for factor in _NARROWER:
                tried = affine_parameters(low * factor, high * factor, fmt, self.symmetric)
                found = _errors(part, gram, *tried, fmt)
                better = found < least
                least = np.where(better, found, least)
                scale[where] = np.where(better, tried[0], scale[where])
                zero_point[where] = np.where(better, tried[1], zero_point[where])
        values = quantize_affine(w, t.spread(scale), t.spread(zero_point), fmt)
        return QTensor(values, scale, zero_point, fmt, t.axis, t.group_size, t.group_axis)


def _errors(
    w: Floats, gram: Floats, scale: npt.NDArray[Any], zero_point: npt.NDArray[Any], fmt: IntFormat
) -> Floats:
    """[N], the mean squared errors of the outputs of w [N, k] alone."""
    scale, zero_point = scale[:, None], zero_point[:, None]
    q = quantize_affine(w, scale, zero_point, fmt)
    error = dequantize_affine(q, scale, zero_point) - w
    return np.einsum("nk,nk->n", error @ gram, error)


def _factors(activations: Activations, alpha: float) -> npt.NDArray[np.float32]:
    """s_x^α, scaled so that the least and the greatest are each other's inverse."""
    size = activations.magnitude
    if not size.any():
        return np.ones(len(size), np.float32)
    # The weights of an input that is always 0 are of no importance.
    factors = np.where(size > 0, size, size[size > 0].min()) ** alpha
    return positive_factors(factors / np.sqrt(factors.min()) / np.sqrt(factors.max()))
