"""The products of two matrices."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Int8, Int32
from numpy.typing import NDArray

from lowbit.numerics import quantize_rows
from lowbit.spec.case import Case
from lowbit.spec.data import draw_activations, draw_scales, draw_zero_points_of
from lowbit.spec.dtypes import DTYPES, FLOAT32_UNIT, Array
from lowbit.spec.operations import (
    Addend,
    AnyWeights,
    Bytes,
    ByteWeights,
    FloatOut,
    Floats,
    Operands,
    ScaledOut,
    specified,
)
from lowbit.spec.post_ops import PostOp, applied

POST_OPS: tuple[tuple[PostOp, ...] | None, ...] = (
    None,
    ("residual", "relu", "bias"),
    ("bias", "gelu", "residual", (-0.25, 6.0)),
    ("gelu_tanh", "bias", "silu"),
)
"""What post-operations are tried."""

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
    a: Array, b: Array, a_zero_point: Array | None, b_zero_point: Array | None
) -> NDArray[np.int64]:
    """The exact sums over k of (a - its zero point) * (b - its zero point): int64 [M, N]."""
    a = a if a_zero_point is None else a - a_zero_point[:, None]
    return integer_product(a, b if b_zero_point is None else b - b_zero_point)


def scaled(
    total: Array,
    row_scale: Array,
    b_scale: Array,
    bias: Array | None,
    residual: Array | None,
    post_ops: tuple[PostOp, ...] | None,
) -> tuple[Array, Array]:
    """total [M, N] * row_scale [M] * b_scale [N] in float64, with its post-operations, and the
    largest error of (float32(total) * row_scale) * b_scale in float32 with the same.

    Each float32 operation returns its exact result times (1 + d), |d| <= u = 2**-24, plus at most
    half the smallest subnormal, e = 2**-150, when it underflows (Higham, Accuracy and Stability
    of Numerical Algorithms, section 2.1 and 2.8). Three roundings reach the product p:
    |error| <= ((1 + u)**3 - 1) |p| + e (b_scale + 1) (1 + u). The reference is itself rounded, to
    float64: at most three roundings of 2**-53. Where a step overflows, anything may come out.
    """
    product = total * row_scale[:, None] * b_scale
    error = ((1 + FLOAT32_UNIT) ** 3 - 1 + 3 * _WIDE_UNIT) * np.abs(product)
    error = error + _FLOAT32.least / 2 * (np.abs(b_scale) + 1)
    error = np.where(np.abs(total * row_scale[:, None]) > _FLOAT32.largest, np.inf, error)
    return applied(product, error, post_ops, bias, residual)


def _matmul_scaled(
    a: Array,
    b: Array,
    a_scale: Array,
    b_scale: Array,
    a_zero_point: Array | None = None,
    b_zero_point: Array | None = None,
    bias: Array | None = None,
    residual: Array | None = None,
    out_scale: Array | None = None,
    out_zero_point: Array | None = None,
    *,
    post_ops: tuple[PostOp, ...] | None,
) -> tuple[Array, Array]:
    total = _centred(a, b, a_zero_point, b_zero_point)
    value, error = scaled(total, a_scale, b_scale, bias, residual, post_ops)
    if out_scale is None or out_zero_point is None:
        return value, error
    inverse = float(np.float32(1) / np.float32(out_scale))
    steps = value * inverse
    error = error * inverse * (1 + FLOAT32_UNIT) + FLOAT32_UNIT * np.abs(steps)
    # A step of the output where a float32 value may lie on the other side of a half; else none.
    middle = np.rint(steps)
    error = np.maximum(np.rint(steps + error) - middle, middle - np.rint(steps - error))
    return middle + out_zero_point, error


def _matmul_scaled_budget(case: Case, **arguments: Array) -> Array:
    return _matmul_scaled(**arguments)[1]


@specified(
    exercise=_SIZES,
    factors=("a", "b"),
    shifted_by={"a": "a_zero_point", "b": "b_zero_point"},
    tried={"post_ops": POST_OPS},
    only_for=dict.fromkeys(("out_scale", "out_zero_point"), ("uint8", "int8")),
    saturates=True,
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
    bias: Float32[np.ndarray, "N"] | None = None,
    residual: Float32[np.ndarray, "M N"] | None = None,
    out_scale: Float32[np.ndarray, ""] | None = None,
    out_zero_point: Int32[np.ndarray, ""] | None = None,
    *,
    post_ops: tuple[PostOp, ...] | None = None,
) -> ScaledOut[np.ndarray, "M N"]:
    """y = sums * a_scale[m] * b_scale[n], rounded to float32 after each step, where
    sums[m, n] = sum over k of (a[m, k] - a_zero_point[m]) * (b[k, n] - b_zero_point[n]) is exact;
    then the post-operations. An output of 8 bits is
    clamp(round_half_even(y * (1 / out_scale)) + out_zero_point)."""
    return _matmul_scaled(
        a, b, a_scale, b_scale, a_zero_point, b_zero_point, bias, residual, out_scale,
        out_zero_point, post_ops=post_ops,
    )[0]  # fmt: skip


def _linear_dynamic(
    x: Array,
    b: Array,
    b_scale: Array,
    bias: Array | None = None,
    residual: Array | None = None,
    *,
    symmetric: bool,
    post_ops: tuple[PostOp, ...] | None,
) -> tuple[Array, Array]:
    q, scale, zero_point = quantize_rows(x.astype(np.float32), symmetric)
    total = integer_product(q.astype(np.int64) - zero_point[:, None], b)
    return scaled(total, scale.astype(np.float64), b_scale, bias, residual, post_ops)


def _linear_dynamic_budget(case: Case, **arguments: Array) -> Array:
    return _linear_dynamic(**arguments)[1]


def _linear(
    x: Array,
    b: Array,
    b_scale: Array,
    bias: Array | None = None,
    residual: Array | None = None,
    *,
    symmetric: bool,
    post_ops: tuple[PostOp, ...] | None,
) -> Array:
    """With nothing quantized: x [M, K] @ (b * b_scale) [K, N], and what follows."""
    return scaled(x @ b, np.ones(len(x)), b_scale, bias, residual, post_ops)[0]


@specified(
    exercise=_SIZES,
    factors=("x", "b"),
    multiplied_as={"x": "uint8"},
    shifted_by={"x": "x"},
    tried={"post_ops": POST_OPS},
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
    bias: Float32[np.ndarray, "N"] | None = None,
    residual: Float32[np.ndarray, "M N"] | None = None,
    *,
    symmetric: bool = False,
    post_ops: tuple[PostOp, ...] | None = None,
) -> Float32[np.ndarray, "M N"]:
    """c = dequantize(quantize_rows(x)) @ (b * b_scale), then the post-operations: each row of x
    gets a scale and a zero point of its own (`lowbit.numerics.quantize_rows`), and is multiplied in
    8 bits. A row that is not finite gives a row of NaN."""
    return _linear_dynamic(x, b, b_scale, bias, residual, symmetric=symmetric, post_ops=post_ops)[0]


def _gemm_budget(
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
    budget=_gemm_budget,
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
