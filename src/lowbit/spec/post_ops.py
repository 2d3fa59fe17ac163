"""What may follow a product: each step in float64, and how far a float32 kernel may be from it.

A step takes a value with an error bound to another one. With u = 2^-24, a float32 operation returns
its exact result times (1 + d), |d| <= u (Higham, Accuracy and Stability of Numerical Algorithms,
section 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lowbit.spec.dtypes import DTYPES, Array
from lowbit.spec.dtypes import FLOAT32_UNIT as UNIT

PostOp = str | tuple[float, float]
"""`bias`, `residual`, one of FUNCTIONS, or the two bounds of a clamp."""

OPERANDS = ("bias", "residual", "out_scale", "out_zero_point")
"""The inputs of post-operations; the last two where the result is of 8 bits."""

TRIED: tuple[tuple[PostOp, ...] | None, ...] = (
    None,
    ("residual", "relu", "bias"),
    ("bias", "gelu", "residual", (-0.25, 6.0)),
    ("gelu_tanh", "bias", "silu"),
)
"""What is tried; None: the default."""

_TINY = DTYPES["float32"].least
_AT_END = 1e-35  # What a kernel may make of minus infinity, where its exponential ends.


@dataclass(frozen=True)
class Function:
    """A function of one number: its float64 formula, and facts that bound errors.

    `slope`: the most that it stretches an error of its argument. `own`, `fixed`: the error that a
    kernel may add, in units of u·|x| and of u. `end`: its limit at minus infinity.
    """

    formula: Callable[[Array], Array]
    slope: float
    own: float
    fixed: float = 0
    end: float = 0

    def meaning(self, value: Array) -> Array:
        """The function in float64; at minus infinity its limit, which formulas may not give."""
        ends = np.isneginf(value)
        return np.where(ends, self.end, self.formula(np.where(ends, 0, value)))

    def apply(self, value: Array, error: Array) -> tuple[Array, Array]:
        """The value after the function, and the error that it may then have."""
        ends = np.isneginf(value)
        size = np.where(ends, 0, np.abs(value))
        own = self.own * UNIT * (size + error) if self.own else 0
        own = own + self.fixed * UNIT
        return self.meaning(value), self.slope * error + own + np.where(ends, _AT_END, _TINY)


def _normal_distribution(x: Array) -> Array:
    return np.vectorize(lambda v: 0.5 * math.erfc(-v / math.sqrt(2)), otypes=[np.float64])(x)


def _logistic(x: Array) -> Array:
    return 1 / (1 + np.exp(-np.clip(x, -700, 700)))


def _ramp(x: Array) -> Array:
    return np.clip(x / 6 + 0.5, 0, 1)


# The slopes are the maxima of the derivatives; GELU's is Φ(√2) + √2·φ(√2) = 1.129, SiLU's 1.0998.
FUNCTIONS = {
    "relu": Function(lambda x: np.maximum(x, 0), slope=1, own=0),
    "gelu": Function(lambda x: x * _normal_distribution(x), slope=1.13, own=8),
    "gelu_tanh": Function(
        lambda x: x * _logistic(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)), slope=1.13, own=4
    ),
    "silu": Function(lambda x: x * _logistic(x), slope=1.1, own=4),
    "sigmoid": Function(_logistic, slope=0.25, own=0, fixed=4),
    "hardsigmoid": Function(_ramp, slope=1 / 6, own=0, fixed=4),
    "hardswish": Function(lambda x: x * _ramp(x), slope=1.5, own=4),
    "tanh": Function(np.tanh, slope=1, own=4, end=-1),
}
# What the last step may be in its place, before 8 bits whose `out_scale` is 2^-8 to 2^8.
_COARSE = {f"{name}_coarse": name for name in ("gelu", "gelu_tanh")}
FUNCTIONS |= {c: replace(FUNCTIONS[name], fixed=2**-12.8 / UNIT) for c, name in _COARSE.items()}


def applied(
    value: Array, error: Array, post_ops: Sequence[PostOp] | None, operands: Mapping[str, Array]
) -> tuple[Array, Array]:
    """A value and its error after these steps, and after it is quantized where there is an
    `out_scale`. By default: bias, then residual. A step whose operand is left out is left out."""
    steps = ["bias", "residual"] if post_ops is None else list(post_ops)
    inverse = float(np.float32(1) / np.float32(operands.get("out_scale", 1)))
    near = "out_scale" in operands and 2**-8 <= inverse <= 2**8
    if near and steps and steps[-1] in _COARSE.values():
        steps[-1] = f"{steps[-1]}_coarse"
    for step in steps:
        if not isinstance(step, str):
            value = np.clip(value, np.float32(step[0]), np.float32(step[1]))
        elif step in FUNCTIONS:
            value, error = FUNCTIONS[step].apply(value, error)
        elif step in operands:
            value = value + operands[step]
            # Exact in float64, one rounding in float32.
            error = error + UNIT * (np.abs(value) + error)
        # An infinity is what it is; it must not spread into the error of what is made of it.
        error = np.where(np.isinf(value), 0, error)
    if "out_scale" not in operands:
        return value, error
    quanta = value * inverse
    error = error * inverse * (1 + UNIT) + UNIT * np.abs(quanta)
    # A quantum of the output where a float32 value may lie on the other side of a half; else none.
    middle = np.rint(quanta)
    error = np.maximum(np.rint(quanta + error) - middle, middle - np.rint(quanta - error))
    return middle + operands["out_zero_point"], error
