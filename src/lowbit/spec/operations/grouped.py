"""Products with 4-bit and 8-bit weights in groups along K, a scale for each group.

In the layers of CPUs groups are a dimension of their own, G of S elements each, so that shapes say
what belongs together; the functions of the library take the same memory as x [M, K] and b [K, N].
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Int32, UInt8

from lowbit.numerics import quantize_rows
from lowbit.spec.case import Case
from lowbit.spec.data import draw_activations, draw_scales, draw_zero_points_of
from lowbit.spec.dtypes import DTYPES, Array
from lowbit.spec.dtypes import FLOAT32_UNIT as _UNIT
from lowbit.spec.operations import FloatOut, GroupWeights, Halves, Operands, specified

_TINY = DTYPES["float32"].least
_ROUNDINGS = 12  # float32 operations on a group's sums, at most
LARGEST = {"float32": 2.0**22 - 1, "bfloat16": 127.0 * 257}
"""What a group's greatest activation becomes in fixed point, by the type of the activations."""

_SIZES = {"M": 5, "N": 21, "G": 2, "S": 32}
_DRAWS = {"b_scale": draw_scales, "b_zero_point": draw_zero_points_of("b")}


def _centred(b: Array, b_zero_point: Array | None = None) -> Array:
    """b less its zero points, [G, S, N]."""
    return b if b_zero_point is None else b - b_zero_point[:, None]


def _unsigned(case: Case, b: Array, b_zero_point: Array | None = None) -> Array:
    """What the kernels multiply: unsigned integers, and the magnitude of what they subtract."""
    unsigned = b - case.dtype("b").low
    return unsigned + np.abs(unsigned - _centred(b, b_zero_point))


def _sum(x: Array, weight: Array, scale: Array) -> Array:
    """Σ_g Σ_s x[m, g, s] · weight[g, s, n] · scale[g, n]."""
    return np.einsum("mgs,gsn,gn->mn", x, weight.astype(np.float64), scale, optimize=True)


def _rounded(mass: Array, case: Case) -> Array:
    """The rounding of a sum over groups, `mass` being the sum of the magnitudes that go into it."""
    return (_ROUNDINGS + case.sizes["G"]) * (_UNIT * mass + _TINY)


def _weight_only_budget(
    case: Case, x: Array, b: Array, b_scale: Array, b_zero_point: Array | None = None
) -> Array:
    """Fixed point: each activation is off by at most one step of its group, half of it from
    rounding and half from the float32 quotient; steps below the normal numbers count as zero."""
    size, largest = np.abs(x), LARGEST[case.dtype("x").name]
    step = size.max(axis=2, keepdims=True, initial=0) / largest
    step = np.where(step <= DTYPES["float32"].least_normal, step * largest, step) + 0 * size
    mass = _sum(size + step, _unsigned(case, b, b_zero_point), b_scale)
    return _sum(step, np.abs(_centred(b, b_zero_point)), b_scale) + _rounded(mass, case)


@specified(
    exercise=_SIZES,
    multiple_of={"S": 8},
    factors=("x", "b"),
    accumulator="float32",
    shifted_by={"b": "b_zero_point"},
    post_ops=True,
    special=True,
    budget=_weight_only_budget,
    draws=_DRAWS,
    result="c",
)
def linear_weight_only(
    x: Operands[np.ndarray, "M G S"],
    b: GroupWeights[np.ndarray, "G S N"],
    b_scale: Float32[np.ndarray, "G N"],
    b_zero_point: Int32[np.ndarray, "G N"] | None = None,
) -> FloatOut[np.ndarray, "M N"]:
    """c = Σ_g b_scale[g, n] · Σ_s (b[g, s, n] − b_zero_point[g, n]) · x[m, g, s]. A row that is not
    finite gives a row of NaN."""
    finite = np.isfinite(x).all(axis=(1, 2), keepdims=True)
    return _sum(np.where(finite, x, np.nan), _centred(b, b_zero_point), b_scale)


