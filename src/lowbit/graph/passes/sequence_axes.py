"""Which values hold something for each position of a sentence."""

from __future__ import annotations

from collections.abc import Mapping

from lowbit.graph.graph import Graph, Node, Tensor
from lowbit.graph.operator import operators
from lowbit.graph.passes.infer import facts


def with_positions(graph: Graph, mask: str) -> frozenset[str]:
    """The values [batch, length, ...] of a graph whose sizes are numbers; mask: [batch, length].

    Sizes alone do not tell: there may be as many channels, or heads, as positions. So it begins
    with the inputs that have the sizes of the mask, and goes, forwards and backwards, through nodes
    that keep the first axes. What convolutions read is left out: their second axis is channels.
    """
    tensors = facts(graph)[0]
    sizes = tensors[mask].sizes
    fitting = {name for name, one in tensors.items() if one.sizes[: len(sizes)] == sizes}
    fitting -= graph.constants.keys()
    alike = [fitting.intersection(_alike(node, tensors, len(sizes))) for node in graph.nodes]
    found, before = fitting.intersection(graph.inputs), set[str]()
    while found != before:
        before = set(found)
        for names in alike:
            found |= names if found & names else set()
    weights = ((node, operators.get(node.op).weight) for node in graph.nodes)
    convolved = {node.inputs[0] for node, one in weights if one and one.channels == 1}
    return frozenset(one for one in found - convolved if len(tensors[one].shape) > len(sizes))


def _alike(node: Node, tensors: Mapping[str, Tensor], count: int) -> tuple[str, ...]:
    """What a node reads and makes whose first `count` axes are the same, if their sizes are."""
    record, rank = operators.get(node.op), len(tensors[node.outputs[0]].shape)
    condition = record.positions_if
    if not record.positions or not (condition is None or condition(node, rank, count)):
        return ()
    if record.positions == "indices":
        return node.inputs[1], *node.outputs
    every = (name for name in (*record.data_inputs(node), *node.outputs) if name)
    apart = record.positions == "reshaped"
    return tuple(name for name in every if apart or len(tensors[name].shape) == rank)
