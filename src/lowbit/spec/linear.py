"""Linear layers whose weight has groups along K: x [M, G·S] @ b [G·S, N], a scale for each group.

Groups are a dimension of their own here, G of S elements each, so that shapes say what belongs
together; the functions of the library take the same memory as x [M, K] and b [K, N].
"""

from __future__ import annotations

import numpy as np

from lowbit.numerics import quantize_rows
from lowbit.spec.operation import Array, Case, Inputs, Specification
from lowbit.spec.tensors import Tensor, draw_activations, draw_scales, draw_zero_points_of

_UNIT = 2.0**-24  # relative error of one float32 operation
_TINY = 2.0**-149  # its absolute error where the result is subnormal
_ROUNDINGS = 12  # float32 operations on a group's sums, at most
LARGEST = {"f32": 2.0**22 - 1, "bf16": 127.0 * 257}
"""What a group's greatest activation becomes in fixed point, by the type of the activations."""


def _centred(inputs: Inputs) -> Array:
    """b less its zero points, float64 [G, S, N]."""
    b = inputs["b"].astype(np.float64)
    return b - inputs["b_zero_point"][:, None] if "b_zero_point" in inputs else b


def _nibbles(inputs: Inputs, case: Case) -> Array:
    """Σ over what the kernels multiply: the nibble as it is stored, and what is taken from it."""
    least = case.dtype(case.spec.tensor("b")).limits[0]
    nibbles = inputs["b"].astype(np.float64) - least
    return nibbles + np.abs(nibbles - _centred(inputs))


def _with_bias(product: Array, inputs: Inputs) -> Array:
    return product + inputs["bias"].astype(np.float64) if "bias" in inputs else product


def _budget(product: Array, mass: Array, inputs: Inputs, groups: int) -> Array:
    """Rounding of a sum over groups, `mass` being the sum of the magnitudes that go into it."""
    budget = (_ROUNDINGS + groups) * (_UNIT * mass + _TINY)
    if "bias" in inputs:
        budget = budget + _UNIT * (np.abs(_with_bias(product, inputs)) + budget)
    return budget


def _sum(x: Array, weight: Array, scale: Array) -> Array:
    """Σ_g Σ_s x[m, g, s] · weight[g, s, n] · scale[g, n]."""
    return np.einsum("mgs,gsn,gn->mn", x, weight, scale.astype(np.float64), optimize=True)


def _weight_only(inputs: Inputs, case: Case) -> Array:
    product = _sum(inputs["x"].astype(np.float64), _centred(inputs), inputs["b_scale"])
    return _with_bias(product, inputs)


def _weight_only_budget(inputs: Inputs, case: Case) -> Array:
    """Fixed point: each activation is off by at most one step of its group, half of it from
    rounding and half from the float32 quotient; steps below the normal numbers count as zero."""
    x, scale = np.abs(inputs["x"].astype(np.float64)), inputs["b_scale"]
    largest = LARGEST["bf16" if "bfloat16" in case.options else "f32"]
    step = x.max(axis=2, keepdims=True, initial=0) / largest
    step = np.where(step <= 2.0**-126, step * largest, step) + 0 * x
    product = _sum(inputs["x"].astype(np.float64), _centred(inputs), scale)
    mass = _sum(x + step, _nibbles(inputs, case), scale)
    fixed = _sum(step, np.abs(_centred(inputs)), scale)
    return fixed + _budget(product, mass, inputs, case.sizes["G"])


def _quantized(inputs: Inputs, case: Case) -> tuple[Array, Array, Array]:
    """(centred integers, the magnitudes that the kernels multiply, scales) of the rows of x."""
    x = inputs["x"]
    q, scale, zero = quantize_rows(x.reshape(len(x), -1), "symmetric" in case.options)
    centre = zero.astype(np.int64)[:, None]
    centred = (q.astype(np.int64) - centre).astype(np.float64)
    magnitude = np.abs(q.astype(np.float64) - 128) + np.abs(centre - 128)
    return centred.reshape(x.shape), magnitude.reshape(x.shape), scale.astype(np.float64)[:, None]


def _groups(inputs: Inputs, case: Case) -> Array:
    q, _, row_scale = _quantized(inputs, case)
    return _with_bias(_sum(q, _centred(inputs), inputs["b_scale"]) * row_scale, inputs)


def _groups_budget(inputs: Inputs, case: Case) -> Array:
    q, magnitude, row_scale = _quantized(inputs, case)
    product = _sum(q, _centred(inputs), inputs["b_scale"]) * row_scale
    mass = _sum(magnitude, _nibbles(inputs, case), inputs["b_scale"]) * row_scale
    return _budget(product, mass, inputs, case.sizes["G"])


_B = (
    Tensor.parse("b: s4|u4[G S N]", shifted_by="b_zero_point"),
    Tensor.parse("b_scale: f32[G N]", draw=draw_scales),
    Tensor.parse("b_zero_point: s32[G N]?", draw=draw_zero_points_of("b")),
    Tensor.parse("bias: f32[N]?"),
)

LINEAR_WEIGHT_ONLY = Specification(
    name="linear_weight_only",
    inputs=(Tensor.parse("x: f32[M G S]"), *_B),
    output=Tensor.parse("c: f32[M N]"),
    factors=("x", "b"),
    reference=_weight_only,
    budget=_weight_only_budget,
    accumulator="f32",
    options=("bfloat16",),
)
"""c = Σ_g b_scale[g, n] · Σ_s (b[g, s, n] − b_zero_point[g, n]) · x[m, g, s] + bias[n]. With the
option, x holds numbers of bfloat16, and the budget is that of 16 bits."""

LINEAR_GROUPS = Specification(
    name="linear_groups",
    inputs=(
        Tensor.parse("x: f32[M G S]", draw=draw_activations, multiplied_as="u8", shifted_by="x"),
        *_B,
    ),
    output=Tensor.parse("c: f32[M N]"),
    factors=("x", "b"),
    reference=_groups,
    budget=_groups_budget,
    ideal=_weight_only,
    options=("symmetric",),
)
"""As LINEAR_WEIGHT_ONLY on dequantize(quantize_rows(x)): each row of x has a scale and a zero
point of its own, groups are summed exactly, scaled and added in float32, in ascending order."""
