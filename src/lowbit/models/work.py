"""How many multiply-adds the nodes of a network have."""

from __future__ import annotations

from lowbit.graph import Graph
from lowbit.graph.operator import operators
from lowbit.graph.passes.infer import facts


def sized(graph: Graph, number: int) -> Graph:
    """The graph with this number for all sizes that a run chooses."""
    return graph.bound(dict.fromkeys(graph.open_sizes, number))


def multiply_adds(graph: Graph) -> dict[str, int]:
    """By the first output of each node that is a product, its multiply-adds. All sizes of the graph
    are numbers."""
    tensors = facts(graph)[0]
    counts = {}
    for node in graph.nodes:
        count = operators.get(node.op).multiply_adds
        if count is not None:
            sizes = [tensors[name].sizes for name in (*node.inputs, node.outputs[0]) if name]
            counts[node.outputs[0]] = count(node, *sizes)
    return counts


def linear_share(graph: Graph) -> float:
    """How much of the multiply-adds of all products linear layers have; 0 where there are none."""
    counts = multiply_adds(graph)
    weights = {node.outputs[0]: operators.get(node.op).weight for node in graph.nodes}
    rows = {name for name, one in weights.items() if one and one.channels == -1}
    linear = sum(count for name, count in counts.items() if name in rows)
    return linear / max(1, sum(counts.values()))
