"""How many multiply-adds the nodes of a network have."""

from __future__ import annotations

import math

from lowbit.graph import Graph
from lowbit.graph.graph import Node, Tensor
from lowbit.graph.passes.infer import facts


def sized(graph: Graph, number: int) -> Graph:
    """The graph with this number for all sizes that a run chooses."""
    return graph.bound(dict.fromkeys(graph.open_sizes, number))


def multiply_adds(graph: Graph) -> dict[str, int]:
    """By the first output of each node that is a product, its multiply-adds. All sizes of the graph
    are numbers."""
    tensors = facts(graph)[0]
    return {
        node.outputs[0]: count
        for node in graph.nodes
        if (count := _count(node, tensors)) is not None
    }


def _count(node: Node, tensors: dict[str, Tensor]) -> int | None:
    """None where a node is no product."""
    if node.op not in ("Conv", "ConvTranspose", "Linear", "MatMul", "Gemm", "Attention"):
        return None
    made = math.prod(tensors[node.outputs[0]].sizes)
    x, weight = (tensors[name].sizes for name in node.inputs[:2])
    if node.op == "Conv":
        return made * math.prod(weight[1:])
    if node.op == "ConvTranspose":
        return math.prod(x) * math.prod(weight[1:])
    if node.op in ("Linear", "MatMul"):
        return made * x[-1]
    if node.op == "Gemm":
        return made * x[-2 if node.get("transA", 0) else -1]
    return (math.prod(x) + made) * weight[-2]  # scores, then sums of values


def linear_share(graph: Graph) -> float:
    """How much of the multiply-adds of all products linear layers have; 0 where there are none."""
    counts = multiply_adds(graph)
    ops = {node.outputs[0]: node.op for node in graph.nodes}
    linear = sum(count for name, count in counts.items() if ops[name] == "Linear")
    return linear / max(1, sum(counts.values()))
