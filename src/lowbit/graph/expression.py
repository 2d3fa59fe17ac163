"""Functions of each element: one text that arrays run, and that says what kernels compute.

A primitive (`relu`, `where`, ...) given arrays is its NumPy function; given an Expression it is a
step of `kernels.cpu.tensors.elementwise`. So a definition made of primitives and arithmetic, run on
arrays, is what an operator means, and run on expressions what its kernel computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowbit.graph.operator import Array

NUMBER = "number"
Operand = Any  # an array, an Expression or a number


def _operator(name: str, turned: bool = False) -> Callable[[Expression, Operand], Expression]:
    """One of Python's between an expression and an operand; turned: the operand comes first."""

    def call(self: Expression, other: Operand) -> Expression:
        return Expression.call(name, *((other, self) if turned else (self, other)))

    return call


@dataclass(frozen=True, eq=False)
class Expression:
    """A function of inputs in postfix order, and its numbers, as `plan_elementwise` takes them.

    whole: whether it is of integers that stand for themselves."""

    steps: tuple[int | str, ...]
    numbers: tuple[float, ...] = ()
    whole: bool = False

    @classmethod
    def of(cls, operand: Operand) -> Expression:
        if isinstance(operand, Expression):
            return operand
        return cls((NUMBER,), (float(operand),))

    @classmethod
    def call(cls, name: str, *operands: Operand) -> Expression:
        every = [cls.of(one) for one in operands]
        steps = (step for one in every for step in one.steps)
        numbers = (number for one in every for number in one.numbers)
        return cls((*steps, name), tuple(numbers), every[0].whole)

    __add__, __radd__ = _operator("add"), _operator("add", turned=True)
    __sub__, __rsub__ = _operator("sub"), _operator("sub", turned=True)
    __mul__, __rmul__ = _operator("mul"), _operator("mul", turned=True)
    __truediv__, __rtruediv__ = _operator("div"), _operator("div", turned=True)
    __lt__, __gt__ = _operator("less"), _operator("less", turned=True)

    def __neg__(self) -> Expression:
        return Expression.call("neg", self)

    def __abs__(self) -> Expression:
        return Expression.call("abs", self)


class Primitive:
    """A function of arrays, or of expressions: a step of this name, or as another function says.

    nin: how many operands it has, as of NumPy's."""

    def __init__(
        self, meaning: Callable[..., Any], traced: str | Callable[..., Expression], nin: int = 1
    ) -> None:
        self.meaning, self.traced, self.nin = meaning, traced, nin

    def __call__(self, *operands: Operand) -> Any:
        if not any(isinstance(one, Expression) for one in operands):
            return self.meaning(*operands)
        if callable(self.traced):
            return self.traced(*operands)
        return Expression.call(self.traced, *operands)


def error_function(x: Array) -> Array:
    """The error function, float64."""
    return np.fromiter(map(math.erf, x.ravel().tolist()), np.float64, x.size).reshape(x.shape)


def _complement(x: Array) -> Array:
    """1 − the error function, float64."""
    return np.fromiter(map(math.erfc, x.ravel().tolist()), np.float64, x.size).reshape(x.shape)


def _sign(x: Array) -> Array:
    """1, 0 or −1; 0 of NaN."""
    return x if x.dtype == bool else (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)


def _sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), of which neither end overflows."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, small) / (1 + small)


def _gelu_tanh(x: Array) -> Array:
    return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _clamp(x: Expression, low: float, high: float) -> Expression:
    """Its bounds are parameters of the kernel, and no operands."""
    return Expression((*x.steps, "clamp"), (*x.numbers, float(low), float(high)))


def _quotient(x: Array, y: Array) -> Array:
    """Of integers, what is nearest to x / y towards 0."""
    y = np.where(y == 0, 1, y)
    return np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))


relu = Primitive(lambda x: np.maximum(x, x.dtype.type(0)), "relu")
clamp = Primitive(np.clip, _clamp, 3)
sigmoid = Primitive(_sigmoid, "sigmoid")
silu = Primitive(lambda x: x * _sigmoid(x), "silu")
hardswish = Primitive(lambda x: x * np.clip(x / 6 + 0.5, 0, 1), "hardswish")
gelu = Primitive(lambda x: x * 0.5 * (1 + error_function(x * math.sqrt(0.5))), "gelu")
gelu_tanh = Primitive(_gelu_tanh, "gelu_tanh")
POST_OPS = {
    "relu": relu, "clamp": clamp, "sigmoid": sigmoid, "silu": silu, "hardswish": hardswish,
    "gelu": gelu, "gelu_tanh": gelu_tanh,
}  # fmt: skip
"""What may follow a product in its own node, by name: functions of float64 numbers."""

tanh = Primitive(np.tanh, "tanh")
elu = Primitive(lambda x, a: np.where(x > 0, x, a * np.expm1(np.minimum(x, 0))), "elu", 2)
softplus = Primitive(lambda x: np.logaddexp(x, 0), "softplus")
mish = Primitive(lambda x: x * np.tanh(np.logaddexp(x, 0)), "mish")
erf = Primitive(error_function, "erf")
erfc = Primitive(_complement, "erfc")
exp = Primitive(np.exp, "exp")
exp2 = Primitive(np.exp2, "exp2")
log = Primitive(np.log, "log")
log1p = Primitive(np.log1p, "log1p")
sqrt = Primitive(np.sqrt, "sqrt")
sin = Primitive(np.sin, "sin")
cos = Primitive(np.cos, "cos")
tan = Primitive(np.tan, "tan")
sinh = Primitive(np.sinh, "sinh")
cosh = Primitive(np.cosh, "cosh")
asin = Primitive(np.arcsin, "asin")
acos = Primitive(np.arccos, "acos")
atan = Primitive(np.arctan, "atan")
asinh = Primitive(np.arcsinh, "asinh")
acosh = Primitive(np.arccosh, "acosh")
atanh = Primitive(np.arctanh, "atanh")
floor = Primitive(np.floor, "floor")
ceil = Primitive(np.ceil, "ceil")
trunc = Primitive(np.trunc, "trunc")
nearest = Primitive(np.rint, "nearest")
sign = Primitive(_sign, lambda x: (x > 0) - (x < 0))
quotient = Primitive(_quotient, lambda x, y: Expression.call("trunc", x / y), 2)
minimum = Primitive(np.minimum, "min", 2)
maximum = Primitive(np.maximum, "max", 2)
where = Primitive(np.where, "where", 3)
equal = Primitive(np.equal, "equal", 2)
nan = Primitive(np.isnan, lambda x: 1 - equal(x, x))
negated = Primitive(np.logical_not, lambda x: 1 - x)
either = Primitive(np.logical_xor, lambda x, y: abs(x - y), 2)
power = Primitive(np.power, "power", 2)
remainder = Primitive(np.mod, "remainder", 2)
fmod = Primitive(np.fmod, "fmod", 2)
floor_quotient = Primitive(np.floor_divide, "floor_quotient", 2)
hypot = Primitive(np.hypot, "hypot", 2)
atan2 = Primitive(np.arctan2, "atan2", 2)
