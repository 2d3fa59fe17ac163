"""Operators that compute each element by itself, their inputs broadcast: one table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from lowbit.graph.graph import Node, Tensor
from lowbit.graph.operator import Array, Operator, operators, real

Function = Callable[..., Any]


class Elementwise(Operator):
    """A function of a node and its inputs."""

    def __init__(self, function: Function) -> None:
        self.function = function

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        with np.errstate(all="ignore"):
            return (np.asarray(self.function(node, *inputs)),)

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        shape = np.broadcast_shapes(*(one.sizes for one in tensors if one is not None))
        ones = [None if one is None else np.zeros((), real(one)) for one in tensors]
        return (Tensor(self.compute(node, *ones)[0].dtype.name, shape),)


def _wide(function: Callable[[Array], Array]) -> Function:
    """A function of one number, in float64, rounded to the dtype of what it is given."""
    return lambda node, x: function(x.astype(np.float64)).astype(x.dtype)


def _numbered(function: Function, **defaults: float) -> Function:
    """The same, of one number and of attributes."""

    def computed(node: Node, x: Array) -> Array:
        given = {name: float(node.get(name, value)) for name, value in defaults.items()}
        return function(x.astype(np.float64), **given).astype(x.dtype)

    return computed


def _plain(function: Function) -> Function:
    """A function of NumPy that needs no attribute."""
    return lambda node, *inputs: function(*inputs)


def _variadic(function: Function) -> Function:
    return lambda node, *inputs: reduce(function, inputs)


def erf(x: Array) -> Array:
    """The error function, float64."""
    return np.fromiter(map(math.erf, x.ravel().tolist()), np.float64, x.size).reshape(x.shape)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), of which neither end overflows."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, small) / (1 + small)


def hard_sigmoid(x: Array, alpha: float = 0.2, beta: float = 0.5) -> Array:
    return np.clip(alpha * x + beta, 0, 1)


def hard_swish(x: Array) -> Array:
    """x · clip(x / 6 + 1 / 2, 0, 1)."""
    return x * hard_sigmoid(x, 1 / 6)


def gelu(x: Array) -> Array:
    """x · Φ(x), Φ the normal distribution."""
    return x * 0.5 * (1 + erf(x * math.sqrt(0.5)))


def gelu_tanh(x: Array) -> Array:
    return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: Array) -> Array:
    """x · σ(x). ONNX has no such operator before opset 24; PyTorch's name is taken."""
    return x * sigmoid(x)


def _softplus(x: Array) -> Array:
    return np.logaddexp(x, 0)


def _selu(x: Array, alpha: float, gamma: float) -> Array:
    return gamma * np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


def _gelu(node: Node, x: Array) -> Array:
    function = gelu_tanh if node.get("approximate", "none") == "tanh" else gelu
    return function(x.astype(np.float64)).astype(x.dtype)


def _clip(node: Node, x: Array, low: Array | None = None, high: Array | None = None) -> Array:
    x = x if low is None else np.maximum(x, low)
    return x if high is None else np.minimum(x, high)


def _power(node: Node, x: Array, y: Array) -> Array:
    return np.power(x.astype(np.float64), y.astype(np.float64)).astype(x.dtype)


def _divide(node: Node, x: Array, y: Array) -> Array:
    """The quotient; of integers, what is nearest to it towards 0."""
    if x.dtype.kind not in "iu":
        return np.divide(x, y)
    y = np.where(y == 0, 1, y)
    return np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))


def _modulo(node: Node, x: Array, y: Array) -> Array:
    return np.fmod(x, y) if node.get("fmod", 0) else np.mod(x, y)


def _infinite(node: Node, x: Array) -> Array:
    signs = (("detect_negative", np.isneginf), ("detect_positive", np.isposinf))
    return reduce(np.logical_or, (find(x) & bool(node.get(name, 1)) for name, find in signs))


def _cast(node: Node, x: Array) -> Array:
    return x.astype(np.dtype(node.get("to")))


