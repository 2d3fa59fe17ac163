"""The products of two matrices."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Int8, Int32, UInt8
from numpy.typing import NDArray

from lowbit.numerics import quantize_rows
from lowbit.spec.case import Case
from lowbit.spec.data import draw_activations, draw_scales, draw_zero_points_of
from lowbit.spec.dtypes import DTYPES, FLOAT32_UNIT, Array
from lowbit.spec.dtypes import FLOAT32_UNIT as _UNIT
from lowbit.spec.operations import (
    Addend,
    AnyWeights,
    Bytes,
    ByteWeights,
    FloatOut,
    Floats,
    GroupWeights,
    Halves,
    Operands,
    ScaledOut,
    specified,
)

# The products of two matrices.

_SIZES = {"M": 5, "N": 21, "K": 70}
_WIDE_UNIT = DTYPES["float64"].unit
_FLOAT32 = DTYPES["float32"]


def integer_product(a: Array, b: Array) -> NDArray[np.int64]:
    """a @ b exactly, for integers a [M, K], b [K, N] of at most 9 bits and a sign.

    Computed in float64, whose 53 bits hold every partial sum up to K = 2**35: as exact as int64,
    and hundreds of times faster, because NumPy multiplies only floats through BLAS.
    """
    return (a.astype(np.float64) @ b.astype(np.float64)).astype(np.int64)


@specified(exercise=_SIZES, factors=("a", "b"), result="c")
def matmul(
    a: Bytes[np.ndarray, "M K"], b: AnyWeights[np.ndarray, "K N"]
) -> Int32[np.ndarray, "M N"]:
    """c[m, n] = sum over k of a[m, k] * b[k, n], exactly."""
    return integer_product(a, b)


def _centred(
    a: Array, b: Array, a_zero_point: Array | None = None, b_zero_point: Array | None = None
) -> NDArray[np.int64]:
    """The exact sums over k of (a - its zero point) * (b - its zero point): int64 [M, N]."""
    a = a if a_zero_point is None else a - a_zero_point[:, None]
    return integer_product(a, b if b_zero_point is None else b - b_zero_point)


def scaled_error(total: Array, row_scale: Array, b_scale: Array) -> Array:
    """The largest error of (float32(total) * row_scale) * b_scale in float32, for exact sums total
    [M, N], row_scale [M] and b_scale [N].

    Each float32 operation returns its exact result times (1 + d), |d| <= u = 2**-24, plus at most
    half the smallest subnormal, e = 2**-150, when it underflows (Higham, Accuracy and Stability
    of Numerical Algorithms, section 2.1 and 2.8). Three roundings reach the product p:
    |error| <= ((1 + u)**3 - 1) |p| + e (b_scale + 1) (1 + u); no more where the scales are
    multiplied first. The reference is itself rounded, to float64: at most three roundings of
    2**-53. Where a step overflows, anything may come out.
    """
    rows = np.abs(total * row_scale[:, None])
    error = ((1 + FLOAT32_UNIT) ** 3 - 1 + 3 * _WIDE_UNIT) * rows * np.abs(b_scale)
    error = error + _FLOAT32.least / 2 * (np.abs(b_scale) + 1)
    return np.where(rows > _FLOAT32.largest, np.inf, error)


def _matmul_scaled_budget(
    case: Case, a: Array, b: Array, a_scale: Array, b_scale: Array, **zero_points: Array
) -> Array:
    return scaled_error(_centred(a, b, **zero_points), a_scale, b_scale)


@specified(
    exercise=_SIZES,
    factors=("a", "b"),
    shifted_by={"a": "a_zero_point", "b": "b_zero_point"},
    post_ops=True,
    budget=_matmul_scaled_budget,
    draws={
        **dict.fromkeys(("a_scale", "b_scale", "out_scale"), draw_scales),
        "a_zero_point": draw_zero_points_of("a"),
        "b_zero_point": draw_zero_points_of("b"),
        "out_zero_point": draw_zero_points_of("c"),
    },
    result="c",
)
def matmul_scaled(
    a: Bytes[np.ndarray, "M K"],
    b: ByteWeights[np.ndarray, "K N"],
    a_scale: Float32[np.ndarray, "M"],
    b_scale: Float32[np.ndarray, "N"],
    a_zero_point: Int32[np.ndarray, "M"] | None = None,
    b_zero_point: Int32[np.ndarray, "N"] | None = None,
) -> ScaledOut[np.ndarray, "M N"]:
    """c = sums * a_scale[m] * b_scale[n], rounded to float32 after each step, where
    sums[m, n] = sum over k of (a[m, k] - a_zero_point[m]) * (b[k, n] - b_zero_point[n]) is exact.
    """
    return _centred(a, b, a_zero_point, b_zero_point) * a_scale[:, None] * b_scale


def _quantized(x: Array, b: Array, symmetric: bool) -> tuple[Array, Array]:
    """The exact sums [M, N] of the quantized rows of x, and their scales [M], NaN if not finite."""
    q, scale, zero_point = quantize_rows(x.astype(np.float32), symmetric)
    total = integer_product(q.astype(np.int64) - zero_point[:, None], b)
    return total, scale.astype(np.float64)


def _linear_dynamic_budget(
    case: Case, x: Array, b: Array, b_scale: Array, *, symmetric: bool
) -> Array:
    return scaled_error(*_quantized(x, b, symmetric), b_scale)


def _linear(x: Array, b: Array, b_scale: Array, *, symmetric: bool) -> Array:
    """With nothing quantized: x [M, K] @ (b * b_scale) [K, N]."""
    return x @ b * b_scale


@specified(
    exercise=_SIZES,
    factors=("x", "b"),
    multiplied_as={"x": "uint8"},
    shifted_by={"x": "x"},
    post_ops=True,
    special=True,
    budget=_linear_dynamic_budget,
    ideal=_linear,
    draws={"x": draw_activations, "b_scale": draw_scales},
    result="c",
)
def linear_dynamic(
    x: Float32[np.ndarray, "M K"],
    b: Int8[np.ndarray, "K N"],
    b_scale: Float32[np.ndarray, "N"],
    *,
    symmetric: bool = False,
) -> Float32[np.ndarray, "M N"]:
    """c = dequantize(quantize_rows(x)) @ (b * b_scale): each row of x gets a scale and a zero point
    of its own (`lowbit.numerics.quantize_rows`), and is multiplied in 8 bits. A row that is not
    finite gives a row of NaN."""
    total, scale = _quantized(x, b, symmetric)
    return total * scale[:, None] * b_scale


def gemm_budget(
    case: Case, a: Array, b: Array, c: Array | None = None, *, alpha: float, beta: float
) -> Array:
    """gamma_(K + 4) of |alpha| |a| |b| + |beta| |c|: K products, the additions of their sums and
    the factors round at most K + 4 times on the way of each term (Higham, section 3.1), wherever K
    is cut and whether products are fused or not. What underflows is lost; so is, on machines that
    multiply pairs of bfloat16, what is subnormal in these."""
    left, right = np.abs(a), np.abs(b)
    size = abs(alpha) * (left @ right)
    if c is not None and beta:
        size = size + abs(beta) * np.abs(c)
    steps = (a.shape[1] + 4) * FLOAT32_UNIT
    budget = steps / (1 - steps) * size + (a.shape[1] + 4) * (1 + abs(alpha)) * _FLOAT32.least
    if case.dtype("a").name == "bfloat16":
        first, second = (np.where(x < _FLOAT32.least_normal, 0, x) for x in (left, right))
        budget = budget + abs(alpha) * (left @ right - first @ second)
    # A sum whose parts overflow may be anything.
    return np.where((size > _FLOAT32.largest) & np.isfinite(size), np.inf, budget)


@specified(
    exercise=_SIZES,
    factors=("a", "b"),
    accumulator="float32",
    tried={"alpha": (1.0, -1.5), "beta": (0.0, 0.25)},
    special=True,
    budget=gemm_budget,
    result="out",
)
def gemm(
    a: Operands[np.ndarray, "M K"],
    b: Operands[np.ndarray, "K N"],
    c: Addend[np.ndarray, "M N"] | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> FloatOut[np.ndarray, "M N"]:
    """out = alpha * (a @ b) + beta * c, summed in float32. With beta = 0, c is not read."""
    product = alpha * (a @ b)
    return product if c is None or not beta else product + beta * c


_BATCH = {"B": 2, "M": 40, "K": 70, "N": 50}


@specified(exercise=_BATCH, operations="2*B*M*N*K")
def batched_matmul(
    x: Floats[np.ndarray, "B M K"], y: Floats[np.ndarray, "B K N"]
) -> Floats[np.ndarray, "B M N"]:
    """z_b = x_b y_b."""
    return x @ y


@specified(exercise=_BATCH, operations="2*B*M*N*K", result="dx")
def batched_matmul_dx(
    x: Floats[np.ndarray, "B M K"], y: Floats[np.ndarray, "B K N"], dz: Floats[np.ndarray, "B M N"]
) -> Floats[np.ndarray, "B M K"]:
    """dx_b = dz_b y_bᵀ."""
    return dz @ y.swapaxes(1, 2)


@specified(exercise=_BATCH, operations="2*B*M*N*K", result="dy")
def batched_matmul_dy(
    x: Floats[np.ndarray, "B M K"], y: Floats[np.ndarray, "B K N"], dz: Floats[np.ndarray, "B M N"]
) -> Floats[np.ndarray, "B K N"]:
    """dy_b = x_bᵀ dz_b."""
    return x.swapaxes(1, 2) @ dz


# Products with 4-bit weights in groups along K, a scale for each group.
#
# In the layers of CPUs groups are a dimension of their own, G of S elements each, so that shapes
# say what belongs together; the functions of the library take the same memory as x [M, K] and b [K,
# N].

_TINY = DTYPES["float32"].least
_ROUNDINGS = 12  # float32 operations on a group's sums, at most
LARGEST = {"float32": 2.0**22 - 1, "bfloat16": 127.0 * 257}
"""What a group's greatest activation becomes in fixed point, by the type of the activations."""

