"""Functions of float32 vectors, for epilogues: written in elementary operations only.

Each operation rounds once, fused ones too, so that the result is the same bits on every instruction
set. Accuracies are stated where the functions are specified, in spec/post_ops.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from lowbit.isa.generic import any_, fma, maximum, minimum, select
from lowbit.isa.types import Scalar, Vector, f32, s32, u32, with_element
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder

_ROUND = 1.5 * 2.0**23  # added to |x| < 2^22, it leaves round-half-even(x) in the low bits
_ROUND_BITS = 0x4B400000
_ROUND_BIASED = _ROUND + 127  # leaves it as the exponent of a float32
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
# log(1 + z) = z − z²/2 + z³·p(z) for √½ ≤ 1 + z < √2, from the Cephes library's logf.
_LOG = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
_FLOAT32_ONE_UP = 1 << 23  # of an exponent, among the bits
_FLOAT16_BIAS = (127 - 15) * _FLOAT32_ONE_UP
_FLOAT16_ENDLESS = 31 * _FLOAT32_ONE_UP  # the exponent of infinities and NaN
_SQRT_HALF_BITS = 0x3F3504F3
_LEAST_EXP, _GREATEST_EXP = -87.0, 88.0  # so that the power of two is a normal number


def rounded(value: Value) -> Value:
    """Round half to even, as s32, for |value| < 2^22."""
    signed = with_element(value.type, s32)
    return (value + _ROUND).bits(signed) - _ROUND_BITS


def widened_float16(bits: Value) -> Value:
    """The bits of float32 numbers, u32, that are the same as these of float16, u16: normal or not,
    infinities and NaN. No number on the way is denormal, so that none is flushed to zero. Not every
    machine has an instruction for it."""
    whole = bits.to(s32)
    sign = (whole & 0x8000) << 16
    size = (whole & 0x7FFF) << 13  # fraction and exponent where float32 has them
    normal = size + _FLOAT16_BIAS
    normal = select(size < _FLOAT16_ENDLESS, normal, normal + _FLOAT16_BIAS)
    # As 2^-14 · (1 + fraction), from which the 1 is taken, exactly.
    first_normal = _FLOAT16_BIAS + _FLOAT32_ONE_UP
    small = (size + first_normal).bits(with_element(bits.type, f32)) - 2.0**-14
    small = small.bits(with_element(bits.type, s32))
    return (select(size < _FLOAT32_ONE_UP, small, normal) | sign).bits(with_element(bits.type, u32))


def ordered_bits(value: Value) -> Value:
    """float32 as s32 that order alike; −0 as 0. Negative floats order against their other bits."""
    bits = (value + 0.0).bits(with_element(value.type, s32))
    return select(bits < 0, bits ^ 0x7FFFFFFF, bits)


def constant(like: Value, value: float) -> Value:
    """The number in every lane of such a vector."""
    return like.machine.constant(value, like.type)


def constant_of(like: Value, element: Scalar, value: float) -> Value:
    """The same of another number type."""
    return like.machine.constant(value, with_element(like.type, element))


def fused(a: Value, b: Value | float, c: Value | float) -> Value:
    """a·b + c, rounded once."""
    b, c = (one if isinstance(one, Value) else constant(a, one) for one in (b, c))
    return fma(a, b, c)


def polynomial(x: Value, coefficients: tuple[float, ...]) -> Value:
    """Horner's rule, highest power first."""
    result = constant(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result = fused(result, x, coefficient)
    return result


def short_polynomial(x: Value, coefficients: tuple[float, ...]) -> Value:
    """Estrin's scheme, highest power first: as many steps wait for each other as the degree has
    bits, where Horner's rule lets all of them, so that few vectors keep the machine busy."""
    terms = [constant(x, one) for one in reversed(coefficients)]
    while len(terms) > 1:
        pairs = zip(terms[::2], terms[1::2], strict=False)
        odd = terms[-1:] if len(terms) % 2 else []
        terms, x = [fused(high, x, low) for low, high in pairs] + odd, x * x
    return terms[0]


def exp(x: Value) -> Value:
    """e^x, for x clamped to [-87, 88]."""
    x = minimum(maximum(x, constant(x, _LEAST_EXP)), constant(x, _GREATEST_EXP))
    biased = fused(x, _LOG2_E, _ROUND_BIASED)
    whole = biased - _ROUND_BIASED
    r = fused(whole, -_LN_2_LOW, fused(whole, -_LN_2_HIGH, x))
    fraction = fused(short_polynomial(r, _EXP), r * r, r) + 1.0
    power = (biased.bits(with_element(x.type, s32)) << 23).bits(with_element(x.type, f32))
    return fraction * power


def decay(x: Value) -> Value:
    """e^x for x ≤ 0: 0 below -87, so that what is masked by minus infinity counts nothing; NaN
    for NaN."""
    power = select(x < _LEAST_EXP, constant(x, 0.0), exp(x))
    return select(x.equals(x), power, x)


def log(x: Value) -> Value:
    """ln x for normal x > 0; NaN for NaN."""
    signed = with_element(x.type, s32)
    shifted = x.bits(signed) - _SQRT_HALF_BITS  # whose exponent is that of x / √½
    n = (shifted >> 23).to(f32)
    mantissa = (shifted & 0x7FFFFF) + _SQRT_HALF_BITS
    z = mantissa.bits(with_element(x.type, f32)) - 1.0
    square = z * z
    small = fused(polynomial(z, _LOG) * z, square, n * _LN_2_LOW)
    found = fused(n, _LN_2_HIGH, z + fused(square, -0.5, small))
    return select(x.equals(x), found, x)


def vanishing(x: Value) -> Value:
    """`x`, no less than where x·σ(x) has long vanished, so that no huge factor revives it."""
    return maximum(x, constant(x, -100.0))


def logistic_of(x: Value, exponent: Value) -> Value:
    """x / (1 + e^exponent)."""
    return vanishing(x) / (exp(exponent) + 1.0)


def canonical(x: Value) -> Value:
    """x, and for NaN the one whose bits are 0x7FC00000: which of its operands' NaNs an operation
    gives, and of which sign one that it makes is, differs between machines."""
    return select(x.equals(x), x, constant(x, float("nan")))


_SIGN = -(2**31)
_MOST_BITS = 0x7F7FFFFF  # of the greatest float32


def magnitude(x: Value) -> Value:
    """|x|."""
    signed = with_element(x.type, s32)
    return (x.bits(signed) & ~_SIGN).bits(with_element(x.type, f32))


def with_sign(x: Value, value: Value) -> Value:
    """A value that is not negative, with the sign of x, which a zero has too."""
    signed = with_element(x.type, s32)
    sign = x.bits(signed) & _SIGN
    return (value.bits(signed) | sign).bits(with_element(x.type, f32))


def not_finite(x: Value) -> Value:
    """Whether it is NaN or infinite."""
    return magnitude(x).bits(with_element(x.type, s32)) > _MOST_BITS


def rarely(
    condition: Value, values: Sequence[Value], repaired: Callable[[], Sequence[Value]]
) -> list[Value]:
    """Values, or in the lanes where a condition holds what is computed only if it does in one."""
    k = cast(Builder, condition.machine)
    several = isinstance(condition.type, Vector)
    with k.scope():
        registers = [k.register(value) for value in values]
        for _ in k.when(any_(condition) if several else condition):
            for register, other in zip(registers, repaired(), strict=True):
                register.value = select(condition, other, register.value) if several else other
        return [register.value for register in registers]
