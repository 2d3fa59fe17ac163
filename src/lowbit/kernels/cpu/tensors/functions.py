"""Functions of numbers beside those that may follow a product, for expressions of `elementwise`.

They serve all of float32, infinities and NaN too. Errors are those of float32's exp and log, some
1e-7 of the result, where nothing else is said: ERRORS has the numbers that tests hold them to.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lowbit.isa.generic import maximum, minimum, select, sqrt
from lowbit.isa.types import f32, s32, with_element
from lowbit.isa.value import Value
from lowbit.kernels.cpu.shared import functions
from lowbit.kernels.cpu.shared.functions import (
    constant,
    fused,
    magnitude,
    polynomial,
    rounded,
    vanishing,
    with_sign,
)
from lowbit.kernels.cpu.shared.post_op import keeping_nan
from lowbit.kernels.cpu.tensors.quotients import (
    ceil,
    floor,
    floor_quotient,
    fmod,
    nearest,
    remainder,
    trunc,
)
from lowbit.kernels.cpu.tensors.turns import cos, sin, tan

_SMALL = 2.0**23  # what makes numbers below the normal ones normal
_NORMAL = 2.0**-126
_NOTHING = -104.0  # e^x is 0 below
# erf(x) = x·p(x²) for |x| < 0.9, a minimax fit: 1.2e-8 of it.
_ERF_NEAR = 0.9
_ERF = (-6.090358e-4, 5.01196241e-3, -2.67789086e-2, 0.112821408, -0.376125233, 1.12837915)
# erfc(z)·exp(z²)·(1 + 2z) = p((z − 3) / (z + 3)) for 0 ≤ z ≤ 10.1, a minimax fit: 3.3e-8 of it.
_ERFC_END = 10.1  # where erfc is 2.7e-46
_ERFC_MIDDLE = 3.0
_ERFC = (
    -1.53486412e-4,
    2.25453283e-3,
    2.22552648e-3,
    -2.40318858e-2,
    6.83520008e-2,
    -0.119218174,
    0.129643477,
    -4.7566117e-2,
    -0.135621095,
    1.2530081,
)
# atan(r) = r + r³·p(r²) for |r| ≤ tan(π/8): the Cephes library's.
_ATAN = (8.05374449538e-2, -1.38776856032e-1, 1.99777106478e-1, -3.33329491539e-1)


def _odd(x: Value, of_magnitude: Value) -> Value:
    """A function f(-x) = -f(x), from what it is of |x|."""
    return keeping_nan(x, with_sign(x, of_magnitude))


def exp(x: Value) -> Value:
    """e^x: infinity where it is beyond float32; below the normal numbers the square of e^(x/2)."""
    below, above = x < -87.0, x > 88.0
    near = select(below, x * 0.5, select(above, x - 1.0, x))
    power = functions.exp(near)
    factor = select(above, constant(x, math.e), constant(x, 1.0))
    factor = select(below, select(x < _NOTHING, constant(x, 0.0), power), factor)
    return keeping_nan(x, power * factor)


def exp2(x: Value) -> Value:
    """2^x, exact of integers."""
    near = minimum(maximum(x, constant(x, -160.0)), constant(x, 130.0))
    whole = nearest(near)
    power = functions.exp((near - whole) * math.log(2))
    first = floor(whole * 0.5)  # in two steps, of which each is a normal number
    return keeping_nan(x, power * _power_of_two(first) * _power_of_two(whole - first))


def _power_of_two(whole: Value) -> Value:
    """2 to an integer from −126 to 127."""
    exponent = rounded(whole) + 127
    return (exponent << 23).bits(with_element(whole.type, f32))


def log(x: Value) -> Value:
    """ln x; minus infinity of 0, NaN of less."""
    small = x < _NORMAL
    scaled = functions.log(select(small, x * _SMALL, x))
    found = select(small, scaled - 23 * math.log(2), scaled)
    found = select(x.equals(math.inf), x, found)
    found = select(x.equals(0.0), constant(x, -math.inf), found)
    return keeping_nan(x, select(x < 0.0, constant(x, math.nan), found))


def _erfc(z: Value) -> Value:
    """1 − erf(z) of a number that is not negative, to some 5e-7 of it."""
    z = minimum(z, constant(z, _ERFC_END))
    square = z * z
    rounding = fused(z, z, square * -1.0)  # z² but for `square`, exactly
    decay = exp(square * -1.0) * (1.0 - rounding)
    place = (z - _ERFC_MIDDLE) / (z + _ERFC_MIDDLE)
    return decay * polynomial(place, _ERFC) / fused(z, 2.0, 1.0)


def erf(x: Value) -> Value:
    """The error function."""
    size = magnitude(x)
    near = size * polynomial(size * size, _ERF)
    return _odd(x, select(size < _ERF_NEAR, near, 1.0 - _erfc(size)))


def erfc(x: Value) -> Value:
    """1 − erf(x), which loses nothing where that is small: to some 5e-7 of it."""
    above = _erfc(magnitude(x))
    return keeping_nan(x, select(x < 0.0, 2.0 - above, above))


def elu(x: Value, alpha: Value) -> Value:
    """x, or alpha · (e^x − 1) below 0, where what e^x was rounded by is made up for (Kahan)."""
    near = minimum(maximum(x, constant(x, -80.0)), constant(x, 0.0))
    power = functions.exp(near)
    whole = power.equals(1.0)
    less = (power - 1.0) * near / select(whole, constant(x, 1.0), functions.log(power))
    return keeping_nan(x, select(x < 0.0, alpha * select(whole, near, less), x))


def softplus(x: Value) -> Value:
    """ln(1 + e^x), whose logarithm makes up for what 1 + e^-|x| was rounded by."""
    power = functions.decay(0.0 - magnitude(x))
    total = power + 1.0
    whole = total.equals(1.0)
    over = select(whole, constant(x, 1.0), total - 1.0)
    small = select(whole, power, functions.log(total) * power / over)
    return keeping_nan(x, maximum(x, constant(x, 0.0)) + small)


def mish(x: Value) -> Value:
    """x · tanh(ln(1 + e^x)), which is x · n / (n + 2) with n = e^x · (e^x + 2)."""
    power = functions.exp(minimum(x, constant(x, 20.0)))
    n = power * (power + 2.0)
    return keeping_nan(x, vanishing(x) * (n / (n + 2.0)))


def power(x: Value, y: Value) -> Value:
    """x^y, to |y · ln x| times 1e-7 of it."""
    size, whole = magnitude(x), floor(y)
    one = constant(x, 1.0)
    made = exp(select(size.equals(1.0), constant(x, 0.0), y * log(size)))
    made = select(y.equals(y), made, y)
    half = y * 0.5
    odd = whole.equals(y) & (floor(half) < half)
    made = select(odd, with_sign(x, made), made)
    undefined = (x < 0.0) & (x > -math.inf) & (whole < y) & (magnitude(y) < math.inf)
    made = select(undefined, constant(x, math.nan), keeping_nan(x, made))
    return select(y.equals(0.0), one, select(x.equals(1.0), one, made))


def log1p(x: Value) -> Value:
    """ln(1 + x): the logarithm of what the sum is rounded to, and what the rounding took away."""
    total = x + 1.0
    kept, made = total - 1.0, log(total)
    made = select(kept.equals(x), made, made + (x - kept) / total)
    return select(x.equals(0.0), x, made)


def hypot(x: Value, y: Value) -> Value:
    """√(x² + y²), of which no square overflows; infinity if one is infinite."""
    first, second = magnitude(x), magnitude(y)
    longer, shorter = maximum(first, second), minimum(first, second)
    ratio = shorter / longer
    made = longer * sqrt(fused(ratio, ratio, 1.0))
    made = keeping_nan(x, keeping_nan(y, select(longer.equals(0.0), longer, made)))
    infinite = first.equals(math.inf) | second.equals(math.inf)
    return select(infinite, constant(x, math.inf), made)


def sinh(x: Value) -> Value:
    """(e^x − e^-x) / 2, which loses nothing near 0."""
    size = magnitude(x)
    less, half = elu(0.0 - size, constant(x, 1.0)), exp(size * 0.5)
    return _odd(x, (0.0 - less) * 0.5 * (less + 2.0) * half * half)


def cosh(x: Value) -> Value:
    size = magnitude(x)
    half = exp(size * 0.5)
    return keeping_nan(x, (exp(size * -2.0) + 1.0) * 0.5 * half * half)


def atan(x: Value) -> Value:
    """The angle of this tangent, between −π/2 and π/2."""
    size = magnitude(x)
    far, near = 1.0 + math.sqrt(2) < size, size < math.sqrt(2) - 1.0
    turned = select(far, -1.0 / size, (size - 1.0) / (size + 1.0))
    rest = select(near, size, turned)
    start = select(far, constant(x, math.pi / 2), constant(x, math.pi / 4))
    square = rest * rest
    angle = fused(rest * square, polynomial(square, _ATAN), rest)
    return _odd(x, angle + select(near, constant(x, 0.0), start))


def atan2(y: Value, x: Value) -> Value:
    """The angle of the point (x, y), between −π and π; signs of zeros count."""
    first, second = magnitude(x), magnitude(y)
    steep = first < second
    longer, shorter = select(steep, second, first), select(steep, first, second)
    ratio = select(shorter.equals(longer), constant(x, 1.0), shorter / longer)
    angle = atan(select(shorter.equals(0.0), shorter, ratio))
    angle = select(steep, math.pi / 2 - angle, angle)
    left = x.bits(with_element(x.type, s32)) < 0
    angle = select(left, math.pi - angle, angle)
    return keeping_nan(x, _odd(y, angle))


def asin(x: Value) -> Value:
    return atan(x / sqrt((1.0 - x) * (1.0 + x)))


def acos(x: Value) -> Value:
    return 2.0 * atan(sqrt((1.0 - x) / (1.0 + x)))


def _area(x: Value, over: Value) -> Value:
    """ln(1 + over), or ln(2x) where that is the same and `over` may be beyond float32."""
    return select(x < 1e30, log1p(over), log(x) + math.log(2))


def asinh(x: Value) -> Value:
    size = magnitude(x)
    inverse = 1.0 / size
    return _odd(x, _area(size, size + size / (inverse + sqrt(inverse * inverse + 1.0))))


def acosh(x: Value) -> Value:
    over = x - 1.0
    return _area(x, over + sqrt(over) * sqrt(over + 2.0))


def atanh(x: Value) -> Value:
    return (log1p(x) - log1p(0.0 - x)) * 0.5


# How many operands, and what is made of them.
FUNCTIONS: dict[str, tuple[int, Callable[..., Value]]] = {
    **{
        function.__name__: (1, function)
        for function in (
            exp, exp2, log, log1p, erf, erfc, softplus, mish, nearest, floor, ceil, trunc, sin, cos,
            tan, sinh, cosh, asin, acos, atan, asinh, acosh, atanh,
        )
    },
    **{
        function.__name__: (2, function)
        for function in (elu, power, fmod, remainder, floor_quotient, hypot, atan2)
    },
}  # fmt: skip
