"""How passes look for nodes that belong together, and put others in their place."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowbit.graph.graph import Constant, Graph, Node, Tensor, live, numbers
from lowbit.graph.operator import Array, operators, real
from lowbit.graph.passes.infer import views
from lowbit.numerics import QTensor
from lowbit.weights.panels import PackedMatrix


class Values:
    """A graph, asked about by the names of its values."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.producers = graph.producers()
        self.uses = graph.uses()
        self.order = {name: place for place, name in enumerate(self.producers)}
        self._views: tuple[dict[str, Tensor], ...] | None = None

    def formatted(self, name: str) -> bool:
        """Whether a value is kept as integers with a scale."""
        tensor = self.graph.tensors.get(name)
        return tensor is not None and tensor.scale is not None

    def same_format(self, *names: str) -> bool:
        """Whether values are kept alike: as what is computed, or as the same integers."""
        kept = [self.graph.tensors[name] for name in names if self.formatted(name)]
        alike = len({(one.dtype, one.scale, one.zero_point) for one in kept}) == 1
        return not kept or (alike and len(kept) == len(names))

    def maker(self, name: str, *ops: str) -> Node | None:
        """The node of one of these operators that makes a value, unless it is then rounded."""
        node = self.producers.get(name)
        return None if node is None or node.op not in ops or self.formatted(name) else node

    def only(self, name: str, *ops: str) -> Node | None:
        """The same, if the value is read once and by a node."""
        return self.maker(name, *ops) if self.uses[name] == 1 and not self.leaves(name) else None

    def layer(self, name: str) -> Node | None:
        """The same, of a product with a weight."""
        node = self.producers.get(name)
        weighted = node is not None and operators.get(node.op).weight is not None
        return self.only(name, node.op) if node is not None and weighted else None

    def leaves(self, name: str) -> bool:
        return name in self.graph.outputs

    def constant(self, name: str) -> Constant | None:
        return self.graph.constants.get(name)

    def array(self, name: str) -> Array | None:
        """A constant that is no weight of integers."""
        found = self.graph.constants.get(name)
        return None if isinstance(found, QTensor | PackedMatrix) else found

    def number(self, name: str) -> float | None:
        """A constant of one number."""
        found = self.graph.constants.get(name)
        return None if found is None or math.prod(found.shape) != 1 else numbers(found).item()

    @property
    def views(self) -> tuple[dict[str, Tensor], ...]:
        """What all values are (infer.views), found when it is first asked for."""
        if self._views is None:
            self._views = views(self.graph)
        return self._views

    def rank(self, name: str) -> int | None:
        """How many axes a value has, if that is known."""
        return len(self.views[0][name].shape) if self.views else None

    def same_shape(self, *names: str) -> bool:
        """Whether values are known to have the same shape and dtype, whatever the inputs' sizes."""
        return bool(self.views) and all(
            len({(view[name].shape, real(view[name])) for name in names}) == 1
            for view in self.views
        )


@dataclass(frozen=True)
class Replacement:
    """Nodes that stand where one stood, the last of which makes what it made; and new constants."""

    nodes: Sequence[Node]
    constants: Mapping[str, Any] = field(default_factory=dict)


Rule = Callable[[Values, Node], Replacement | None]


def rewritten(graph: Graph, rules: Sequence[Rule]) -> Graph:
    """The graph after each node was replaced as the first rule says that applies to it, again and
    again until none applies. What is no longer needed is left out.

    In one turn rules look at the graph as it was before: names keep their meaning, so nodes that
    have been replaced since still say what their values are."""
    while True:
        values, nodes, constants = Values(graph), list[Node](), dict(graph.constants)
        for node in graph.nodes:
            found = _first(rules, values, node)
            nodes += (node,) if found is None else found.nodes
            constants.update({} if found is None else found.constants)
        if tuple(nodes) == graph.nodes:
            return graph
        graph = graph.replaced(nodes=live(nodes, graph.outputs), constants=constants)


def _first(rules: Sequence[Rule], values: Values, node: Node) -> Replacement | None:
    return next((found for rule in rules if (found := rule(values, node)) is not None), None)
