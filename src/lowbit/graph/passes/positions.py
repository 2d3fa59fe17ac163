"""Which values hold something for each position of a sentence."""

from __future__ import annotations

from collections.abc import Mapping

from lowbit.graph.graph import Graph, Node, Tensor
from lowbit.graph.operator import operators
from lowbit.graph.operators.elementwise import Elementwise
from lowbit.graph.operators.normalization import Normalizing
from lowbit.graph.passes.demand import data_inputs
from lowbit.graph.passes.infer import facts

_IN_ORDER = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
_KEEPING = frozenset({"Attention", "Concat", "Linear", "MatMul", "Split", "Transpose"}) | _IN_ORDER


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
    convolved = {node.inputs[0] for node in graph.nodes if node.op in ("Conv", "ConvTranspose")}
    return frozenset(one for one in found - convolved if len(tensors[one].shape) > len(sizes))


def _alike(node: Node, tensors: Mapping[str, Tensor], count: int) -> tuple[str, ...]:
    """What a node reads and makes whose first `count` axes are the same, if their sizes are."""
    kind, rank = operators.get(node.op), len(tensors[node.outputs[0]].shape)
    if node.op == "Gather" and not node.get("axis", 0):
        return node.inputs[1], *node.outputs
    if node.op == "Transpose" and node.get("perm", ())[:count] != tuple(range(count)):
        return ()
    if node.op in ("Linear", "MatMul") and rank <= count:  # they mix the last axis
        return ()
    if node.op not in _KEEPING and not isinstance(kind, Elementwise | Normalizing):
        return ()
    read = node.inputs if isinstance(kind, Elementwise) else data_inputs(node)
    every = (name for name in (*read, *node.outputs) if name)
    return tuple(n for n in every if node.op in _IN_ORDER or len(tensors[n].shape) == rank)
