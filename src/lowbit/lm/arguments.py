"""Numbers that users give."""

from __future__ import annotations

import operator
from typing import Any


def whole(name: str, value: Any, least: int = 0, most: int | None = None) -> int:
    """A whole number of any type. TypeError: it is none. ValueError: it is out of its range."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is {value!r}; it must be a whole number")
    number = operator.index(value)
    if number < least or (most is not None and number > most):
        range_ = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} is {number}; it must be {range_}")
    return number
