"""What sizes of inputs must fulfil for a network to be right, as data that files can hold."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Expression = int | float | str | tuple[Any, ...]
"""A number, the name of a size, or an operator of `OPERATORS` and its operands."""

OPERATORS: Mapping[str, tuple[Callable[..., Any], str]] = {
    "add": (lambda *every: sum(every), " + "),
    "mul": (lambda *every: math.prod(every), " * "),
    "floordiv": (operator.floordiv, " // "),
    "div": (operator.truediv, " / "),
    "mod": (operator.mod, " % "),
    "pow": (operator.pow, " ** "),
    "trunc": (math.trunc, ""),
    "max": (lambda *every: max(every), ""),
    "min": (lambda *every: min(every), ""),
    "eq": (operator.eq, " == "),
    "ne": (operator.ne, " != "),
    "lt": (operator.lt, " < "),
    "le": (operator.le, " <= "),
    "gt": (operator.gt, " > "),
    "ge": (operator.ge, " >= "),
    "and": (lambda *every: all(every), " and "),
    "or": (lambda *every: any(every), " or "),
    "not": (operator.not_, ""),
}
"""By name: what it computes, and how it is written between operands; "": before them."""


def fulfilled(condition: Expression, sizes: Mapping[str, int]) -> bool:
    """Whether sizes, which are all known, fulfil it."""
    try:
        return bool(_value(condition, sizes))
    except ArithmeticError:  # as a division by a size that is 0
        return False


def _value(expression: Expression, sizes: Mapping[str, int]) -> Any:
    if isinstance(expression, str):
        return sizes[expression]
    if isinstance(expression, int | float):
        return expression
    name, *operands = expression
    return OPERATORS[name][0](*(_value(one, sizes) for one in operands))


def check(conditions: Any, names: Iterable[str]) -> None:
    """ValueError: they are no conditions on sizes of these names."""
    if not isinstance(conditions, tuple):
        raise ValueError(f"conditions are a list, not {conditions!r}")
    for one in conditions:
        try:
            fulfilled(one, dict.fromkeys(names, 2))
        except (LookupError, TypeError, OverflowError) as error:
            raise ValueError(f"{one!r} is no condition on sizes: {error}") from None


def told(condition: Expression) -> str:
    """The expression as Python would have it."""
    if not isinstance(condition, tuple):
        return str(condition)
    name, *operands = condition
    written = [f"({told(one)})" if isinstance(one, tuple) else told(one) for one in operands]
    between = OPERATORS[name][1]
    return between.join(written) if between else f"{name}({', '.join(written)})"
