"""σ(y) = 1 / (1 + e^−y), and the piecewise linear function in its place."""

from lowbit.isa.generic import maximum, minimum
from lowbit.isa.value import Value
from lowbit.kernels.cpu.shared.functions import Curve, constant, exp, rising, vanishing
from lowbit.kernels.cpu.shared.post_op import Elementwise, keeping_nan, post_ops

# For 8 bits, 8.2e-5 off, in half the time that a division takes.
COARSE = Curve(
    9.45,
    (
        6.78917244e-2,
        -8.15216824e-2,
        -1.17202401e-1,
        1.37025282e-1,
        9.87375006e-2,
        -1.11526549e-1,
        -2.05108132e-2,
        1.91805344e-2,
        2.15447359e-2,
        -2.50287913e-2,
        2.62183100e-2,
        -3.65384370e-2,
        7.46409371e-2,
    ),
    scaled=True,
)


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


post_ops.add("sigmoid", Elementwise(sigmoid, coarse=lambda x: rising(x, COARSE)))
post_ops.add("hardsigmoid", Elementwise(hardsigmoid))
post_ops.add("hardswish", Elementwise(hardswish))
