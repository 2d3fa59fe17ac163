"""Operators as functions: for all that writes nodes of a graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lowbit.graph.graph import Node

IDENTITY = "Identity"


def identity(source: str, made: str, name: str = "") -> Node:
    """The node that gives a value another name, or another format."""
    return Node(IDENTITY, (source,), (made,), {}, name)


def _of_one(op: str) -> Callable[[Writer, str], str]:
    """The method that writes an operator of so many values."""
    return lambda writer, x: writer.op(op, x)


def _of_two(op: str) -> Callable[[Writer, str, str], str]:
    return lambda writer, x, y: writer.op(op, x, y)


def _of_three(op: str) -> Callable[[Writer, str, str, str], str]:
    return lambda writer, x, y, z: writer.op(op, x, y, z)


class Writer(ABC):
    """What adds nodes to a graph. Values are names; "" is an input that is left out.

    Most methods are the operator of their name, with numbers of Python where ONNX has constants.
    """

    @abstractmethod
    def op(self, op: str, *inputs: str, **attributes: Any) -> str:
        """A node of any operator, and the name of its first output."""

    @abstractmethod
    def constant(self, value: Any) -> str:
        """The name of a value that is known."""

    def ints(self, numbers: Sequence[int]) -> str:
        return self.constant(np.array(numbers, np.int64))

    def float32(self, number: float) -> str:
        return self.constant(np.array(number, np.float32))

    # Of each element

    logical_not, abs, floor, sqrt = map(_of_one, ("Not", "Abs", "Floor", "Sqrt"))
    add, sub, mul, div, power = map(_of_two, ("Add", "Sub", "Mul", "Div", "Pow"))
    minimum, maximum, equal, less = map(_of_two, ("Min", "Max", "Equal", "Less"))
    clip, where = map(_of_three, ("Clip", "Where"))

    def mod(self, x: str, y: str, fmod: bool = False) -> str:
        """The remainder, with the sign of y, or with `fmod` of x."""
        return self.op("Mod", x, y, fmod=int(fmod))

    def round(self, x: str, decimals: int = 0) -> str:
        return self.op("Round", x, decimals=decimals)

    def cast(self, x: str, to: str) -> str:
        """x as numbers of NumPy's dtype of this name."""
        return self.op("Cast", x, to=to)

    def same(self, x: str) -> str:
        """x under another name."""
        return self.op(IDENTITY, x)

    def quantize(self, x: str, scale: str, zero: str = "", **attributes: Any) -> str:
        return self.op("QuantizeLinear", x, scale, *filter(None, [zero]), **attributes)

    def dequantize(self, x: str, scale: str, zero: str = "", **attributes: Any) -> str:
        return self.op("DequantizeLinear", x, scale, *filter(None, [zero]), **attributes)

    # Of elements that move

    def reshape(self, x: str, shape: Sequence[Any], **attributes: Any) -> str:
        return self.op("Reshape", x, self.ints(shape), **attributes)

    def squeeze(self, x: str, axes: Sequence[int]) -> str:
        return self.op("Squeeze", x, self.ints(axes))

    def unsqueeze(self, x: str, axes: Sequence[int]) -> str:
        return self.op("Unsqueeze", x, self.ints(axes))

    def transpose(self, x: str, perm: Sequence[int], **attributes: Any) -> str:
        return self.op("Transpose", x, perm=tuple(perm), **attributes)

    def expand(self, x: str, shape: Sequence[Any]) -> str:
        return self.op("Expand", x, self.ints(shape))

    def concat(self, parts: Sequence[str], axis: int) -> str:
        return self.op("Concat", *parts, axis=axis) if len(parts) > 1 else parts[0]

    def slice(self, x: str, axis: int, begin: Any, end: Any, step: int = 1) -> str:
        """The elements of one axis from `begin` to before `end`."""
        limits = [self.ints([one]) for one in (begin, end, axis)]
        return self.op("Slice", x, *limits, *([self.ints([step])] if step != 1 else []))

    def gather(self, x: str, indices: str, axis: int = 0) -> str:
        return self.op("Gather", x, indices, axis=axis)

    arange = _of_three("Range")

    # Of many elements

    matmul = _of_two("MatMul")

    def linear(self, x: str, weight: str, *added: str, **attributes: Any) -> str:
        """x @ weightᵀ; added: a bias and a residual, if there are any."""
        return self.op("Linear", x, weight, *added, **attributes)

    def reduce(self, kind: str, x: str, axes: Sequence[int] | None, keepdims: bool = True) -> str:
        """kind: "sum", "mean", "max", "prod", "l1", ...; all axes where none are given."""
        along = [self.ints(axes)] if axes else []
        return self.op(f"Reduce{kind.capitalize()}", x, *along, keepdims=int(keepdims))

    def cumsum(self, x: str, axis: int) -> str:
        return self.op("CumSum", x, self.constant(np.int64(axis)))
