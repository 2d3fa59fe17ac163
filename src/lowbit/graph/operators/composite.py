"""Operators that are written in others, once: their meaning and their lowering follow from that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from lowbit.graph.graph import Node, Tensor
from lowbit.graph.operator import Array, Operator, operators


class Parts(Protocol):
    """What takes the nodes that a node becomes. Values are named."""

    def tensor(self, name: str) -> Tensor:
        """What an input is."""
        ...

    def known(self, name: str) -> Array | None:
        """An input's numbers, if the network's inputs do not change them."""
        ...

    def constant(self, value: Any) -> str: ...

    def add(self, op: str, *inputs: str, **attributes: Any) -> str: ...

    def end(self, op: str, *inputs: str, **attributes: Any) -> bool:
        """Add the node that makes the output."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Composite(Operator):
    """An operator that is several others, which its `parts` add; its meaning is what they make."""

    meaning: Callable[..., Any] = lambda node: None

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        values = _Values(node, inputs)
        assert self.parts is not None
        if not self.parts(cast(Any, values), node):
            raise ValueError("its attributes are not supported")
        return (values.made,)


class _Values:
    """Parts that are computed as they come."""

    def __init__(self, node: Node, inputs: Sequence[Array | None]) -> None:
        self._arrays = {"": None, **dict(zip(node.inputs, inputs, strict=False))}
        self.made: Array

    def tensor(self, name: str) -> Tensor:
        array = self._arrays[name]
        assert array is not None
        return Tensor(array.dtype.name, array.shape)

    def known(self, name: str) -> Array | None:
        return self._arrays[name]

    def constant(self, value: Any) -> str:
        self._arrays[name := str(len(self._arrays))] = np.asarray(value)
        return name

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        node = Node(op, inputs, ("",), attributes)
        (made,) = operators.get(op).compute(node, *(self._arrays[name] for name in inputs))
        return self.constant(made)

    def end(self, op: str, *inputs: str, **attributes: Any) -> bool:
        self.made = np.asarray(self._arrays[self.add(op, *inputs, **attributes)])
        return True


def _one_hot(parts: Parts, node: Node) -> bool:
    """Indices below 0 count from the end; of others that do not exist there is no 1."""
    indices, depth, values = node.inputs
    size = parts.known(depth)
    if size is None:
        return False
    count, shape = int(size.item()), parts.tensor(indices).sizes
    axis = node.get("axis", -1) % (len(shape) + 1)
    whole, number = parts.add("Cast", indices, to="int64"), parts.constant(np.int64(count))
    below = parts.add("Less", whole, parts.constant(np.int64(0)))
    places = parts.add("Where", below, parts.add("Add", whole, number), whole)
    places = parts.add("Unsqueeze", places, parts.constant(np.array([axis])))
    steps = np.arange(count).reshape(-1, *[1] * (len(shape) - axis))
    off, on = (parts.add("Gather", values, parts.constant(np.int64(one))) for one in (0, 1))
    return parts.end("Where", parts.add("Equal", places, parts.constant(steps)), on, off)


def _hard_max(parts: Parts, node: Node) -> bool:
    """1 where the first of the greatest numbers is, else 0."""
    x, axis = node.inputs[0], node.get("axis", -1)
    tensor = parts.tensor(x)
    place = parts.add("ArgMax", x, axis=axis, keepdims=1)
    behind = len(tensor.sizes) - 1 - axis % len(tensor.sizes)
    steps = np.arange(tensor.sizes[axis]).reshape(-1, *[1] * behind)
    equal = parts.add("Equal", place, parts.constant(steps))
    return parts.end("Cast", equal, to="float32" if tensor.scale is not None else tensor.dtype)


def _eye_like(parts: Parts, node: Node) -> bool:
    tensor = parts.tensor(node.inputs[0])
    rows, columns = tensor.sizes
    eye = np.eye(rows, columns, node.get("k", 0), node.get("dtype", tensor.dtype))
    return parts.end("Identity", parts.constant(eye))


def _cast_like(parts: Parts, node: Node) -> bool:
    return parts.end("Cast", node.inputs[0], to=parts.tensor(node.inputs[1]).dtype)


operators.add("OneHot", Composite(parts=_one_hot))
operators.add("Hardmax", Composite(parts=_hard_max))
operators.add("EyeLike", Composite(parts=_eye_like))
operators.add("CastLike", Composite(parts=_cast_like))
