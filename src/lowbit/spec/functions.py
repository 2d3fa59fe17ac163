"""How far functions of float32 numbers may be from the exact ones, over the whole range of float32.

Kernels compute them in float32 (kernels/cpu/tensors/functions.py). A result is off by no more than
`relative` of the exact one and `absolute`, so that near the end of float32 it may be infinite. NaN
gives NaN, and infinities give what the exact function does. (What may follow a product has budgets
of its own, in post_ops.py.)
"""

from __future__ import annotations

from typing import NamedTuple


class Budget(NamedTuple):
    """The errors that are allowed: of the exact result, and of 1."""

    relative: float
    absolute: float = 2.0**-148  # what rounding takes away below the normal numbers


_EXACT = Budget(0.0, 0.0)

BUDGETS: dict[str, Budget] = {
    "exp": Budget(2e-7),
    "exp2": Budget(2e-7),
    "log": Budget(2e-7),
    "log1p": Budget(2e-7),
    "erf": Budget(3e-7),
    "erfc": Budget(6e-7),
    "sin": Budget(2e-7),
    "cos": Budget(2e-7),
    "tan": Budget(4e-7),
    "sinh": Budget(5e-7),
    "cosh": Budget(5e-7),
    "asin": Budget(4e-7),
    "acos": Budget(4e-7),
    "atan": Budget(3e-7),
    "asinh": Budget(4e-7),
    "acosh": Budget(4e-7),
    "atanh": Budget(4e-7),
    "elu": Budget(4e-7),
    "softplus": Budget(3e-7, 2.0**-126),  # 0 below -87
    "mish": Budget(3e-6, 1e-30),  # and at minus infinity
    "nearest": _EXACT,
    "floor": _EXACT,
    "ceil": _EXACT,
    "trunc": _EXACT,
    "fmod": _EXACT,
    "remainder": Budget(1e-7),
    "floor_quotient": Budget(2e-7),
    "hypot": Budget(3e-7),
    "atan2": Budget(4e-7),
}
"""By the name of a step of an expression."""

POWER = 1.5e-7
"""x^y may be off by so much of itself for 1 + |y · ln x|."""
