"""Integers near a number, and what is left of a division, exactly, however large the quotient: up
to 2^277 of float32. Zeros have the sign that IEEE 754 gives them.
"""

from __future__ import annotations

from typing import cast

from lowbit.isa.generic import select
from lowbit.isa.types import f32, f64, s64, with_element
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.shared.functions import (
    constant,
    fused,
    magnitude,
    rarely,
    with_sign,
)
from lowbit.kernels.cpu.shared.post_op import keeping_nan

_WHOLE_32, _WHOLE_64 = 2.0**23, 2.0**52  # from which on all numbers are integers
_EXACT = 2.0**24  # up to which float32 holds all integers
_LARGE = 2.0**125
# Of a quotient in float64 the first 24 bits are kept, so that its product with a float32 is exact.
_KEPT = -(1 << 29)
_ROUNDS = 13  # which take 23 bits or more each


def _nearest(size: Value) -> Value:
    """The nearest integer to a number that is not negative, of two the even one."""
    return select(size < _WHOLE_32, (size + _WHOLE_32) - _WHOLE_32, size)


def nearest(x: Value) -> Value:
    """The nearest integer, of two the even one."""
    return keeping_nan(x, with_sign(x, _nearest(magnitude(x))))


def floor(x: Value) -> Value:
    """The greatest integer up to x."""
    whole = nearest(x)
    return select(x < whole, whole - 1.0, whole)


def ceil(x: Value) -> Value:
    """The least integer from x on."""
    return floor(x * -1.0) * -1.0


def trunc(x: Value) -> Value:
    """Towards 0."""
    size = magnitude(x)
    whole = _nearest(size)
    return keeping_nan(x, with_sign(x, select(size < whole, whole - 1.0, whole)))


def fmod(x: Value, y: Value) -> Value:
    """x − trunc(x / y)·y, of the sign of x; NaN of an infinite x and by 0."""
    size, divisor = magnitude(x), magnitude(y)
    quotient = size / divisor
    # Rounding can make the quotient an integer that it is not yet: then what is left is negative.
    left = fused(trunc(quotient) * -1.0, divisor, size)
    left = select(left < 0.0, left + divisor, left)
    left = select(size < divisor, size, left)
    (left,) = rarely(quotient > _EXACT, [left], lambda: [_long_division(size, divisor)])
    return with_sign(x, left)


def _long_division(size: Value, divisor: Value) -> Value:
    """What is left of two numbers that are not negative, digit by digit of the quotient."""
    k = cast(Builder, size.machine)
    by = divisor.to(f64)
    with k.scope():
        left = k.register(size.to(f64))
        for _ in k.range(0, _ROUNDS):
            left.value = left.value - _first_digits(left.value / by) * by
        return left.value.to(f32)


def _first_digits(quotient: Value) -> Value:
    """An integer of 24 bits times a power of two, at most a quotient and near it."""
    words, floats = (with_element(quotient.type, element) for element in (s64, f64))
    kept = (quotient.bits(words) & _KEPT).bits(floats)
    whole = (kept + _WHOLE_64) - _WHOLE_64
    whole = select(kept < whole, whole - 1.0, whole)
    return select(kept < _WHOLE_64, whole, kept)


def remainder(x: Value, y: Value) -> Value:
    """x − floor(x / y)·y, of the sign of y; NaN of an infinite x and by 0."""
    left = fmod(x, y)
    return select(_opposite(left, y), left + y, left)


def _opposite(left: Value, y: Value) -> Value:
    """Whether one is below 0 and the other above."""
    zero = constant(y, 0.0)
    return ((left < zero) & (y > zero)) | ((left > zero) & (y < zero))


def floor_quotient(x: Value, y: Value) -> Value:
    """floor(x / y), by what is left, as PyTorch has it: NaN of an infinite x; x / y by 0."""
    left = fmod(x, y)
    part = select(magnitude(x) > _LARGE, constant(x, 0.25), constant(x, 1.0))
    whole = nearest((x * part - left * part) / y / part)  # towards 0
    whole = select(magnitude(x) < magnitude(y), x / y * 0.0, whole)
    whole = select(_opposite(left, y), whole - 1.0, whole)
    return select(y.equals(0.0), x / y, whole)
