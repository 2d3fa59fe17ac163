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
from lowbit.numerics.formats import whole_part

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

    whole: whether it is of integers that stand for themselves, and is computed in integers."""

    steps: tuple[int | str, ...]
    numbers: tuple[float, ...] = ()
    whole: bool = False

    @classmethod
    def of(cls, operand: Operand) -> Expression:
        if isinstance(operand, Expression):
            return operand
        return cls((NUMBER,), (operand,))

    @classmethod
    def call(cls, name: str, *operands: Operand) -> Expression:
        every = [cls.of(one) for one in operands]
        steps = (step for one in every for step in one.steps)
        numbers = (number for one in every for number in one.numbers)
        return cls((*steps, name), tuple(numbers), any(one.whole for one in every))

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
    """x / y; of integers, what is nearest to it towards 0, and 0 where y is."""
    if x.dtype.kind not in "iu":
        return x / y
    down = x // y
    up = (down * y != x) & ((x < 0) != (y < 0)) & (y != 0)
    return down + up.astype(down.dtype)


def _power(x: Array, y: Array) -> Array:
    """x^y, of floats in float64. Of integers it wraps, also to the power of floats that are whole,
    and loses its fraction."""
    if x.dtype.kind not in "iu":
        return np.power(x.astype(np.float64), y.astype(np.float64)).astype(x.dtype)
    if y.dtype.kind not in "iu":
        whole = whole_part(y, "int64")
        made = np.power(x.astype(np.float64), y.astype(np.float64))
        return np.where(whole == y, _power(x, whole), whole_part(made, x.dtype.name))
    exponent = np.where(y < 0, y.dtype.type(0), y).astype(np.uint64)
    made = np.power(x.astype(np.uint64), exponent).astype(x.dtype)
    sign = np.where(y % 2 == 0, 1, -1)
    inverse = np.where(x == 1, 1, np.where(x == -1, sign, 0)).astype(x.dtype)
    return np.where(y < 0, inverse, made)


def _rounding(function: np.ufunc) -> Callable[[Array], Array]:
    """What rounds floats, and leaves integers as they are."""
    return lambda x: x if x.dtype.kind in "iub" else function(x)


def _of_kind(whole: str | None, real: str | Callable[..., Expression]) -> Callable[..., Expression]:
    """A step of integers, if there is one, and what serves floats."""

    def traced(*operands: Operand) -> Expression:
        if any(isinstance(one, Expression) and one.whole for one in operands):
            return operands[0] if whole is None else Expression.call(whole, *operands)
        return real(*operands) if callable(real) else Expression.call(real, *operands)

    return traced


def _relu(x: Expression) -> Expression:
    return maximum(x, 0) if x.whole else Expression.call("relu", x)


relu = Primitive(lambda x: np.maximum(x, x.dtype.type(0)), _relu)
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
floor = Primitive(_rounding(np.floor), _of_kind(None, "floor"))
ceil = Primitive(_rounding(np.ceil), _of_kind(None, "ceil"))
trunc = Primitive(_rounding(np.trunc), _of_kind(None, "trunc"))
nearest = Primitive(_rounding(np.rint), _of_kind(None, "nearest"))
sign = Primitive(_sign, lambda x: (x > 0) - (x < 0))
quotient = Primitive(_quotient, "div", 2)
floor_quotient = Primitive(np.floor_divide, _of_kind("floor_div", "floor_quotient"), 2)
minimum = Primitive(np.minimum, "min", 2)
maximum = Primitive(np.maximum, "max", 2)
where = Primitive(np.where, "where", 3)
equal = Primitive(np.equal, "equal", 2)
nan = Primitive(np.isnan, lambda x: 1 - equal(x, x))
negated = Primitive(np.logical_not, lambda x: 1 - x)
either = Primitive(np.logical_xor, "bits_xor", 2)
power = Primitive(_power, "power", 2)
remainder = Primitive(np.mod, _of_kind("mod", "remainder"), 2)
fmod = Primitive(np.fmod, _of_kind("rem", "fmod"), 2)
bits_and = Primitive(np.bitwise_and, "bits_and", 2)
bits_or = Primitive(np.bitwise_or, "bits_or", 2)
bits_xor = Primitive(np.bitwise_xor, "bits_xor", 2)
bits_not = Primitive(np.bitwise_not, "bits_not")
shift_left = Primitive(np.left_shift, "shift_left", 2)
shift_right = Primitive(np.right_shift, "shift_right", 2)
hypot = Primitive(np.hypot, "hypot", 2)
atan2 = Primitive(np.arctan2, "atan2", 2)
