"""Operators that work on each element."""

from __future__ import annotations

import math
from typing import Any

import torch

from lowbit.torch.capture.builder import SYMBOLS, Builder, Value, converter

_UNARY = {
    "abs": "Abs", "ceil": "Ceil", "cos": "Cos", "erf": "Erf", "exp": "Exp", "floor": "Floor",
    "hardswish": "HardSwish", "log": "Log", "logical_not": "Not", "mish": "Mish", "neg": "Neg",
    "reciprocal": "Reciprocal", "relu": "Relu", "sigmoid": "Sigmoid", "sign": "Sign",
    "sin": "Sin", "sqrt": "Sqrt", "tanh": "Tanh",
}  # fmt: skip

_UNARY |= {
    name: name.capitalize()
    for name in ("acos", "acosh", "asin", "asinh", "atan", "atanh", "cosh", "sinh", "tan")
}

_BINARY = {
    "eq": "Equal", "ge": "GreaterOrEqual", "gt": "Greater",
    "le": "LessOrEqual", "logical_and": "And", "logical_or": "Or", "logical_xor": "Xor",
    "lt": "Less", "maximum": "Max", "minimum": "Min", "mul": "Mul", "pow": "Pow",
}  # fmt: skip

_ALMOST_LINEAR = 20.0
_LN_2, _LN_10 = math.log(2), math.log(10)


@converter(*_UNARY)
def unary(b: Builder, *, x: Value, **_: Any) -> Value:
    if b.out.dtype is torch.bool and b.operator == "sign":
        return x
    return b.add(_UNARY[b.operator], b.cast(x, b.out.dtype))


def operands(b: Builder, *given: Any, dtype: torch.dtype | None = None) -> list[Value]:
    """Tensors and numbers as values of the dtype that PyTorch computes with."""
    dtype = dtype or _common(b, given)
    return [b.cast(one, dtype) if isinstance(one, str) else b.number(one, dtype) for one in given]


def _common(b: Builder, given: tuple[Any, ...]) -> torch.dtype:
    made = [b.fakes[one] if isinstance(one, str) else _like(one) for one in given]
    dtype = torch.result_type(made[0], made[1])
    return torch.float32 if b.out.dtype is torch.float32 and not dtype.is_floating_point else dtype


def _like(number: Any) -> Any:
    """A number of its type, which may follow from sizes."""
    if not isinstance(number, SYMBOLS):
        return number
    return 0.0 if isinstance(number, torch.SymFloat) else 0


@converter(*_BINARY)
def binary(b: Builder, *, x: Any, other: Any = None, exponent: Any = None) -> Value:
    dtype = torch.bool if b.operator.startswith("logical") else None
    two = operands(b, x, exponent if other is None else other, dtype=dtype)
    return b.add(_BINARY[b.operator], *two)


@converter("div", "floor_divide")
def divide(b: Builder, *, x: Any, other: Any, rounding_mode: str | None = None) -> Value:
    """Of integers, ONNX's division drops the fraction, as "trunc" does."""
    one, two = operands(b, x, other)
    floored = b.operator == "floor_divide" or rounding_mode == "floor"
    if b.out.dtype.is_floating_point:
        made = b.add("Div", one, two)
        if floored:
            return b.add("Floor", made)
        return made if rounding_mode is None else _truncated(b, made)
    if floored:
        one = b.add("Sub", one, b.add("Mod", one, two))
    return b.add("Div", one, two)


@converter("remainder", "fmod")
def remainder(b: Builder, *, x: Any, other: Any) -> Value:
    return b.add("Mod", *operands(b, x, other), fmod=int(b.operator == "fmod"))


@converter("trunc")
def trunc(b: Builder, *, x: Value) -> Value:
    return _truncated(b, x) if b.out.dtype.is_floating_point else x


def _truncated(b: Builder, x: Value) -> Value:
    return b.add("Mul", b.add("Sign", x), b.add("Floor", b.add("Abs", x)))


@converter("round")
def round_(b: Builder, *, x: Value, decimals: int = 0) -> Value:
    if not b.out.dtype.is_floating_point:
        return x
    if not decimals:
        return b.add("Round", x)
    power = b.number(10.0**decimals, b.out.dtype)
    return b.add("Div", b.add("Round", b.add("Mul", x, power)), power)


