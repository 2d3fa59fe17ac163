"""The products of two matrices."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lowbit.numerics import quantize_rows
from lowbit.spec.operation import Array, Case, Inputs, Specification
from lowbit.spec.tensors import Tensor, draw_activations, draw_scales, draw_zero_points_of


def integer_product(a: Array, b: Array) -> NDArray[np.int64]:
    """a @ b exactly, for integers a [M, K], b [K, N] of at most 9 bits and a sign.

    Computed in float64, whose 53 bits hold every partial sum up to K = 2**35: as exact as int64,
    and hundreds of times faster, because NumPy multiplies only floats through BLAS.
    """
    return (a.astype(np.float64) @ b.astype(np.float64)).astype(np.int64)


def _matmul(inputs: Inputs, case: Case) -> Array:
    return integer_product(inputs["a"], inputs["b"])


def _exact(inputs: Inputs, case: Case) -> Array:
    return np.zeros(())


def _scaled(total: Array, row_scale: Array, inputs: Inputs) -> Array:
    """total [M, N] * row_scale [M] * b_scale [N] + bias [N], in float64."""
    product = total * row_scale.astype(np.float64)[:, None] * inputs["b_scale"].astype(np.float64)
    return product + inputs["bias"].astype(np.float64) if "bias" in inputs else product


def _scaled_budget(total: Array, row_scale: Array, inputs: Inputs) -> Array:
    """The largest error of ((float32(total) * row_scale) * b_scale) + bias in float32.

    Each float32 operation returns its exact result times (1 + d), |d| <= u = 2**-24, plus at most
    half the smallest subnormal, e = 2**-150, when it underflows (Higham, Accuracy and Stability
    of Numerical Algorithms, section 2.1 and 2.8). Three roundings reach the product p, one more
    the sum: |error| <= ((1 + u)**3 - 1) |p| (1 + u) + u |p + bias| + e (b_scale + 1) (1 + u).
    The reference is itself rounded, to float64: at most three roundings of 2**-53.
    """
    unit, tiny = 2.0**-24, 2.0**-150
    column_scale = inputs["b_scale"].astype(np.float64)
    product = np.abs(total * row_scale.astype(np.float64)[:, None] * column_scale)
    bias = np.abs(inputs["bias"].astype(np.float64)) if "bias" in inputs else np.zeros(1)
    grown = ((1 + unit) ** 3 - 1) * product + tiny * (column_scale + 1)
    budget = grown + 3 * 2.0**-53 * (product + bias)
    if "bias" in inputs:
        budget = budget + unit * (grown + np.abs(_scaled(total, row_scale, inputs)))
    return budget


def _centred(inputs: Inputs) -> Array:
    """The exact sums over k of (a - its zero point) * (b - its zero point): int64 [M, N]."""
    a, b = (inputs[name].astype(np.int64) for name in ("a", "b"))
    if "a_zero_point" in inputs:
        a = a - inputs["a_zero_point"][:, None]
    if "b_zero_point" in inputs:
        b = b - inputs["b_zero_point"]
    return integer_product(a, b)


def _matmul_scaled(inputs: Inputs, case: Case) -> Array:
    return _scaled(_centred(inputs), inputs["a_scale"], inputs)


def _matmul_scaled_budget(inputs: Inputs, case: Case) -> Array:
    return _scaled_budget(_centred(inputs), inputs["a_scale"], inputs)


def _dynamic_sums(inputs: Inputs, case: Case) -> tuple[Array, Array]:
    """Exact sums [M, N] of the quantized rows of x, and their scales [M] (NaN if not finite)."""
    q, scale, zero_point = quantize_rows(inputs["x"], "symmetric" in case.options)
    centred = q.astype(np.int64) - zero_point[:, None]
    return integer_product(centred, inputs["b"]), scale


def _linear_dynamic(inputs: Inputs, case: Case) -> Array:
    return _scaled(*_dynamic_sums(inputs, case), inputs)


def _linear_dynamic_budget(inputs: Inputs, case: Case) -> Array:
    return _scaled_budget(*_dynamic_sums(inputs, case), inputs)


def _linear(inputs: Inputs, case: Case) -> Array:
    """x [M, K] @ (b * b_scale) [K, N] + bias in float64."""
    x, b = inputs["x"].astype(np.float64), inputs["b"].astype(np.float64)
    return _scaled(x @ b, np.ones(len(x)), inputs)


MATMUL = Specification(
    name="matmul",
    inputs=(Tensor.parse("a: u8|s8[M K]"), Tensor.parse("b: s8|u8|s4|u4[K N]")),
    output=Tensor.parse("c: s32[M N]"),
    factors=("a", "b"),
    reference=_matmul,
    budget=_exact,
)
"""c[m, n] = sum over k of a[m, k] * b[k, n], exactly."""

MATMUL_SCALED = Specification(
    name="matmul_scaled",
    inputs=(
        Tensor.parse("a: u8|s8[M K]", shifted_by="a_zero_point"),
        Tensor.parse("b: s8|u8[K N]", shifted_by="b_zero_point"),
        Tensor.parse("a_scale: f32[M]", draw=draw_scales),
        Tensor.parse("b_scale: f32[N]", draw=draw_scales),
        Tensor.parse("a_zero_point: s32[M]?", draw=draw_zero_points_of("a")),
        Tensor.parse("b_zero_point: s32[N]?", draw=draw_zero_points_of("b")),
        Tensor.parse("bias: f32[N]?"),
    ),
    output=Tensor.parse("c: f32[M N]"),
    factors=("a", "b"),
    reference=_matmul_scaled,
    budget=_matmul_scaled_budget,
)
"""c = sums * a_scale[m] * b_scale[n] + bias[n], rounded to float32 after each step, where
sums[m, n] = sum over k of (a[m, k] - a_zero_point[m]) * (b[k, n] - b_zero_point[n]) is exact."""

LINEAR_DYNAMIC = Specification(
    name="linear_dynamic",
    inputs=(
        Tensor.parse("x: f32[M K]", draw=draw_activations, multiplied_as="u8", shifted_by="x"),
        Tensor.parse("b: s8[K N]"),
        Tensor.parse("b_scale: f32[N]", draw=draw_scales),
        Tensor.parse("bias: f32[N]?"),
    ),
    output=Tensor.parse("c: f32[M N]"),
    factors=("x", "b"),
    reference=_linear_dynamic,
    budget=_linear_dynamic_budget,
    ideal=_linear,
    options=("symmetric",),
)
"""c = dequantize(quantize_rows(x)) @ (b * b_scale) + bias: each row of x gets a scale and a zero
point of its own (`lowbit.numerics.quantize_rows`), and is multiplied in 8 bits."""
