"""y·Φ(y), by a polynomial, or GELU's tanh approximation."""

from lowbit.isa.generic import maximum, minimum
from lowbit.isa.value import Value
from lowbit.kernels.cpu.shared.functions import constant, fused, logistic_of, polynomial
from lowbit.kernels.cpu.shared.post_op import Elementwise, keeping_nan, post_ops

# Φ(t) = 1/2 + t·p(2 t² / 5.1² − 1) for |t| ≤ 5.1, a minimax fit of the absolute error: 3.9 u, and
# with the roundings of float32 5.4 u, u = 2^-24. At the ends it is bent to just below 0, and to 1.
_END = 5.1
_NORMAL = (
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
)
_TANH = 0.7978845608028654, 0.044715  # sqrt(2/π), and the cubic term's coefficient


def gelu(x: Value) -> Value:
    """x · Φ(x), Φ the normal distribution; 0 below -5.1, x above 5.1.

    Of two numbers `maximum` and `minimum` give the second where one is NaN, so that it stays.
    """
    inside = maximum(constant(x, -_END), x)
    t = minimum(constant(x, _END), inside)
    p = polynomial(fused(t * t, 2 / _END**2, -1.0), _NORMAL)
    return inside * maximum(constant(x, 0.0), fused(t, p, 0.5))


def gelu_tanh(x: Value) -> Value:
    """x/2 · (1 + tanh(u)) with u = sqrt(2/π)·(x + 0.044715·x³), which is x / (1 + e^-2u)."""
    scale, cubic = _TANH
    inner = fused(x * x * x, cubic, x)
    return keeping_nan(x, logistic_of(x, inner * (-2.0 * scale)))


post_ops.add("gelu", Elementwise(gelu))
post_ops.add("gelu_tanh", Elementwise(gelu_tanh))
