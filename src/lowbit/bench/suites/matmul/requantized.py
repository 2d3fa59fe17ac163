"""The scaled product with 8 bits out: `matmul_scaled` where the next layer takes bytes again."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowbit.spec import MATMUL_SCALED, Case, Specification
from lowbit.spec.operation import Inputs
from lowbit.spec.tensors import Draw, Tensor, draw_scales

Array = NDArray[Any]

_UNIT = 2.0**-24


def quantized(real: Array, scale: float, zero_point: int) -> NDArray[np.uint8]:
    """clamp(round_half_even(real / scale) + zero_point, 0, 255)."""
    return np.clip(np.rint(real / scale) + zero_point, 0, 255).astype(np.uint8)


def quantization_of(real: Array) -> tuple[float, int]:
    """Scale and zero point that spread 8 bits over the range of `real`, widened to hold 0."""
    low, high = min(float(real.min()), 0.0), max(float(real.max()), 0.0)
    scale = float(np.float32((high - low) / 255)) or 1.0
    return scale, int(np.clip(np.rint(-low / scale), 0, 255))


def _draw_zero_point(draw: Draw) -> Array:
    return draw.rng.integers(0, 255, draw.shape, np.int32, endpoint=True)


def _steps(inputs: Inputs, case: Case) -> Array:
    """The float64 result in steps of the output, not yet rounded."""
    inverse = np.float32(1) / np.float32(inputs["out_scale"])
    return MATMUL_SCALED.reference(inputs, case) * np.float64(inverse)


def _rounded(steps: Array, inputs: Inputs) -> Array:
    return np.clip(np.rint(steps) + inputs["out_zero_point"], 0, 255).astype(np.int64)


def _reference(inputs: Inputs, case: Case) -> Array:
    return _rounded(_steps(inputs, case), inputs)


def _budget(inputs: Inputs, case: Case) -> Array:
    """How far rounding may lead away: a step where the float32 value, which is within the scaled
    product's budget and one more rounding, can lie on the other side of a half; elsewhere none."""
    steps = _steps(inputs, case)
    inverse = float(np.float32(1) / np.float32(inputs["out_scale"]))
    error = MATMUL_SCALED.budget(inputs, case) * inverse * (1 + _UNIT) + _UNIT * np.abs(steps)
    middle = _rounded(steps, inputs)
    above, below = (_rounded(steps + sign * error, inputs) for sign in (1, -1))
    return np.maximum(above - middle, middle - below)


MATMUL_REQUANTIZED = Specification(
    name="matmul_scaled",
    inputs=(
        *MATMUL_SCALED.inputs,
        Tensor.parse("out_scale: f32[]", draw=draw_scales),
        Tensor.parse("out_zero_point: s32[]", draw=_draw_zero_point),
    ),
    output=Tensor.parse("c: u8[M N]"),
    factors=MATMUL_SCALED.factors,
    reference=_reference,
    budget=_budget,
)
"""c = clamp(round_half_even(y * (1 / out_scale)) + out_zero_point, 0, 255), where y is the result
of MATMUL_SCALED."""
