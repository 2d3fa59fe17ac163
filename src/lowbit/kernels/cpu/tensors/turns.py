"""Sine, cosine and tangent of all of float32: how an angle is turned back to less than π/4.

Angles up to 10,000 are reduced in float32, which is fast. In a vector with a greater one all are
reduced in float64 as well, by as many digits of 2/π as float32's greatest number needs (Payne and
Hanek, "Radian reduction for trigonometric functions", 1983).
"""

from __future__ import annotations

import math

from lowbit.isa.generic import select
from lowbit.isa.types import f32, f64, s32
from lowbit.isa.value import Value
from lowbit.kernels.cpu.shared.functions import (
    constant,
    fused,
    magnitude,
    polynomial,
    rarely,
    rounded,
)

# π/2 in four parts, of which the first two have so few bits that these multiples are exact: by up
# to 6,366, which are the quarters of a turn in _NEAR.
_HALF_PI = (1.5703125, 4.837512969970703125e-4, 7.549789948768648e-8, -1.7151245e-15)
_NEAR = 10_000.0
# The first 192 binary digits of 2/π, 24 in each, so that their products with a float32 are exact.
_TWO_OVER_PI = (0xA2F983, 0x6E4E44, 0x1529FC, 0x2757D1, 0xF534DD, 0xC0DB62, 0x95993C, 0x439041)
_DIGITS = 24
_ROUND = 1.5 * 2.0**52  # added to |x| < 2^51 and subtracted, it leaves the nearest integer
_WHOLE = 2.0**51
# sin(r) = r + r³·p(r²) and cos(r) = 1 − r²/2 + r⁴·p(r²) for |r| ≤ π/4: the Cephes library's.
_SIN = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COS = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)


def sin(x: Value) -> Value:
    """The sine, NaN of infinities."""
    quarters, rest = _reduced(x)
    return _of_finite(x, _turned(quarters, _sine(rest), _cosine(rest)))


def cos(x: Value) -> Value:
    """The cosine, NaN of infinities."""
    quarters, rest = _reduced(x)
    return _of_finite(x, _turned(quarters + 1, _sine(rest), _cosine(rest)))


def tan(x: Value) -> Value:
    """The tangent, NaN of infinities."""
    quarters, rest = _reduced(x)
    sine, cosine = _sine(rest), _cosine(rest)
    odd = (quarters & 1).equals(1)
    above = select(odd, -1.0 * cosine, sine)
    return _of_finite(x, above / select(odd, sine, cosine))


def _of_finite(x: Value, made: Value) -> Value:
    return select(magnitude(x) < math.inf, made, constant(x, math.nan))


def _sine(rest: Value) -> Value:
    square = rest * rest
    return fused(rest * square, polynomial(square, _SIN), rest)


def _cosine(rest: Value) -> Value:
    square = rest * rest
    return fused(square * square, polynomial(square, _COS), fused(square, -0.5, 1.0))


def _turned(quarters: Value, sine: Value, cosine: Value) -> Value:
    """The sine of so many quarters of a turn more."""
    made = select((quarters & 1).equals(0), sine, cosine)
    return select((quarters & 2).equals(0), made, made * -1.0)


def _reduced(x: Value) -> list[Value]:
    """The quarters of a turn nearest to x, s32, right but for whole turns; and what is left."""
    quarters = rounded(x * (2 / math.pi))
    whole, rest = quarters.to(f32), x
    for part in _HALF_PI:
        rest = fused(whole, -part, rest)
    return rarely(magnitude(x) > _NEAR, [quarters, rest], lambda: _reduced_far(x))


def _reduced_far(x: Value) -> list[Value]:
    """The same of any finite number: the sum of products of x and digits of 2/π, each without its
    multiples of four quarters. Sums are exact until they are less than 1/2 without their integers;
    from then on each rounds once."""
    finite = select(magnitude(x) < math.inf, x, constant(x, 0.0))
    wide = finite.to(f64)
    quarters = rest = constant(wide, 0.0)
    for place, digits in enumerate(_TWO_OVER_PI, start=1):
        product = wide * (digits * 2.0 ** (-_DIGITS * place))
        rest = rest + (product - _nearest(product * 0.25) * 4.0)
        whole = _nearest(rest)
        quarters, rest = quarters + whole, rest - whole
    return [quarters.to(s32), (rest * (math.pi / 2)).to(f32)]


def _nearest(x: Value) -> Value:
    """The nearest integer to a float64."""
    small = (x < constant(x, _WHOLE)) & (x > constant(x, -_WHOLE))
    return select(small, (x + _ROUND) - _ROUND, x)
