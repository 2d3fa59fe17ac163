"""Arithmetic of integers that stand for themselves, for expressions of `elementwise`.

All operands of an operation are of one type, in which its result wraps. What C leaves open is
defined as NumPy has it: quotients and remainders by 0 are 0, the quotient of the least number by −1
is that number, and shifts by more than all bits leave nothing but the sign.
"""

from __future__ import annotations

from collections.abc import Callable

from lowbit.isa.generic import maximum, minimum, select, shl_each, shr_each
from lowbit.isa.types import Scalar, element_of, f32, f64
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.shared.functions import constant


def _signed(x: Value) -> bool:
    return element_of(x.type).kind == "s"


def _truth(x: Value, condition: Value) -> Value:
    """1 where the condition holds, else 0, in the type of x."""
    return select(condition, constant(x, 1), constant(x, 0))


def _magnitude(x: Value) -> Value:
    return select(x < 0, 0 - x, x) if _signed(x) else x


def _exact_float(element: Scalar) -> Scalar | None:
    """The float in which a quotient of this type, rounded, never reaches the next integer.

    It does not where the float holds all dividends: what a quotient lacks to an integer is at least
    1 / divisor, and rounding adds less than 1 / divisor."""
    return {8: f32, 16: f32, 32: f64}.get(element.bits)


def quotient(x: Value, y: Value) -> Value:
    """x / y towards 0."""
    element = element_of(x.type)
    zero = y.equals(0)
    minus = y.equals(-1) if _signed(y) else None  # the least number has no opposite to divide into
    divisor = select(zero, constant(y, 1), y)
    if minus is not None:
        divisor = select(minus, constant(y, 1), divisor)
    exact = _exact_float(element)
    if exact is None:
        made = x // divisor
    else:
        made = (x.to(exact) / divisor.to(exact)).to(element)
    if minus is not None:
        made = select(minus, 0 - x, made)
    return select(zero, constant(x, 0), made)


def remainder(x: Value, y: Value) -> Value:
    """What `quotient` leaves of x, of its sign."""
    return select(y.equals(0), constant(x, 0), x - quotient(x, y) * y)


def _opposite(left: Value, y: Value) -> Value:
    """Whether a remainder that is not 0 has another sign than the divisor."""
    none = left.equals(0)
    return select(none, none ^ none, (left ^ y) < 0)


def modulus(x: Value, y: Value) -> Value:
    """What is left of x, of the divisor's sign."""
    left = remainder(x, y)
    return select(_opposite(left, y), left + y, left) if _signed(x) else left


def floor_quotient(x: Value, y: Value) -> Value:
    """x / y, rounded down."""
    whole = quotient(x, y)
    if not _signed(x):
        return whole
    return whole - _truth(x, _opposite(remainder(x, y), y))


def power(k: Builder, x: Value, y: Value) -> Value:
    """x^y by squaring. Of negative powers, what is left of them without their fraction."""
    with k.scope():
        result, base, left = k.register(constant(x, 1)), k.register(x), k.register(y)
        for _ in k.range(0, element_of(x.type).bits):
            odd = (left.value & 1).equals(1)
            result.value = select(odd, result.value * base.value, result.value)
            base.value = base.value * base.value
            left.value = left.value >> 1
        made = result.value
    if not _signed(x):
        return made
    one = constant(x, 1)
    sign = select((y & 1).equals(1), 0 - one, one)
    inverse = select(x.equals(-1), sign, _truth(x, x.equals(1)))
    return select(y < 0, inverse, made)


def _within(count: Value) -> Value:
    """Whether the type has more bits than that."""
    fits = count < element_of(count.type).bits
    return fits & (constant(count, -1) < count) if _signed(count) else fits


def shift_left(x: Value, count: Value) -> Value:
    within, zero = _within(count), constant(x, 0)
    return select(within, shl_each(x, select(within, count, zero)), zero)


def shift_right(x: Value, count: Value) -> Value:
    within, zero = _within(count), constant(x, 0)
    made = shr_each(x, select(within, count, zero))
    bits = element_of(x.type).bits
    return select(within, made, x >> (bits - 1) if _signed(x) else zero)


# How many operands, and what is made of them. "power" is there, too: `power`.
OPERATIONS: dict[str, tuple[int, Callable[..., Value]]] = {
    "add": (2, lambda a, b: a + b),
    "sub": (2, lambda a, b: a - b),
    "mul": (2, lambda a, b: a * b),
    "div": (2, quotient),
    "floor_div": (2, floor_quotient),
    "rem": (2, remainder),
    "mod": (2, modulus),
    "min": (2, minimum),
    "max": (2, maximum),
    "less": (2, lambda a, b: _truth(a, a < b)),
    "equal": (2, lambda a, b: _truth(a, a.equals(b))),
    "where": (3, lambda condition, a, b: select(condition.equals(0), b, a)),
    "neg": (1, lambda a: 0 - a),
    "abs": (1, _magnitude),
    "shift_left": (2, shift_left),
    "shift_right": (2, shift_right),
    "bits_and": (2, lambda a, b: a & b),
    "bits_or": (2, lambda a, b: a | b),
    "bits_xor": (2, lambda a, b: a ^ b),
    "bits_not": (1, lambda a: a ^ ((a ^ a) - 1)),
}
