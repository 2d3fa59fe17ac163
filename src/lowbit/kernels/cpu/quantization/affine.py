"""What numerics/affine.py states, in kernels: float64 where it has float64, the same bits."""

from __future__ import annotations

import numpy as np

from lowbit.isa.generic import maximum, minimum, select
from lowbit.isa.types import Vector, element_of, f32, f64
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.numerics import IntFormat
from lowbit.numerics.affine import SMALLEST_SCALE

LARGEST = float(np.finfo(np.float32).max)
# Added to a number of less than a quarter of it and taken away again, it leaves the nearest
# integer, ties to even.
_ROUND = {f32: 1.5 * 2.0**23, f64: 1.5 * 2.0**52}


def nearest(value: Value, low: Value | None, high: Value | None) -> Value:
    """The nearest integers, ties to even, within integer bounds of less than 2^21; None: no number
    is beyond. Bounding first gives the same as bounding last."""
    if low is not None:
        value = maximum(value, low)
    if high is not None:
        value = minimum(value, high)
    magic = _ROUND[element_of(value.type)]
    return (value + magic) - magic


def parameters(
    k: Builder, low: Value, high: Value, fmt: IntFormat, symmetric: bool
) -> tuple[Value, Value]:
    """`affine_parameters` of vectors of float32, low ≤ 0 ≤ high: scales, and zero points as
    float32."""
    lanes = low.type.lanes  # type: ignore[union-attr]
    wide = Vector(f64, lanes)
    low, high = low.to(f64), high.to(f64)
    if symmetric:
        exact = maximum(0.0 - low, high) / float(fmt.qmax - fmt.midpoint)
    else:
        exact = (high - low) / float(fmt.qmax - fmt.qmin)
    floored = maximum(exact, k.constant(float(SMALLEST_SCALE), wide))
    nothing = low.equals(high)
    scale = select(nothing, k.constant(1, wide), floored).to(f32)
    if symmetric:
        return scale, k.constant(fmt.midpoint, Vector(f32, lanes))
    least = k.constant(fmt.qmin - fmt.qmax, wide)
    zero = float(fmt.qmin) - nearest(low / scale.to(f64), least, None)
    return scale, zero.to(f32)


def steps(x: Value, scale: Value, zero: Value, fmt: IntFormat) -> Value:
    """`quantize_affine` of float32, less the zero point, in float64; all three are vectors of
    float32."""
    z = zero.to(f64)
    return nearest(x.to(f64) / scale.to(f64), float(fmt.qmin) - z, float(fmt.qmax) - z)


def dequantized(k: Builder, steps: Value, scale: Value) -> Value:
    """`dequantize_affine`: float32."""
    largest = k.constant(LARGEST, scale.type)  # type: ignore[arg-type]
    return minimum(maximum(steps.to(f32) * scale, 0.0 - largest), largest)
