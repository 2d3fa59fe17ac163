"""What may follow a product: each step in float64, and how far a float32 kernel may be from it.

A step takes a value with an error bound to another one. With u = 2^-24, a float32 operation returns
its exact result times (1 + d), |d| <= u (Higham, Accuracy and Stability of Numerical Algorithms,
section 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
UNIT = 2.0**-24
_TINY = 2.0**-149


@dataclass(frozen=True)
class Function:
    """A function of one number: its float64 meaning, and two facts that bound errors.

    `slope`: the most that it stretches an error of its argument. `own`: the error that a kernel
    may add, in units of u·|x|.
    """

    meaning: Callable[[Array], Array]
    slope: float
    own: float

    def apply(self, value: Array, error: Array) -> tuple[Array, Array]:
        """The value after the function, and the error that it may then have."""
        own = self.own * UNIT * (np.abs(value) + error)
        return self.meaning(value), self.slope * error + own + _TINY


def _normal_distribution(x: Array) -> Array:
    return np.vectorize(lambda v: 0.5 * math.erfc(-v / math.sqrt(2)), otypes=[np.float64])(x)


def _logistic(x: Array) -> Array:
    return 1 / (1 + np.exp(-np.clip(x, -700, 700)))


# The slopes are the maxima of the derivatives; GELU's is Φ(√2) + √2·φ(√2) = 1.129, SiLU's 1.0998.
FUNCTIONS = {
    "relu": Function(lambda x: np.maximum(x, 0), slope=1, own=0),
    "gelu": Function(lambda x: x * _normal_distribution(x), slope=1.13, own=8),
    "gelu_tanh": Function(
        lambda x: x * _logistic(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)), slope=1.13, own=4
    ),
    "silu": Function(lambda x: x * _logistic(x), slope=1.1, own=4),
}


def added(value: Array, error: Array, operand: Array) -> tuple[Array, Array]:
    """A bias or a residual: exact in float64, one rounding in float32."""
    total = value + operand.astype(np.float64)
    return total, error + UNIT * (np.abs(total) + error)


def bounded(value: Array, error: Array, low: float, high: float) -> tuple[Array, Array]:
    """A clamp, which adds no error. Its bounds are float32."""
    return np.clip(value, np.float32(low), np.float32(high)), error