def _mean(node: Node, *inputs: Array) -> Array:
    return np.divide(reduce(np.add, inputs), len(inputs), dtype=inputs[0].dtype)


_TABLE: dict[str, Function] = {
    # Activations
    "Relu": lambda node, x: np.maximum(x, x.dtype.type(0)),
    "LeakyRelu": _numbered(lambda x, alpha: np.where(x < 0, alpha * x, x), alpha=0.01),
    "ThresholdedRelu": _numbered(lambda x, alpha: np.where(x > alpha, x, 0), alpha=1.0),
    "PRelu": lambda node, x, slope: np.where(x < 0, slope * x, x),
    "Elu": _numbered(lambda x, alpha: np.where(x > 0, x, alpha * np.expm1(x)), alpha=1.0),
    "Celu": _numbered(
        lambda x, alpha: np.maximum(x, 0) + np.minimum(0, alpha * np.expm1(x / alpha)), alpha=1.0
    ),
    "Selu": _numbered(_selu, alpha=1.6732632, gamma=1.0507010),
    "Clip": _clip,
    "Sigmoid": _wide(sigmoid),
    "HardSigmoid": _numbered(hard_sigmoid, alpha=0.2, beta=0.5),
    "HardSwish": _wide(hard_swish),
    "Tanh": _wide(np.tanh),
    "Softplus": _wide(_softplus),
    "Softsign": _wide(lambda x: x / (1 + np.abs(x))),
    "Mish": _wide(lambda x: x * np.tanh(_softplus(x))),
    "Gelu": _gelu,
    "Silu": _wide(silu),
    # Functions of one number
    "Erf": _wide(erf),
    "Exp": _wide(np.exp),
    "Log": _wide(np.log),
    "Sqrt": _wide(np.sqrt),
    "Reciprocal": _wide(lambda x: 1 / x),
    "Sin": _wide(np.sin),
    "Cos": _wide(np.cos),
    "Tan": _wide(np.tan),
    "Sinh": _wide(np.sinh),
    "Cosh": _wide(np.cosh),
    "Asin": _wide(np.arcsin),
    "Acos": _wide(np.arccos),
    "Atan": _wide(np.arctan),
    "Asinh": _wide(np.arcsinh),
    "Acosh": _wide(np.arccosh),
    "Atanh": _wide(np.arctanh),
    "Abs": _plain(np.abs),
    "Neg": _plain(np.negative),
    "Sign": _plain(np.sign),
    "Floor": _plain(np.floor),
    "Ceil": _plain(np.ceil),
    "Round": _plain(np.rint),
    "IsNaN": _plain(np.isnan),
    "IsInf": _infinite,
    "Not": _plain(np.logical_not),
    "Cast": _cast,
    "Identity": _plain(np.asarray),
    # Of several
    "Add": _plain(np.add),
    "Sub": _plain(np.subtract),
    "Mul": _plain(np.multiply),
    "Div": _divide,
    "Mod": _modulo,
    "Pow": _power,
    "Min": _variadic(np.minimum),
    "Max": _variadic(np.maximum),
    "Sum": _variadic(np.add),
    "Mean": _mean,
    "Equal": _plain(np.equal),
    "Less": _plain(np.less),
    "LessOrEqual": _plain(np.less_equal),
    "Greater": _plain(np.greater),
    "GreaterOrEqual": _plain(np.greater_equal),
    "And": _plain(np.logical_and),
    "Or": _plain(np.logical_or),
    "Xor": _plain(np.logical_xor),
    "BitwiseAnd": _plain(np.bitwise_and),
    "BitwiseOr": _plain(np.bitwise_or),
    "BitwiseXor": _plain(np.bitwise_xor),
    "BitwiseNot": _plain(np.bitwise_not),
    "Where": _plain(np.where),
}

for _name, _function in _TABLE.items():
    operators.add(_name, Elementwise(_function))
