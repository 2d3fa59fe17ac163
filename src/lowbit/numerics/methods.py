"""Ways to quantize a weight so that its layer's output, not each number, stays what it was.

    known = Activations.of(first) + Activations.of(second)
    result = methods.get("gptq")(dtype="uint4", group_size=128).quantize(weight, known)

A new one is added to this file; all are called alike. What needs two layers or a bias is a
function: `equalization`, `bias_correction`. docs/networks.md says when to choose which.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from lowbit.numerics.activations import Activations, Floats
from lowbit.numerics.affine import (
    affine_parameters,
    check_finite,
    dequantize_affine,
    quantize_affine,
)
from lowbit.numerics.formats import IntFormat, int_format
from lowbit.numerics.qtensor import QTensor, float_array, quantize
from lowbit.numerics.ranges import Range
from lowbit.registry import Registry

__all__ = [
    "Activations",
    "Method",
    "QuantizedWeight",
    "bias_correction",
    "equalization",
    "methods",
    "output_error",
]

# What all methods have: their parameters, how they are called, and what they return.


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

    @classmethod
    def of(
        cls, values: npt.NDArray[Any], scale: npt.NDArray[np.float32], zeros: npt.NDArray[Any],
        fmt: IntFormat, group_size: int | None = None,
        input_scale: npt.NDArray[np.float32] | None = None,
    ) -> QuantizedWeight:  # fmt: skip
        """Of integers [N, K] and their scales; zeros: zero points of the scales' shape, integers,
        or float32 where they are real."""
        real = zeros if zeros.dtype.kind == "f" else None
        near = zeros if real is None else np.clip(np.rint(real), fmt.qmin, fmt.qmax)
        q = QTensor(values, scale, near.astype(np.int32), fmt, 0, group_size)
        return cls(q, real, input_scale)

    def rows(self, which: slice) -> QuantizedWeight:
        """Some rows of it."""
        q, zeros = self.weight, self.zero_point
        each = {name: getattr(q, name)[which] for name in ("values", "scale", "zero_point")}
        zeros = None if zeros is None else zeros[which]
        return replace(self, weight=replace(q, **each), zero_point=zeros)

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


methods: Registry[type[Method]] = Registry("method")
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


# Moving what is hard to quantize from the activations into the weight.
#
# Xiao et al. 2022, "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large
# Language Models" (arXiv:2211.10438). The product stays the same (equation 3), y = (x / s) (W ·
# s)ᵀ, with factors s_k = max|x_k|^α / max|W_k|^(1 − α) (equation 4) for each input k.


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


# Finer steps for the weights that large activations meet.
#
# Lin et al. 2023, "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration"
# (arXiv:2306.00978). A column of W that is multiplied by s, while its input is divided by s, has
# errors 1/s as large, as long as the scale of its group stays. The factors are s_x^α (equation 5),
# with s_x the mean |x| of each input, and α on a grid of [0, 1] the one of least output error
# (equation 4). Then each group's range is narrowed to where the output error of the group is least.

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


# Zero points that leave few large errors, found without data.
#
# Badri, Shaji 2023, "Half-Quadratic Quantization of Large Machine Learning Models"
# (mobiusml.github.io/hqq_blog). Of a group, with the scale S as it is, the zero point z of least
# Σ |w − S (q − z)|^p is sought, p < 1, which forgives few large errors. A second variable E for the
# errors splits that in two, solved in turn, with β growing by κ each time:
#
#     E = sign(e) max(|e| − |e|^(p−1) / β, 0)        e: the errors now   (generalized shrinkage)
#     z = mean(q − (w / S − E))
#
# Here e is in units of S, so that a weight and its multiples have the same result.


@methods.register("hqq")
@dataclass(frozen=True, kw_only=True)
class HQQ(Method):
    """Real zero points, kept beside the integer ones; no group's Σ |e|^p is above the nearest's.

    - norm: p, above 0, below 1. beta: β at first. kappa: κ. turns: how often the two are solved.
    """

    norm: float = 0.7
    beta: float = 10.0
    kappa: float = 1.01
    turns: int = 20

    needs_activations: ClassVar[bool] = False
    real_zero_points: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.norm < 1 or self.beta <= 0 or self.kappa <= 0:
            raise ValueError(f"expected norm within 0 to 1, beta and kappa above 0, got {self}")

    def _quantize(self, w: Floats, activations: Any) -> QuantizedWeight:
        t = self.nearest(w)
        fmt = t.format
        zero = t.zero_point.astype(np.float32)
        values = np.empty_like(t.values)
        for columns, where in groups(t):
            u = w[:, columns] / t.scale[where][:, None]
            zero[where] = self._zero_points(u, zero[where], fmt)
            values[:, columns] = _integers(u, zero[where], fmt)
        return QuantizedWeight.of(values, t.scale, zero, fmt, t.group_size)

    def _zero_points(
        self, u: Floats, zero: npt.NDArray[np.float32], fmt: IntFormat
    ) -> npt.NDArray[np.float32]:
        """[N] of the groups u [N, elements], which are in units of their scales."""
        best, least = zero, np.full(len(u), np.inf)
        beta = self.beta
        for turn in range(self.turns + 1):
            q = _integers(u, zero, fmt)
            error = u - (q - zero[:, None].astype(np.float64))
            size = np.maximum(np.abs(error), 1e-30)
            norm = (size**self.norm).sum(axis=1)
            best, least = np.where(norm < least, zero, best), np.minimum(norm, least)
            if turn < self.turns:
                shrunk = np.sign(error) * np.maximum(size - size ** (self.norm - 1) / beta, 0)
                zero = (q - (u - shrunk)).mean(axis=1).astype(np.float32)
                beta *= self.kappa
        return best


def _integers(u: Floats, zero: npt.NDArray[np.float32], fmt: IntFormat) -> npt.NDArray[Any]:
    return np.clip(np.rint(u + zero[:, None]), fmt.qmin, fmt.qmax).astype(fmt.storage)


# Rounding one input's weights after another, the later ones making up for the errors so far.
#
# Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
# Transformers" (arXiv:2210.17323). With the Hessian H = 2 X Xᵀ of the output error, rounding column
# k of W by e changes the columns that are not yet rounded by −e / [H⁻¹]_kk · [H⁻¹]_k (equation 2);
# all the H⁻¹ that this takes are rows of one Cholesky factor (section 4, step 3), and columns far
# ahead are changed a block at a time (step 2, equations 4 and 5). H is damped by a share of its
# mean diagonal. (Files that other GPTQ programs wrote are read by `lowbit.numerics.read_gptq`.)

_BLOCK = 128


@methods.register("gptq")
@dataclass(frozen=True, kw_only=True)
class GPTQ(Method):
    """The integers of less output error for scales and zero points as `quantize` chooses them.

    Since these are chosen beforehand, the order of rounding is free and nothing is permuted.

    - damping: above 0; the share of the mean diagonal of H that is added to its diagonal.
    - largest_first: whether inputs are rounded in the order of their mean squares ("act-order"), or
      as they come.
    """

    damping: float = 0.01
    largest_first: bool = True

    def __post_init__(self) -> None:
        if self.damping <= 0:
            raise ValueError(f"expected damping above 0, got {self.damping}")

    def _quantize(self, w: Floats, activations: Activations) -> QuantizedWeight:
        t = self.nearest(w)
        diagonal = np.diagonal(activations.gram)
        order = np.arange(w.shape[1])
        if self.largest_first:
            order = np.argsort(-diagonal, kind="stable")
        # In units of the mean diagonal, so that no size of inputs over- or underflows.
        hessian = activations.gram[np.ix_(order, order)] / (diagonal.mean() or 1.0)
        hessian[np.diag_indices_from(hessian)] += self.damping
        factor = np.linalg.cholesky(np.linalg.inv(hessian)).T.astype(np.float64)
        scale, zero_point = (
            np.broadcast_to(t.spread(part), w.shape).T[order].astype(np.float64)
            for part in (t.scale, t.zero_point)
        )
        values = np.empty_like(t.values)
        values[:, order] = _rounded(w.T[order], scale, zero_point, factor, t.format).T
        weight = QTensor(
            values, t.scale, t.zero_point, t.format, t.axis, t.group_size, t.group_axis
        )
        return QuantizedWeight(weight)


def _rounded(
    w: Floats, scale: Floats, zero_point: Floats, factor: Floats, fmt: IntFormat
) -> Floats:
    """Integers [K, N] for w [K, N], which is changed on the way; the factor [K, K] is upper."""
    q = np.empty_like(w)
    errors = np.empty_like(w)
    for start in range(0, len(w), _BLOCK):
        stop = min(start + _BLOCK, len(w))
        for k in range(start, stop):
            q[k] = np.clip(np.rint(w[k] / scale[k]) + zero_point[k], fmt.qmin, fmt.qmax)
            errors[k] = (w[k] - scale[k] * (q[k] - zero_point[k])) / factor[k, k]
            w[k + 1 : stop] -= np.multiply.outer(factor[k, k + 1 : stop], errors[k])
        w[stop:] -= factor[start:stop, stop:].T @ errors[start:stop]
    return q


# Equal ranges of two layers' weights, and a bias that takes a layer's mean error away.
#
# Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction"
# (arXiv:1906.04721): sections 4.1 and 4.2.


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
