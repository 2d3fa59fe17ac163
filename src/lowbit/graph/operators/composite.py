"""Operators that are written in others, once: their meaning and their lowering follow from that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowbit.graph.graph import Node, Tensor
from lowbit.graph.operator import Array, Operator, Sizes, operators, real
from lowbit.graph.parts import Parts


@dataclass(frozen=True, kw_only=True, eq=False)
class Composite(Operator):
    """An operator that is several others, which its `parts` add; its meaning is what they make."""

    meaning: Callable[..., Any] = lambda node: None

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        values = _Computed(node, inputs)
        assert self.parts is not None
        if not self.parts(values, node):
            raise ValueError("its attributes are not supported")
        return tuple(values.made[number] for number in sorted(values.made))


class _Value(str):
    """The name of what has been computed, which is kept as long as the name."""

    array: Array | None


class _Computed(Parts):
    """Parts that are computed as they come."""

    def __init__(self, node: Node, inputs: Sequence[Array | None]) -> None:
        self.attributes = dict(node.attributes)
        self.made: dict[int, Array] = {}
        self._inputs = dict(zip(node.inputs, inputs, strict=False))

    def tensor(self, name: str) -> Tensor:
        array = self.known(name)
        assert array is not None
        return Tensor(array.dtype.name, array.shape)

    def known(self, name: str) -> Array | None:
        return name.array if isinstance(name, _Value) else self._inputs.get(name)

    def constant(self, value: Any) -> str:
        name = _Value("computed")
        name.array = np.asarray(value)
        return name

    def op(self, op: str, *inputs: str, like: Tensor | None = None, **attributes: Any) -> str:
        node = Node(op, inputs, ("",), attributes)
        return self.constant(operators.get(op).compute(node, *map(self.known, inputs))[0])

    def end(self, value: str, output: int = 0) -> bool:
        made = self.known(value)
        assert made is not None
        self.made[output] = made
        return True


def _one_hot(parts: Parts, node: Node) -> bool:
    """Indices below 0 count from the end; of others that do not exist there is no 1."""
    indices, depth, values = node.inputs
    size = parts.known(depth)
    if size is None:
        return False
    count, shape = int(size.item()), parts.tensor(indices).sizes
    axis = node.get("axis", -1) % (len(shape) + 1)
    whole, number = parts.cast(indices, "int64"), parts.constant(np.int64(count))
    below = parts.less(whole, parts.constant(np.int64(0)))
    places = parts.unsqueeze(parts.where(below, parts.add(whole, number), whole), [axis])
    steps = np.arange(count).reshape(-1, *[1] * (len(shape) - axis))
    off, on = (parts.gather(values, parts.constant(np.int64(one))) for one in (0, 1))
    return parts.end(parts.where(parts.equal(places, parts.constant(steps)), on, off))


class _OneHot(Composite):
    """Of which one input has to be known, the second."""

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        indices, _, values = tensors
        assert indices is not None
        assert values is not None
        self._check_known(node, tensors[:2], known, 1)
        assert known[1] is not None
        shape = list(indices.sizes)
        count = int(known[1].item())
        if count < 0 or values.sizes != (2,):
            raise ValueError(f"a depth of {count} and values of {list(values.sizes)} do not fit")
        shape.insert(node.get("axis", -1) % (len(shape) + 1), count)
        dtype = real(values) if known[2] is None else known[2].dtype
        return (Tensor(dtype.name, tuple(shape)),)


def _hard_max(parts: Parts, node: Node) -> bool:
    """1 where the first of the greatest numbers is, else 0."""
    x, axis = node.inputs[0], node.get("axis", -1)
    tensor = parts.tensor(x)
    place = parts.op("ArgMax", x, axis=axis, keepdims=1)
    behind = len(tensor.sizes) - 1 - axis % len(tensor.sizes)
    steps = np.arange(tensor.sizes[axis]).reshape(-1, *[1] * behind)
    equal = parts.equal(place, parts.constant(steps))
    dtype = "float32" if tensor.scale is not None else tensor.dtype
    return parts.end(parts.cast(equal, dtype))


def _eye_like(parts: Parts, node: Node) -> bool:
    tensor = parts.tensor(node.inputs[0])
    rows, columns = tensor.sizes
    eye = np.eye(rows, columns, node.get("k", 0), node.get("dtype", tensor.dtype))
    return parts.end(parts.constant(eye))


def _cast_like(parts: Parts, node: Node) -> bool:
    return parts.end(parts.cast(node.inputs[0], parts.tensor(node.inputs[1]).dtype))


def _same(node: Node, x: Sizes, *others: Sizes) -> Sizes:
    return x


operators.add("OneHot", _OneHot(parts=_one_hot))
operators.add("Hardmax", Composite(parts=_hard_max, shape=_same))
operators.add("EyeLike", Composite(
    parts=_eye_like, shape=_same,
    dtype=lambda node, tensors: node.get("dtype", tensors[0] and tensors[0].dtype),
))  # fmt: skip
operators.add("CastLike", Composite(
    parts=_cast_like, shape=_same,
    dtype=lambda node, tensors: real(tensors[1]).name if tensors[1] else "",
))  # fmt: skip
