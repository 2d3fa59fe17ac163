"""σ(y) = 1 / (1 + e^−y), and the piecewise linear function in its place."""

from lowbit.isa.generic import maximum, minimum
from lowbit.isa.value import Value
from lowbit.kernels.cpu.shared.functions import constant, exp, vanishing
from lowbit.kernels.cpu.shared.post_op import Elementwise, keeping_nan, post_ops


def sigmoid(x: Value) -> Value:
    """1 / (1 + e^-x)."""
    return keeping_nan(x, 1.0 / (exp(0.0 - x) + 1.0))


def _ramp(x: Value) -> Value:
    """min(max(x / 6 + 1/2, 0), 1), as six times this, over six."""
    inner = minimum(maximum(x + 3.0, constant(x, 0.0)), constant(x, 6.0))
    return inner * (1.0 / 6.0)


def hardsigmoid(x: Value) -> Value:
    """min(max(x / 6 + 1/2, 0), 1)."""
    return keeping_nan(x, _ramp(x))


def hardswish(x: Value) -> Value:
    """x · hardsigmoid(x)."""
    return keeping_nan(x, vanishing(x) * _ramp(x))


post_ops.add("sigmoid", Elementwise(sigmoid))
post_ops.add("hardsigmoid", Elementwise(hardsigmoid))
post_ops.add("hardswish", Elementwise(hardswish))
