"""Recurrent layers, as the operators of all their steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowbit.graph.graph import Node
from lowbit.graph.operator import Array, operators
from lowbit.graph.operators.recurrent import Sizes, Writer, layer

if TYPE_CHECKING:
    from lowbit.graph.passes.decompose import Parts


class _Names(Writer[str]):
    """Operators as nodes of a graph; those of nothing but constants are computed."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def __call__(self, op: str, *inputs: str, **attributes: Any) -> str:
        arrays = [array for name in inputs if (array := self._parts.numbers(name)) is not None]
        if len(arrays) < len(inputs):
            return self._parts.add(op, *inputs, **attributes)
        node = Node(op, inputs, ("",), attributes)
        return self.constant(operators.get(op).compute(node, *arrays)[0])

    def constant(self, value: Array) -> str:
        return self._parts.constant(value)


def recurrent(parts: Parts, node: Node) -> bool:
    """A layer of a sequence whose length is known by now."""
    x, w, r = (parts.tensor(name).sizes for name in node.inputs[:3])
    inputs = [name or None for name in node.inputs]
    outputs = layer(_Names(parts), node, inputs, Sizes.of(node, x, w, r))
    for number, (name, made) in enumerate(zip(node.outputs, outputs, strict=False)):
        if name:
            parts.end("Identity", made, output=number)
    return True
