"""A node of a graph on its way to several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lowbit.graph.graph import Constant, Graph, Node, Tensor, numbers


class Parts:
    """What becomes of one node."""

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
        """A constant's numbers, if it is one."""
        found = self._graph.constants.get(name)
        return found if isinstance(found, np.ndarray) else None

    def numbers(self, name: str) -> np.ndarray | None:
        """What a constant stands for, of the graph's or of those that were added here."""
        found = self.constants.get(name, self._graph.constants.get(name))
        return None if found is None else numbers(found)

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

    def add(self, op: str, *inputs: str, like: Tensor | None = None, **attributes: Any) -> str:
        """A node in the middle; its output's name. like: whose format it keeps."""
        name = self._new(f"step {len(self.nodes)}")
        self.nodes.append(Node(op, inputs, (name,), attributes, self.node.name or name))
        if like is not None and like.scale is not None:
            self.formats[name] = like
        return name

    def end(self, op: str, *inputs: str, output: int = 0, **attributes: Any) -> bool:
        """The last node, or the last of what makes this output."""
        made = self.node.outputs[output]
        self.nodes.append(Node(op, inputs, (made,), attributes, self.node.name or made))
        return True

    def shaped(self, x: str, shape: Sequence[int], like: Tensor | None = None) -> str:
        sizes = self.constant(np.array(shape, np.int64))
        return self.add("Reshape", x, sizes, like=like, allowzero=1)
