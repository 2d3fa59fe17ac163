"""Functions of float32 vectors, for epilogues: written in elementary operations only.

Each operation rounds once and none is fused, so that the result is the same bits on every
instruction set. Accuracies are stated where the functions are specified, in spec/epilogue.py.
"""

from __future__ import annotations

from lowbit.isa.generic import maximum, minimum, select
from lowbit.isa.types import f32, s32, with_element
from lowbit.jit.value import Value

_ROUND = 1.5 * 2.0**23  # added to |x| < 2^22, it leaves round-half-even(x) in the low bits
_ROUND_BITS = 0x4B400000
_LOG2_E = 1.4426950408889634
# ln 2 in two parts, of which the first has so few bits that small multiples of it are exact.
_LN_2_HIGH, _LN_2_LOW = 0.693359375, -2.12194440e-4
# exp(r) = 1 + r + r²·p(r) for |r| ≤ ln 2 / 2, from the Cephes library's expf.
_EXP = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
_LEAST_EXP, _GREATEST_EXP = -87.0, 88.0  # so that the power of two is a normal number
# erfc(z) = p(1 / (1 + 0.3275911 z)) · exp(-z²), Abramowitz and Stegun, formula 7.1.26.
_ERFC = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
_ERFC_T = 0.3275911
_GELU_TANH = 0.7978845608028654, 0.044715  # sqrt(2/π), and the cubic term's coefficient


def rounded(value: Value) -> Value:
    """Round half to even, as s32, for |value| < 2^22."""
    signed = with_element(value.type, s32)
    return (value + _ROUND).bits(signed) - _ROUND_BITS


def _constant(like: Value, value: float) -> Value:
    return like.machine.constant(value, like.type)


def _polynomial(x: Value, coefficients: tuple[float, ...]) -> Value:
    """Horner's rule, highest power first."""
    result = _constant(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result = result * x + coefficient
    return result


def exp(x: Value) -> Value:
    """e^x, for x clamped to [-87, 88]."""
    x = minimum(maximum(x, _constant(x, _LEAST_EXP)), _constant(x, _GREATEST_EXP))
    n = rounded(x * _LOG2_E)
    whole = n.to(f32)
    r = x - whole * _LN_2_HIGH - whole * _LN_2_LOW
    fraction = _polynomial(r, _EXP) * (r * r) + r + 1.0
    power = ((n + 127) << 23).bits(with_element(x.type, f32))
    return fraction * power


def _vanishing(x: Value) -> Value:
    """`x`, no less than where x·σ(x) has long vanished, so that no huge factor revives it."""
    return maximum(x, _constant(x, -100.0))


def _logistic_of(x: Value, exponent: Value) -> Value:
    """x / (1 + e^exponent)."""
    return _vanishing(x) / (exp(exponent) + 1.0)


def silu(x: Value) -> Value:
    """x · σ(x)."""
    return _keeping_nan(x, _logistic_of(x, 0.0 - x))


def gelu_tanh(x: Value) -> Value:
    """x/2 · (1 + tanh(u)) with u = sqrt(2/π)·(x + 0.044715·x³), which is x / (1 + e^-2u)."""
    scale, cubic = _GELU_TANH
    inner = x + x * x * x * cubic
    return _keeping_nan(x, _logistic_of(x, inner * (-2.0 * scale)))


def gelu(x: Value) -> Value:
    """x · Φ(x), the normal distribution through erfc, accurate on both sides of zero."""
    magnitude = maximum(x, 0.0 - x)
    z = magnitude * 0.7071067811865476
    t = 1.0 / (z * _ERFC_T + 1.0)
    tail = _polynomial(t, _ERFC) * t * exp(0.0 - z * z) * 0.5
    return _keeping_nan(x, _vanishing(x) * select(x < 0.0, tail, 1.0 - tail))


def relu(x: Value) -> Value:
    """max(x, 0)."""
    return _keeping_nan(x, maximum(x, _constant(x, 0.0)))


def clamp(x: Value, low: Value, high: Value) -> Value:
    """x, but at least `low` and at most `high`."""
    return _keeping_nan(x, minimum(maximum(x, low), high))


def _keeping_nan(x: Value, result: Value) -> Value:
    """`result`, but NaN where x is NaN, which comparisons would lose."""
    return select(x.equals(x), result, x)


def canonical(x: Value) -> Value:
    """x, and for NaN the one whose bits are 0x7FC00000: which of its operands' NaNs an operation
    gives, and of which sign one that it makes is, differs between machines."""
    return select(x.equals(x), x, _constant(x, float("nan")))


FUNCTIONS = {"relu": relu, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu}
