"""A size that is not known, for functions of sizes that are written for numbers."""

from __future__ import annotations

from typing import Any

import z3


class Number:
    """An integer of Z3's with Python's arithmetic, `//` and `%` rounded down. TypeError for whoever
    compares it, or asks whether it is 0, since that has no answer."""

    def __init__(self, expression: Any) -> None:
        self.expression = expression

    def __add__(self, other: Any) -> Number:
        return Number(self.expression + plain(other))

    def __radd__(self, other: Any) -> Number:
        return Number(plain(other) + self.expression)

    def __sub__(self, other: Any) -> Number:
        return Number(self.expression - plain(other))

    def __rsub__(self, other: Any) -> Number:
        return Number(plain(other) - self.expression)

    def __mul__(self, other: Any) -> Number:
        return Number(self.expression * plain(other))

    def __rmul__(self, other: Any) -> Number:
        return Number(plain(other) * self.expression)

    def __neg__(self) -> Number:
        return Number(-self.expression)

    def __floordiv__(self, other: Any) -> Number:
        return Number(_floor(self.expression, plain(other)))

    def __rfloordiv__(self, other: Any) -> Number:
        return Number(_floor(plain(other), self.expression))

    def __mod__(self, other: Any) -> Number:
        return self - (self // other) * other

    def __lt__(self, other: Any) -> bool:
        raise TypeError("a size that is not known is compared")

    def __bool__(self) -> bool:
        raise TypeError("a size that is not known is compared")

    __gt__ = __le__ = __ge__ = __eq__ = __lt__  # pyright: ignore[reportAssignmentType]
    __hash__ = object.__hash__


def plain(value: Any) -> Any:
    """Z3's expression of a Number; anything else as it is."""
    return value.expression if isinstance(value, Number) else value


def _floor(left: Any, right: Any) -> Any:
    """The quotient, rounded down; Z3's is that for divisors above 0."""
    if isinstance(right, int) and right > 0:
        return left / right
    return z3.If(right > 0, left / right, -left / -right)
