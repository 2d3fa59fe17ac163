"""Operators over rows: softmax, sum, LayerNorm, RMSNorm, and their gradients.

The arithmetic is float32; where terms cancel, the slack is so many roundings of their magnitudes.
"""

from __future__ import annotations

import numpy as np

from lowbit.spec.case import Case
from lowbit.spec.dtypes import DTYPES, Array
from lowbit.spec.dtypes import FLOAT32_UNIT as _UNIT
from lowbit.spec.operations import Floats, specified

_SIZES = {"N": 5, "T": 300}
_LEAST_NORMAL = DTYPES["float32"].least_normal
_LAYER_EPS, _RMS_EPS = 1e-5, 1e-6


@specified(exercise=_SIZES, summed=("T",), operations="5*N*T")
def softmax(x: Floats[np.ndarray, "N T"]) -> Floats[np.ndarray, "N T"]:
    """z = exp(x) / Σ exp(x) of each row."""
    weights = np.exp(x - x.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def _roundings(x: Array) -> float:
    """Of a sum over a row, relative to its terms."""
    return (x.shape[1] + 8) * _UNIT


def _mean(x: Array) -> Array:
    return x.mean(axis=1, keepdims=True)


def _softmax_slack(case: Case, x: Array, dz: Array) -> Array:
    """z is kept in the result's dtype, and is 0 where float32 would be denormal, as GPUs take their
    powers of two; z · dz and z · Σ may cancel."""
    z, size = softmax.reference(x), np.abs(dz)
    terms = z * (size + (z * size).sum(axis=1, keepdims=True))
    flushed = _LEAST_NORMAL * (size + size.sum(axis=1, keepdims=True))
    return 2 * (case.dtype("dx").unit + _roundings(x)) * terms + flushed


@specified(exercise=_SIZES, summed=("T",), operations="4*N*T", result="dx", slack=_softmax_slack)
def softmax_dx(
    x: Floats[np.ndarray, "N T"], dz: Floats[np.ndarray, "N T"]
) -> Floats[np.ndarray, "N T"]:
    """dx = z · (dz - Σ z · dz), z the softmax of x."""
    z = softmax.reference(x)
    return z * (dz - (z * dz).sum(axis=1, keepdims=True))


@specified(exercise=_SIZES)
def row_sum(x: Floats[np.ndarray, "N T"]) -> Floats[np.ndarray, "N"]:
    """z = Σ x of each row."""
    return x.sum(axis=1)


def _layer(x: Array) -> tuple[Array, Array]:
    """x less its mean, divided by its deviation, and one over that."""
    centred = x - _mean(x)
    inverse = 1 / np.sqrt(_mean(centred * centred) + _LAYER_EPS)
    return centred * inverse, inverse


def _rms(x: Array) -> tuple[Array, Array]:
    """x divided by the root of its mean square, and one over that."""
    inverse = 1 / np.sqrt(_mean(x * x) + _RMS_EPS)
    return x * inverse, inverse


def _centring(x: Array) -> Array:
    """How far the normalized x may be off for the rounding of the mean."""
    return _roundings(x) * _mean(np.abs(x)) * _layer(x)[1]


def _layer_slack(case: Case, x: Array, weight: Array, bias: Array) -> Array:
    return np.abs(weight) * _centring(x) + 0 * bias


def _layer_dweight_slack(case: Case, x: Array, weight: Array, dz: Array) -> Array:
    return (np.abs(dz) * _centring(x)).sum(axis=0)


def _gradient_slack(n: Array, inverse: Array, g: Array, off: Array | float) -> Array:
    """What of g, its mean, and n · mean g·n may remain; `off` is the error of n."""
    size = np.abs(g)
    terms = size + _mean(size) + np.abs(n) * _mean(size * np.abs(n))
    moved = off * _mean(size * np.abs(n)) + np.abs(n) * _mean(size * off)
    return 2 * inverse * (_roundings(n) * terms + moved)


def _layer_dx_slack(case: Case, x: Array, weight: Array, dz: Array) -> Array:
    return _gradient_slack(*_layer(x), dz * weight, _centring(x))


def _rms_dx_slack(case: Case, x: Array, weight: Array, dz: Array) -> Array:
    return _gradient_slack(*_rms(x), dz * weight, 0.0)


def _gated_slack(case: Case, a: Array, b: Array) -> Array:
    """The logistic function is 0 where float32 would be denormal."""
    return _LEAST_NORMAL * np.abs(a * b)


@specified(exercise=_SIZES, operations="6*N*T", slack=_gated_slack)
def gated_silu(
    a: Floats[np.ndarray, "N T"], b: Floats[np.ndarray, "N T"]
) -> Floats[np.ndarray, "N T"]:
    """z = a / (1 + exp(-a)) · b."""
    return a / (1 + np.exp(-a)) * b


def _added_slack(case: Case, x: Array, y: Array, weight: Array) -> Array:
    """The sum is kept in the result's dtype, and its norm taken of that."""
    return 3 * case.dtype("z").unit * np.abs(add_rms_norm.reference(x, y, weight))


@specified(exercise=_SIZES, summed=("T",), operations="6*N*T", slack=_added_slack)
def add_rms_norm(
    x: Floats[np.ndarray, "N T"], y: Floats[np.ndarray, "N T"], weight: Floats[np.ndarray, "T"]
) -> Floats[np.ndarray, "N T"]:
    """z = (x + y) / sqrt(mean (x + y)² + 1e-6) · weight."""
    return _rms(x + y)[0] * weight


@specified(exercise=_SIZES, summed=("T",), operations="8*N*T", slack=_layer_slack)
def layer_norm(
    x: Floats[np.ndarray, "N T"], weight: Floats[np.ndarray, "T"], bias: Floats[np.ndarray, "T"]
) -> Floats[np.ndarray, "N T"]:
    """z = (x - mean) / sqrt(variance + 1e-5) · weight + bias."""
    return _layer(x)[0] * weight + bias


@specified(exercise=_SIZES, summed=("T",), operations="11*N*T", result="dx", slack=_layer_dx_slack)
def layer_norm_dx(
    x: Floats[np.ndarray, "N T"], weight: Floats[np.ndarray, "T"], dz: Floats[np.ndarray, "N T"]
) -> Floats[np.ndarray, "N T"]:
    """dx = (g - mean g - n · mean g·n) / deviation, with g = dz · weight and n normalized x."""
    n, inverse = _layer(x)
    g = dz * weight
    return (g - _mean(g) - n * _mean(g * n)) * inverse


@specified(
    exercise=_SIZES,
    summed=("N", "T"),
    operations="2*N*T",
    result="dweight",
    slack=_layer_dweight_slack,
)
def layer_norm_dweight(
    x: Floats[np.ndarray, "N T"], weight: Floats[np.ndarray, "T"], dz: Floats[np.ndarray, "N T"]
) -> Floats[np.ndarray, "T"]:
    """dweight = Σ over rows of dz · n, with n the normalized x."""
    return (dz * _layer(x)[0]).sum(axis=0)


@specified(exercise=_SIZES, result="dbias")
def layer_norm_dbias(
    x: Floats[np.ndarray, "N T"],
    weight: Floats[np.ndarray, "T"],
    bias: Floats[np.ndarray, "T"],
    dz: Floats[np.ndarray, "N T"],
) -> Floats[np.ndarray, "T"]:
    """dbias = Σ over rows of dz."""
    return dz.sum(axis=0)


@specified(exercise=_SIZES, summed=("T",), operations="4*N*T")
def rms_norm(
    x: Floats[np.ndarray, "N T"], weight: Floats[np.ndarray, "T"]
) -> Floats[np.ndarray, "N T"]:
    """z = x / sqrt(mean x² + 1e-6) · weight."""
    return _rms(x)[0] * weight


@specified(exercise=_SIZES, summed=("T",), result="dx", slack=_rms_dx_slack)
def rms_norm_dx(
    x: Floats[np.ndarray, "N T"], weight: Floats[np.ndarray, "T"], dz: Floats[np.ndarray, "N T"]
) -> Floats[np.ndarray, "N T"]:
    """dx = (g - n · mean g·n) / root of the mean square, with g = dz · weight, n normalized x."""
    n, inverse = _rms(x)
    g = dz * weight
    return (g - n * _mean(g * n)) * inverse


@specified(exercise=_SIZES, summed=("N", "T"), result="dweight")
def rms_norm_dweight(
    x: Floats[np.ndarray, "N T"], weight: Floats[np.ndarray, "T"], dz: Floats[np.ndarray, "N T"]
) -> Floats[np.ndarray, "T"]:
    """dweight = Σ over rows of dz · n, with n the normalized x."""
    return (dz * _rms(x)[0]).sum(axis=0)
