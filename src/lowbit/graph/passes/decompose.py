"""Operators that no kernel serves as they are, as several that kernels serve.

It is done where all sizes are known, right before nodes become steps. Between the parts numbers are
float32; what only moves keeps its format.
"""

from __future__ import annotations

from lowbit.graph.graph import Graph, Node
from lowbit.graph.operator import operators
from lowbit.graph.parts import Parts
from lowbit.graph.passes.infer import inferred


def decomposed(graph: Graph) -> Graph:
    """A graph of which every value's tensor is known (`inferred`), in operators with kernels."""
    changed = True
    while changed:
        nodes, changed = list[Node](), False
        constants, tensors = dict(graph.constants), dict(graph.tensors)
        for node in graph.nodes:
            parts = Parts(graph, node)
            rule = operators.get(node.op).parts
            if rule is None or not rule(parts, node):
                nodes.append(node)
                continue
            changed = True
            nodes += parts.nodes
            constants |= parts.constants
            tensors |= parts.formats
        if changed:
            made = graph.replaced(nodes=tuple(nodes), constants=constants, tensors=tensors)
            graph = inferred(made)
    return graph