@converter("add", "sub", "rsub")
def add(b: Builder, *, x: Any, other: Any, alpha: Any = 1) -> Value:
    one, two = operands(b, x, other)
    if b.operator == "rsub":
        one, two = two, one
    if alpha != 1:  # of what is added or taken away
        two = b.add("Mul", two, b.number(alpha, _common(b, (x, other))))
    return b.add("Add" if b.operator == "add" else "Sub", one, two)


@converter("clamp", "hardtanh", "clamp_min", "clamp_max")
def clamp(
    b: Builder, *, x: Value, min: Any = None, max: Any = None, min_val: Any = None,
    max_val: Any = None,
) -> Value:  # fmt: skip
    low, high = (min if min_val is None else min_val), (max if max_val is None else max_val)
    x, dtype = b.cast(x, b.out.dtype), b.out.dtype
    limits = ["" if one is None else operands(b, one, dtype=dtype)[0] for one in (low, high)]
    if isinstance(low, str) or isinstance(high, str):
        for op, bound in zip(("Max", "Min"), limits, strict=True):
            x = b.add(op, x, bound) if bound else x
        return x
    return b.add("Clip", x, *limits)


@converter("relu6")
def relu6(b: Builder, *, x: Value) -> Value:
    return clamp(b, x=x, min=0.0, max=6.0)


@converter("silu")
def silu(b: Builder, *, x: Value) -> Value:
    return b.add("Silu", x)


@converter("hardsigmoid")
def hardsigmoid(b: Builder, *, x: Value) -> Value:
    return b.add("HardSigmoid", x, alpha=1 / 6, beta=0.5)


@converter("gelu")
def gelu(b: Builder, *, x: Value, approximate: str) -> Value:
    return b.add("Gelu", x, approximate=approximate)


@converter("leaky_relu")
def leaky_relu(b: Builder, *, x: Value, negative_slope: float) -> Value:
    return b.add("LeakyRelu", x, alpha=float(negative_slope))


@converter("elu")
def elu(b: Builder, *, x: Value, alpha: float, scale: float, input_scale: float) -> Value:
    if input_scale != 1:
        raise NotImplementedError("elu of what is scaled before is not translated")
    made = b.add("Elu", x, alpha=float(alpha))
    return made if scale == 1 else b.add("Mul", made, b.number(scale, b.out.dtype))


@converter("prelu", "_prelu_kernel")
def prelu(b: Builder, *, x: Value, weight: Value) -> Value:
    sizes, axes = b.shape(weight), len(b.shape(x))
    if len(sizes) == 1 and axes > 2:  # a slope for each channel, which is the second axis
        weight = b.reshape(weight, sizes, (sizes[0], *[1] * (axes - 2)))
    return b.add("PRelu", x, weight)


@converter("softplus")
def softplus(b: Builder, *, x: Value, beta: float, threshold: float) -> Value:
    """Beyond the threshold x itself, which beyond 20 is what softplus is in float32."""
    factor = None if beta == 1 else b.number(beta, b.out.dtype)
    scaled = x if factor is None else b.add("Mul", x, factor)
    made = b.add("Softplus", scaled)
    if factor is not None:
        made = b.add("Div", made, factor)
    if threshold >= _ALMOST_LINEAR:
        return made
    return b.add("Where", b.add("Greater", scaled, b.number(threshold, b.out.dtype)), x, made)


@converter("rsqrt")
def rsqrt(b: Builder, *, x: Value) -> Value:
    return b.add("Reciprocal", b.add("Sqrt", b.cast(x, b.out.dtype)))


@converter("square")
def square(b: Builder, *, x: Value) -> Value:
    return b.add("Mul", x, x)


@converter("expm1")
def expm1(b: Builder, *, x: Value) -> Value:
    """(exp(x) + 1) · tanh(x / 2), which loses nothing near 0."""
    x, one = b.cast(x, b.out.dtype), b.number(1, b.out.dtype)
    half = b.add("Mul", x, b.number(0.5, b.out.dtype))
    return b.add("Mul", b.add("Add", b.add("Exp", x), one), b.add("Tanh", half))


@converter("log1p")
def log1p(b: Builder, *, x: Value) -> Value:
    """The logarithm of what 1 + x is rounded to, and what the rounding took away."""
    x, one = b.cast(x, b.out.dtype), b.number(1, b.out.dtype)
    total = b.add("Add", x, one)
    made, kept = b.add("Log", total), b.add("Sub", total, one)
    better = b.add("Add", made, b.add("Div", b.add("Sub", x, kept), total))
    return b.add("Where", b.add("Equal", kept, x), made, better)


