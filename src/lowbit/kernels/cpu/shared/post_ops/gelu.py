"""y·Φ(y), through the error function or GELU's tanh approximation."""

from lowbit.isa.generic import maximum, select
from lowbit.isa.value import Value
from lowbit.kernels.cpu.shared.functions import exp, logistic_of, polynomial, vanishing
from lowbit.kernels.cpu.shared.post_op import Elementwise, keeping_nan, post_ops

# erfc(z) = p(1 / (1 + 0.3275911 z)) · exp(-z²), Abramowitz and Stegun, formula 7.1.26.
_ERFC = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
_ERFC_T = 0.3275911
_TANH = 0.7978845608028654, 0.044715  # sqrt(2/π), and the cubic term's coefficient


def gelu(x: Value) -> Value:
    """x · Φ(x), the normal distribution through erfc, accurate on both sides of zero."""
    magnitude = maximum(x, 0.0 - x)
    z = magnitude * 0.7071067811865476
    t = 1.0 / (z * _ERFC_T + 1.0)
    tail = polynomial(t, _ERFC) * t * exp(0.0 - z * z) * 0.5
    return keeping_nan(x, vanishing(x) * select(x < 0.0, tail, 1.0 - tail))


def gelu_tanh(x: Value) -> Value:
    """x/2 · (1 + tanh(u)) with u = sqrt(2/π)·(x + 0.044715·x³), which is x / (1 + e^-2u)."""
    scale, cubic = _TANH
    inner = x + x * x * x * cubic
    return keeping_nan(x, logistic_of(x, inner * (-2.0 * scale)))


post_ops.add("gelu", Elementwise(gelu))
post_ops.add("gelu_tanh", Elementwise(gelu_tanh))
