"""Functions of numbers beside those that may follow a product, for expressions of `elementwise`.

Errors are those of float32's exp and log, some 1e-7 of the result, where nothing else is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lowbit.isa.generic import maximum, minimum, select, sqrt
from lowbit.isa.types import f32
from lowbit.isa.value import Value
from lowbit.kernels.cpu.shared import functions
from lowbit.kernels.cpu.shared.functions import constant, fused, polynomial, rounded, vanishing
from lowbit.kernels.cpu.shared.post_op import keeping_nan

_WHOLE = 2.0**23  # from which on all numbers are integers
_NORMAL = 2.0**-126
_FAR = 9.1  # where erfc is 1e-37
# erfc(z) = p(1 / (1 + 0.3275911 z)) · exp(-z²), Abramowitz and Stegun, formula 7.1.26.
_ERFC = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
_ERFC_T = 0.3275911
# π/2 in three parts, of which the first two have so few bits that their multiples are exact.
_HALF_PI = (1.5703125, 4.837512969970703125e-4, 7.549789948768648e-8)
# sin(r) = r + r³·p(r²) and cos(r) = 1 − r²/2 + r⁴·p(r²) for |r| ≤ π/4: the Cephes library's.
_SIN = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COS = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
# atan(r) = r + r³·p(r²) for |r| ≤ tan(π/8): the Cephes library's.
_ATAN = (8.05374449538e-2, -1.38776856032e-1, 1.99777106478e-1, -3.33329491539e-1)


def _magnitude(x: Value) -> Value:
    return maximum(x, 0.0 - x)


def _odd(x: Value, of_magnitude: Value) -> Value:
    """A function f(-x) = -f(x), from what it is of |x|."""
    return keeping_nan(x, select(x < 0.0, 0.0 - of_magnitude, of_magnitude))


def exp(x: Value) -> Value:
    """e^x: 0 below -87, infinity where it is beyond float32."""
    far = x < 88.0
    power = functions.exp(select(far, x, x - 1.0)) * select(
        far, constant(x, 1.0), constant(x, math.e)
    )
    return keeping_nan(x, select(x < -87.0, constant(x, 0.0), power))


def log(x: Value) -> Value:
    """ln x; minus infinity of 0, NaN of less."""
    small = x < _NORMAL
    scaled = functions.log(select(small, x * _WHOLE, x))
    found = select(small, scaled - 23 * math.log(2), scaled)
    found = select(x.equals(math.inf), x, found)
    found = select(x.equals(0.0), constant(x, -math.inf), found)
    return keeping_nan(x, select(x < 0.0, constant(x, math.nan), found))


def erf(x: Value) -> Value:
    """The error function, to 4e-7 absolutely."""
    z = minimum(_magnitude(x), constant(x, _FAR))
    t = 1.0 / fused(z, _ERFC_T, 1.0)
    made = 1.0 - polynomial(t, _ERFC) * t * functions.exp(0.0 - z * z)
    return _odd(x, made)


def elu(x: Value, alpha: Value) -> Value:
    """x, or alpha · (e^x − 1) below 0, where what e^x was rounded by is made up for (Kahan)."""
    near = minimum(maximum(x, constant(x, -80.0)), constant(x, 0.0))
    power = functions.exp(near)
    whole = power.equals(1.0)
    less = (power - 1.0) * near / select(whole, constant(x, 1.0), functions.log(power))
    return keeping_nan(x, select(x < 0.0, alpha * select(whole, near, less), x))


def softplus(x: Value) -> Value:
    """ln(1 + e^x), whose logarithm makes up for what 1 + e^-|x| was rounded by."""
    power = functions.decay(0.0 - _magnitude(x))
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


def nearest(x: Value) -> Value:
    """The nearest integer, of two the even one."""
    magnitude = _magnitude(x)
    whole = (magnitude + _WHOLE) - _WHOLE
    return select(magnitude < _WHOLE, select(x < 0.0, 0.0 - whole, whole), x)


def floor(x: Value) -> Value:
    whole = nearest(x)
    return select(x < whole, whole - 1.0, whole)


def ceil(x: Value) -> Value:
    return 0.0 - floor(0.0 - x)


def trunc(x: Value) -> Value:
    """Towards 0."""
    return _odd(x, floor(_magnitude(x)))


def power(x: Value, y: Value) -> Value:
    """x^y, to |y · ln x| times 1e-7 of it."""
    made = exp(y * log(_magnitude(x)))
    half = y * 0.5
    odd = select(floor(half).equals(half), made, 0.0 - made)
    below = select(floor(y).equals(y), odd, constant(x, math.nan))
    return select(y.equals(0.0), constant(x, 1.0), keeping_nan(x, select(x < 0.0, below, made)))


def _wave(x: Value, quarter: int) -> Value:
    """The sine of x and so many quarters of a turn, for |x| up to some 8000."""
    near = minimum(maximum(x, constant(x, -1e6)), constant(x, 1e6))
    n = rounded(near * (2 / math.pi))
    whole, rest = n.to(f32), near
    for part in _HALF_PI:
        rest = fused(whole, -part, rest)
    square = rest * rest
    sine = fused(rest * square, polynomial(square, _SIN), rest)
    cosine = fused(square * square, polynomial(square, _COS), fused(square, -0.5, 1.0))
    turn = n + quarter
    made = select((turn & 1).equals(0), sine, cosine)
    return keeping_nan(x, select((turn & 2).equals(0), made, 0.0 - made))


def sinh(x: Value) -> Value:
    """(e^x − e^-x) / 2, which loses nothing near 0."""
    size = _magnitude(x)
    less, half = elu(0.0 - size, constant(x, 1.0)), exp(size * 0.5)
    return _odd(x, less * (less + 2.0) * -0.5 * half * half)


def cosh(x: Value) -> Value:
    size = _magnitude(x)
    half = exp(size * 0.5)
    return keeping_nan(x, (exp(size * -2.0) + 1.0) * 0.5 * half * half)


def atan(x: Value) -> Value:
    """The angle of this tangent, between −π/2 and π/2."""
    size = _magnitude(x)
    far, near = 1.0 + math.sqrt(2) < size, size < math.sqrt(2) - 1.0
    turned = select(far, -1.0 / size, (size - 1.0) / (size + 1.0))
    rest = select(near, size, turned)
    start = select(far, constant(x, math.pi / 2), constant(x, math.pi / 4))
    square = rest * rest
    angle = fused(rest * square, polynomial(square, _ATAN), rest)
    return _odd(x, angle + select(near, constant(x, 0.0), start))


def asin(x: Value) -> Value:
    return atan(x / sqrt((1.0 - x) * (1.0 + x)))


def acos(x: Value) -> Value:
    return 2.0 * atan(sqrt((1.0 - x) / (1.0 + x)))


def _log1p(x: Value) -> Value:
    """ln(1 + x): the logarithm of what the sum is rounded to, and what the rounding took away."""
    total = x + 1.0
    kept, made = total - 1.0, log(total)
    return select(kept.equals(x), made, made + (x - kept) / total)


def _area(x: Value, over: Value) -> Value:
    """ln(1 + over), or ln(2x) where that is the same and `over` may be beyond float32."""
    return select(x < 1e30, _log1p(over), log(x) + math.log(2))


def asinh(x: Value) -> Value:
    size = _magnitude(x)
    inverse = 1.0 / size
    return _odd(x, _area(size, size + size / (inverse + sqrt(inverse * inverse + 1.0))))


def acosh(x: Value) -> Value:
    over = x - 1.0
    return _area(x, over + sqrt(over) * sqrt(over + 2.0))


def atanh(x: Value) -> Value:
    return (_log1p(x) - _log1p(0.0 - x)) * 0.5


# How many operands, and what is made of them.
FUNCTIONS: dict[str, tuple[int, Callable[..., Value]]] = {
    "exp": (1, exp),
    "log": (1, log),
    "erf": (1, erf),
    "elu": (2, elu),
    "softplus": (1, softplus),
    "mish": (1, mish),
    "nearest": (1, nearest),
    "floor": (1, floor),
    "ceil": (1, ceil),
    "trunc": (1, trunc),
    "power": (2, power),
    "sin": (1, lambda x: _wave(x, 0)),
    "cos": (1, lambda x: _wave(x, 1)),
    "tan": (1, lambda x: _wave(x, 0) / _wave(x, 1)),
    **{one.__name__: (1, one) for one in (sinh, cosh, asin, acos, atan, asinh, acosh, atanh)},
}