_GROUPED_SIZES = {"M": 5, "N": 21, "G": 2, "S": 32}
_DRAWS = {"b_scale": draw_scales, "b_zero_point": draw_zero_points_of("b")}


def _centred_groups(b: Array, b_zero_point: Array | None = None) -> Array:
    """b less its zero points, [G, S, N]."""
    return b if b_zero_point is None else b - b_zero_point[:, None]


def _unsigned(case: Case, b: Array, b_zero_point: Array | None = None) -> Array:
    """What the kernels multiply: unsigned integers, and the magnitude of what they subtract."""
    unsigned = b - case.dtype("b").low
    return unsigned + np.abs(unsigned - _centred_groups(b, b_zero_point))


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
    return _sum(step, np.abs(_centred_groups(b, b_zero_point)), b_scale) + _rounded(mass, case)


@specified(
    exercise=_GROUPED_SIZES,
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
    return _sum(np.where(finite, x, np.nan), _centred_groups(b, b_zero_point), b_scale)


def _quantized_rows(x: Array, symmetric: bool) -> tuple[Array, Array, Array]:
    """(centred integers, the magnitudes that the kernels multiply, scales) of the rows of x."""
    q, scale, zero = quantize_rows(x.reshape(len(x), -1).astype(np.float32), symmetric)
    centre = zero.astype(np.int64)[:, None]
    centred = (q.astype(np.int64) - centre).astype(np.float64)
    magnitude = np.abs(q.astype(np.float64) - 128) + np.abs(centre - 128)
    return centred.reshape(x.shape), magnitude.reshape(x.shape), scale.astype(np.float64)[:, None]


def _groups_budget(
    case: Case, x: Array, b: Array, b_scale: Array, *, symmetric: bool, **zero_point: Array
) -> Array:
    _, magnitude, row_scale = _quantized_rows(x, symmetric)
    return _rounded(_sum(magnitude, _unsigned(case, b, **zero_point), b_scale) * row_scale, case)


def _ideal(*, symmetric: bool, **inputs: Array) -> Array:
    return linear_weight_only.reference(**inputs)


@specified(
    exercise=_GROUPED_SIZES,
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
    q, _, row_scale = _quantized_rows(x, symmetric)
    return _sum(q, _centred_groups(b, b_zero_point), b_scale) * row_scale


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
