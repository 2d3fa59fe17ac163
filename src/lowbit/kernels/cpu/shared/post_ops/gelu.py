"""y·Φ(y), by a polynomial, or GELU's tanh approximation."""

from typing import NamedTuple

from lowbit.isa.generic import maximum, minimum
from lowbit.isa.value import Value
from lowbit.kernels.cpu.shared.functions import constant, fused, logistic_of, polynomial
from lowbit.kernels.cpu.shared.post_op import Elementwise, keeping_nan, post_ops


class _Curve(NamedTuple):
    """A function that rises from 0 to 1: 1/2 + t·p(t²) for |t| ≤ end, `scaled` 2 t² / end² − 1 in
    place of t², a minimax fit of the absolute error. At -end it is bent to just below 0."""

    end: float
    coefficients: tuple[float, ...]
    scaled: bool = False

    def gated(self, x: Value) -> Value:
        """x times that; 0 below the curve.

        Of two numbers `maximum` and `minimum` give the second where one is NaN, so that it stays.
        """
        inside = maximum(constant(x, -self.end), x)
        t = minimum(constant(x, self.end), inside)
        square = fused(t * t, 2 / self.end**2, -1.0) if self.scaled else t * t
        rising = fused(t, polynomial(square, self.coefficients), 0.5)
        return inside * maximum(constant(x, 0.0), rising)


# Φ(t): 3.9 u off, and with the roundings of float32 5.4 u, u = 2^-24.
_NORMAL = _Curve(
    5.1,
    (
        8.28035292e-4,
        -2.10537226e-3,
        1.98519626e-3,
        -2.88486155e-3,
        7.22836703e-3,
        -1.23105440e-2,
        1.73217598e-2,
        -2.39144918e-2,
        3.17400768e-2,
        -4.02331278e-2,
        5.07815965e-2,
        -6.90027117e-2,
        1.38605297e-1,
    ),
    scaled=True,
)
# For results of 8 bits (product/output.py): 6.7e-5 off, and with the tanh approximation 6.4e-5.
_COARSE = _Curve(
    3.82,
    (
        3.571143736e-8,
        -2.231904318e-6,
        6.00230087e-5,
        -9.264287655e-4,
        9.297691286e-3,
        -6.569035351e-2,
        3.986640275e-1,
    ),
)
_COARSE_TANH = _Curve(
    3.74,
    (
        4.305576695e-8,
        -2.569415074e-6,
        6.605823728e-5,
        -9.787267772e-4,
        9.515050799e-3,
        -6.602539867e-2,
        3.986747861e-1,
    ),
)
_TANH = 0.7978845608028654, 0.044715  # sqrt(2/π), and the cubic term's coefficient


def gelu(x: Value) -> Value:
    """x · Φ(x), Φ the normal distribution; 0 below -5.1, x above 5.1."""
    return _NORMAL.gated(x)


def gelu_tanh(x: Value) -> Value:
    """x/2 · (1 + tanh(u)) with u = sqrt(2/π)·(x + 0.044715·x³), which is x / (1 + e^-2u)."""
    scale, cubic = _TANH
    inner = fused(x * x * x, cubic, x)
    return keeping_nan(x, logistic_of(x, inner * (-2.0 * scale)))


post_ops.add("gelu", Elementwise(gelu))
post_ops.add("gelu_tanh", Elementwise(gelu_tanh))
post_ops.add("gelu_coarse", Elementwise(_COARSE.gated))
post_ops.add("gelu_tanh_coarse", Elementwise(_COARSE_TANH.gated))