@converter("log2", "log10")
def log_to_base(b: Builder, *, x: Value) -> Value:
    base = _LN_2 if b.operator == "log2" else _LN_10
    return b.add("Div", b.add("Log", b.cast(x, b.out.dtype)), b.number(base, b.out.dtype))


@converter("exp2")
def exp2(b: Builder, *, x: Value) -> Value:
    return b.add("Pow", b.number(2, b.out.dtype), b.cast(x, b.out.dtype))


@converter("atan2")
def atan2(b: Builder, *, x: Value, other: Value) -> Value:
    """The angle of the point (other, x), which is beyond a quarter of a turn left of 0."""
    x, other = operands(b, x, other)
    zero, half = b.number(0, b.out.dtype), b.number(math.pi, b.out.dtype)
    angle = b.add("Where", b.add("Equal", x, zero), zero, b.add("Atan", b.add("Div", x, other)))
    turn = b.add("Where", b.add("Less", x, zero), b.add("Neg", half), half)
    return b.add("Where", b.add("Less", other, zero), b.add("Add", angle, turn), angle)


@converter("erfc")
def erfc(b: Builder, *, x: Value) -> Value:
    return b.add("Sub", b.number(1, b.out.dtype), b.add("Erf", b.cast(x, b.out.dtype)))


@converter("hypot")
def hypot(b: Builder, *, x: Value, other: Value) -> Value:
    return b.add("Sqrt", b.add("Add", b.add("Mul", x, x), b.add("Mul", other, other)))


@converter("ne")
def ne(b: Builder, *, x: Any, other: Any) -> Value:
    return b.add("Not", b.add("Equal", *operands(b, x, other)))


_OF_BITS = {"and": "And", "xor": "Xor", "or": "Or", "not": "Not"}


@converter("bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor", "__and__", "__or__",
           "__xor__")  # fmt: skip
def bitwise(b: Builder, *, x: Value, other: Any = None) -> Value:
    op = _OF_BITS[b.operator.removeprefix("bitwise").strip("_")]
    if b.out.dtype is not torch.bool:
        op = f"Bitwise{op}"
    if other is None:
        return b.add(op, x)
    return b.add(op, *operands(b, x, other, dtype=b.out.dtype))


@converter("where")
def where(b: Builder, *, condition: Value, x: Any, other: Any) -> Value:
    return b.add("Where", condition, *operands(b, x, other, dtype=b.out.dtype))


@converter("masked_fill")
def masked_fill(b: Builder, *, x: Value, mask: Value, value: Any) -> Value:
    (fill,) = operands(b, value, dtype=b.out.dtype)
    return b.add("Where", mask, fill, x)


@converter("isinf", "isnan")
def not_finite(b: Builder, *, x: Value) -> Value:
    return b.add("IsInf" if b.operator == "isinf" else "IsNaN", x)


@converter("_to_copy", "to", "type_as")
def to_copy(b: Builder, *, x: Value, **_: Any) -> Value:
    return b.cast(x, b.out.dtype)


@converter(
    "clone", "contiguous", "detach", "alias", "lift_fresh_copy", "dropout", "feature_dropout",
    "alpha_dropout", "detach_",
)  # fmt: skip
def same(b: Builder, *, x: Value = "", input: Value = "", train: bool = False, **_: Any) -> Value:
    if train:
        raise NotImplementedError("dropout that is on in eval mode is not translated")
    return x or input


@converter("prims::copy_strided")
def copy_strided(b: Builder, *, a: Value, stride: Any) -> Value:
    """Strides are PyTorch's own matter."""
    return a


@converter("_softmax", "softmax", "_safe_softmax")
def softmax(b: Builder, *, x: Value, dim: int, **_: Any) -> Value:
    made = b.add("Softmax", b.cast(x, b.out.dtype), axis=dim)
    if b.operator != "_safe_softmax":
        return made
    # A row in which nothing takes part is all zeros.
    nothing = b.number(-math.inf, b.out.dtype)
    greatest = b.add("ReduceMax", x, b.ints([dim]), keepdims=1)
    return b.add("Where", b.add("Equal", greatest, nothing), b.number(0, b.out.dtype), made)


@converter("_log_softmax", "log_softmax")
def log_softmax(b: Builder, *, x: Value, dim: int, **_: Any) -> Value:
    return b.add("LogSoftmax", x, axis=dim)
