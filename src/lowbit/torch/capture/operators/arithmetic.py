"""Operators that work on each element."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from lowbit.graph.operator import operators
from lowbit.graph.operators.elementwise import Elementwise
from lowbit.torch.capture.builder import SYMBOLS, Builder, Value, converter


def operands(b: Builder, *given: Any, dtype: torch.dtype | None = None) -> list[Value]:
    """Tensors and numbers as values of the dtype that PyTorch computes with."""
    dtype = dtype or _common(b, given)
    return [b.to(one, dtype) if isinstance(one, str) else b.number(one, dtype) for one in given]


def _common(b: Builder, given: tuple[Any, ...]) -> torch.dtype:
    made = [b.fakes[one] if isinstance(one, str) else _like(one) for one in given]
    dtype = torch.result_type(made[0], made[1])
    return torch.float32 if b.out.dtype is torch.float32 and not dtype.is_floating_point else dtype


def _like(number: Any) -> Any:
    """A number of its type, which may follow from sizes."""
    if not isinstance(number, SYMBOLS):
        return number
    return 0.0 if isinstance(number, torch.SymFloat) else 0


def same_operator(op: str, b: Builder, **arguments: Any) -> Value:
    """An operator of ours that is ATen's: inputs in the order of its schema, attributes by name."""
    record, logical = operators.get(op), b.operator.startswith("logical")
    named = {
        ours: arguments.pop(theirs) if isinstance(theirs, str) else theirs
        for ours, theirs in record.arguments.items()
    }
    given = [one for one in arguments.values() if one is not None]
    if not isinstance(record, Elementwise):
        return b.op(op, *(one for one in given if isinstance(one, str)), **named)
    if len(given) > 1:
        inputs = operands(b, *given, dtype=torch.bool if logical else None)
    elif b.out.dtype is torch.bool and not logical:
        inputs = given
    else:
        inputs = [b.to(given[0], b.out.dtype)]
    return b.op(op, *inputs, **named)


for _op, _record in operators.load().items():
    for _name in _record.aten:
        converter(_name)(partial(same_operator, _op))


@converter("div")
def divide(b: Builder, *, x: Any, other: Any, rounding_mode: str | None = None) -> Value:
    """Of integers, ONNX's division drops the fraction, as "trunc" does."""
    one, two = operands(b, x, other)
    floored = rounding_mode == "floor"
    if b.out.dtype.is_floating_point:
        if floored:
            return b.op("FloorDiv", one, two)
        made = b.div(one, two)
        return made if rounding_mode is None else b.op("Trunc", made)
    return b.op("FloorDiv", one, two) if floored else b.div(one, two)


@converter("remainder", "fmod")
def remainder(b: Builder, *, x: Any, other: Any) -> Value:
    one, two = operands(b, x, other)
    return b.mod(one, two, fmod=b.operator == "fmod")


@converter("__lshift__", "__rshift__", "bitwise_left_shift", "bitwise_right_shift")
def shift(b: Builder, *, x: Any, other: Any) -> Value:
    left = b.operator in ("__lshift__", "bitwise_left_shift")
    return b.op("BitShift", *operands(b, x, other), direction="LEFT" if left else "RIGHT")


@converter("trunc")
def trunc(b: Builder, *, x: Value) -> Value:
    return b.op("Trunc", x) if b.out.dtype.is_floating_point else x


@converter("round")
def round_(b: Builder, *, x: Value, decimals: int = 0) -> Value:
    return b.round(x, decimals) if b.out.dtype.is_floating_point else x


@converter("add", "sub")
def add(b: Builder, *, x: Any, other: Any, alpha: Any = 1) -> Value:
    one, two = operands(b, x, other)
    if alpha != 1:  # of what is added or taken away
        two = b.mul(two, b.number(alpha, _common(b, (x, other))))
    return b.add(one, two) if b.operator == "add" else b.sub(one, two)


@converter("clamp", "hardtanh")
def clamp(
    b: Builder, *, x: Value, min: Any = None, max: Any = None, min_val: Any = None,
    max_val: Any = None,
) -> Value:  # fmt: skip
    low, high = (min if min_val is None else min_val), (max if max_val is None else max_val)
    x, dtype = b.to(x, b.out.dtype), b.out.dtype
    limits = ["" if one is None else operands(b, one, dtype=dtype)[0] for one in (low, high)]
    if isinstance(low, str) or isinstance(high, str):
        for op, bound in zip((b.maximum, b.minimum), limits, strict=True):
            x = op(x, bound) if bound else x
        return x
    return b.clip(x, *limits)


@converter("hardsigmoid")
def hardsigmoid(b: Builder, *, x: Value) -> Value:
    return b.op("HardSigmoid", x, alpha=1 / 6, beta=0.5)


@converter("prelu", "_prelu_kernel")
def prelu(b: Builder, *, x: Value, weight: Value) -> Value:
    sizes, axes = b.shape(weight), len(b.shape(x))
    if len(sizes) == 1 and axes > 2:  # a slope for each channel, which is the second axis
        weight = b.in_shape(weight, sizes, (sizes[0], *[1] * (axes - 2)))
    return b.op("PRelu", x, weight)


@converter("rsqrt")
def rsqrt(b: Builder, *, x: Value) -> Value:
    return b.div(b.number(1, b.out.dtype), b.sqrt(b.to(x, b.out.dtype)))


@converter("bitwise_not")
def bitwise_not(b: Builder, *, x: Value) -> Value:
    return b.logical_not(x) if b.out.dtype is torch.bool else b.op("BitwiseNot", x)


@converter("where")
def where(b: Builder, *, condition: Value, x: Any, other: Any) -> Value:
    return b.where(condition, *operands(b, x, other, dtype=b.out.dtype))


@converter("_to_copy")
def to_copy(b: Builder, *, x: Value, **_: Any) -> Value:
    return b.to(x, b.out.dtype)


@converter(
    "clone", "alias", "lift_fresh_copy", "dropout", "detach_",
)  # fmt: skip
def same(b: Builder, *, x: Value = "", input: Value = "", train: bool = False, **_: Any) -> Value:
    if train:
        raise NotImplementedError("dropout that is on in eval mode is not translated")
    return x or input


@converter("prims::copy_strided")
def copy_strided(b: Builder, *, a: Value, stride: Any) -> Value:
    """Strides are PyTorch's own matter."""
    return a


@converter("_softmax", "_safe_softmax")
def softmax(b: Builder, *, x: Value, dim: int, **_: Any) -> Value:
    made = b.op("Softmax", b.to(x, b.out.dtype), axis=dim)
    if b.operator != "_safe_softmax":
        return made
    # A row in which nothing takes part is all zeros.
    nothing = b.number(-math.inf, b.out.dtype)
    greatest = b.reduce("max", x, [dim])
    return b.where(b.equal(greatest, nothing), b.number(0, b.out.dtype), made)
