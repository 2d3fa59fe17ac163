"""What sizes of inputs must fulfil for a network to be right, as data that files can hold."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
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
    """Whether sizes fulfil it. ValueError: it is no condition. KeyError: a size is not known."""
    try:
        return bool(_value(condition, sizes))
    except ArithmeticError:  # as a division by a size that is 0
        return False


def _value(expression: Expression, sizes: Mapping[str, int]) -> Any:
    if isinstance(expression, str):
        return sizes[expression]
    if not isinstance(expression, tuple):
        return expression
    name, *operands = expression
    if name not in OPERATORS:
        raise ValueError(f"{name!r} is no operator of sizes")
    return OPERATORS[name][0](*(_value(one, sizes) for one in operands))


def told(condition: Expression) -> str:
    """The expression as Python would have it."""
    if not isinstance(condition, tuple):
        return str(condition)
    name, *operands = condition
    written = [f"({told(one)})" if isinstance(one, tuple) else told(one) for one in operands]
    between = OPERATORS[name][1]
    return between.join(written) if between else f"{name}({', '.join(written)})"
