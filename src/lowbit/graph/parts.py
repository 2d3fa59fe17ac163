"""A node of a graph on its way to several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lowbit.graph.graph import Constant, Graph, Node, Tensor, numbers
from lowbit.graph.operator import operators
from lowbit.graph.writer import Writer, identity
from lowbit.weights.panels import PackedMatrix


class Parts(Writer):
    """What becomes of one node. What follows from nothing but constants is computed."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self.node = node
        self.attributes: dict[str, Any] = dict(node.attributes)
        self.nodes: list[Node] = []
        self.constants: dict[str, Constant] = {}
        self.formats: dict[str, Tensor] = {}
        self._graph = graph

    def tensor(self, name: str) -> Tensor:
        """What a value of the graph is."""
        known = self._graph.constants.get(name)
        if known is None:
            return self._graph.tensors[name]
        return Tensor(known.dtype.name if isinstance(known, np.ndarray) else "float32", known.shape)

    def known(self, name: str) -> np.ndarray | None:
        """What a constant stands for, if it is one, of the graph's or of those added here."""
        found = self.constants.get(name, self._graph.constants.get(name))
        return None if found is None or isinstance(found, PackedMatrix) else numbers(found)

    def _new(self, what: str) -> str:
        """A name that nothing has: what becomes of a node may be taken apart again."""
        name = f"{next(filter(None, self.node.outputs))} {what}"
        while name in self._graph.tensors or name in self._graph.constants:
            name += "'"
        return name

    def constant(self, value: Any) -> str:
        name = self._new(f"part {len(self.constants)}")
        self.constants[name] = np.asarray(value)
        return name

    def op(self, op: str, *inputs: str, like: Tensor | None = None, **attributes: Any) -> str:
        """A node in the middle; its output's name. like: whose format it keeps."""
        arrays = [array for name in inputs if (array := self.known(name)) is not None]
        if len(arrays) == len(inputs):
            node = Node(op, inputs, ("",), attributes)
            return self.constant(operators.get(op).compute(node, *arrays)[0])
        name = self._new(f"step {len(self.nodes)}")
        self.nodes.append(Node(op, inputs, (name,), attributes, self.node.name or name))
        if like is not None and like.scale is not None:
            self.formats[name] = like
        return name

    def end(self, value: str, output: int = 0) -> bool:
        """Let a value be an output, if the node has this one."""
        made = (*self.node.outputs, *("",) * output)[output]
        if not made:
            return True
        if not self.nodes or self.nodes[-1].outputs != (value,):
            name = self.node.name or made
            self.nodes.append(identity(value, made, name))
            return True
        last = self.nodes.pop()
        self.formats.pop(value, None)
        self.nodes.append(last.replaced(outputs=(made,), name=self.node.name or made))
        return True

    def shaped(self, x: str, shape: Sequence[int], like: Tensor | None = None) -> str:
        return self.reshape(x, shape, like=like, allowzero=1)