def _quantized(x: Array, symmetric: bool) -> tuple[Array, Array, Array]:
    """(centred integers, the magnitudes that the kernels multiply, scales) of the rows of x."""
    q, scale, zero = quantize_rows(x.reshape(len(x), -1).astype(np.float32), symmetric)
    centre = zero.astype(np.int64)[:, None]
    centred = (q.astype(np.int64) - centre).astype(np.float64)
    magnitude = np.abs(q.astype(np.float64) - 128) + np.abs(centre - 128)
    return centred.reshape(x.shape), magnitude.reshape(x.shape), scale.astype(np.float64)[:, None]


def _groups_budget(
    case: Case, x: Array, b: Array, b_scale: Array, *, symmetric: bool, **zero_point: Array
) -> Array:
    _, magnitude, row_scale = _quantized(x, symmetric)
    return _rounded(_sum(magnitude, _unsigned(case, b, **zero_point), b_scale) * row_scale, case)


def _ideal(*, symmetric: bool, **inputs: Array) -> Array:
    return linear_weight_only.reference(**inputs)


@specified(
    exercise=_SIZES,
    multiple_of={"S": 8},
    factors=("x", "b"),
    multiplied_as={"x": "uint8"},
    shifted_by={"x": "x", "b": "b_zero_point"},
    post_ops=True,
    special=True,
    budget=_groups_budget,
    ideal=_ideal,
    draws={**_DRAWS, "x": draw_activations},
    result="c",
)
def linear_groups(
    x: Float32[np.ndarray, "M G S"],
    b: GroupWeights[np.ndarray, "G S N"],
    b_scale: Float32[np.ndarray, "G N"],
    b_zero_point: Int32[np.ndarray, "G N"] | None = None,
    *,
    symmetric: bool = False,
) -> Float32[np.ndarray, "M N"]:
    """linear_weight_only of dequantize(quantize_rows(x)): each row of x has a scale and a zero
    point of its own, groups are summed exactly, scaled and added in float32, in ascending order."""
    q, _, row_scale = _quantized(x, symmetric)
    return _sum(q, _centred(b, b_zero_point), b_scale) * row_scale


_SHIFTS = np.arange(0, 32, 4)


def _parts(words: Array, scale: Array, zero: Array) -> tuple[Array, Array, Array]:
    """The values, and the scale and zero point of each."""
    values = (words[:, :, None] >> _SHIFTS & 15).reshape(len(words), -1)
    group = values.shape[1] // scale.shape[1]
    wide, centre = (np.repeat(one, group, axis=1) for one in (scale, zero & 15))
    return values, wide, centre


def _int4_slack(
    case: Case, x: Array, words: Array, scale: Array, zero: Array, *, group_size: int
) -> Array:
    """The weight may be rounded to x's dtype; one row of x to 16 bits relative to the greatest of
    each 32; and the zero point's share may be subtracted at the end, from 8 on."""
    values, wide, centre = _parts(words, scale, zero)
    size = np.abs(wide)
    rounded = np.abs(x) @ (size * np.abs(values - centre)).T
    greatest = np.abs(x).reshape(len(x), -1, 32).max(axis=2).repeat(32, axis=1)
    terms = greatest @ (size * (np.abs(values - 8) + np.abs(centre - 8))).T
    own = 2.0**-15 * (len(x) == 1) + (x.shape[1] + 8) * _UNIT
    return case.dtype("x").unit * rounded + own * terms


@specified(
    exercise={"M": 20, "N": 70, "K": 256},
    multiple_of={"K": "group_size"},
    tried={"group_size": (128, 32)},
    operations="2*M*N*K",
    slack=_int4_slack,
)
def int4_matmul(
    x: Halves[np.ndarray, "M K"],
    words: Int32[np.ndarray, "N K//8"],
    scale: Halves[np.ndarray, "N K//group_size"],
    zero: UInt8[np.ndarray, "N K//group_size"],
    *,
    group_size: int = 128,
) -> Halves[np.ndarray, "M N"]:
    """z = x wᵀ, w = scale · (value - zero) in groups along a row; 8 values to a word, the first in
    its lowest bits; of zero the lower 4 bits."""
    values, wide, centre = _parts(words, scale, zero)
    return x @ (wide * (values - centre)).T
