"""What stands before or after a product becomes part of its node."""

from __future__ import annotations

from typing import Any

from lowbit.graph.graph import Graph, Node
from lowbit.graph.operator import operators
from lowbit.graph.operators.images import pad_ends
from lowbit.graph.passes.rewriting import Replacement, Values, rewritten


def fused(graph: Graph) -> Graph:
    """Zeros around images as `pads` of convolutions, activations and additions behind products as
    their `post_ops`, with the same result.

    That is done where the value between is read by nothing else and has no format of its own."""
    return rewritten(graph, (_padding, _activation, _residual))


def _padding(values: Values, node: Node) -> Replacement | None:
    """A convolution of an image with zeros around it."""
    name = node.inputs[0] if node.inputs else ""
    pad = values.producers.get(name) if node.op == "Conv" else None
    if pad is None or pad.op != "Pad" or pad.get("mode", "constant") != "constant":
        return None
    if values.uses[name] > 1 or values.leaves(name) or node.get("auto_pad", "NOTSET") != "NOTSET":
        return None
    image, sizes, value, axes = (*pad.inputs, "", "")[:4]
    weight, added = values.constant(node.inputs[1]), values.array(sizes)
    along = values.array(axes) if axes else None
    if weight is None or added is None or (axes and along is None):
        return None
    if (value and values.number(value) != 0) or not values.same_format(image, name):
        return None
    rank = len(weight.shape)
    ends = pad_ends(pad, rank, added, along)
    if any(ends[0] + ends[1]) or min(map(min, ends)) < 0:
        return None
    before, after = zip(*ends[2:], strict=True)
    old = node.get("pads") or (0,) * (2 * (rank - 2))
    pads = tuple(int(a + b) for a, b in zip(old, before + after, strict=True))
    return Replacement([node.replaced(inputs=(image, *node.inputs[1:]), pads=pads)])


def _extended(layer: Node, node: Node, step: tuple[Any, ...], *operand: str) -> Replacement:
    inputs = layer.inputs
    if operand:
        inputs = (*layer.inputs, "", "")[:3] + operand
    steps = (*layer.get("post_ops", ()), step)
    return Replacement([layer.replaced(inputs=inputs, outputs=node.outputs, post_ops=steps)])


def _activation(values: Values, node: Node) -> Replacement | None:
    step = _step(values, node)
    layer = values.layer(node.inputs[0]) if step else None
    return None if layer is None or step is None else _extended(layer, node, step)


def _step(values: Values, node: Node) -> tuple[Any, ...] | None:
    """An activation as a post-operation."""
    found = operators.get(node.op).post_op
    return None if found is None else found(node, values.number)


def _residual(values: Values, node: Node) -> Replacement | None:
    """The sum of a product and of another value of the same shape that is no constant."""
    if node.op != "Add":
        return None
    for made, other in (node.inputs, node.inputs[::-1]):
        layer = values.layer(made)
        if layer is None or (*layer.inputs, "")[3:4] not in ((), ("",)):
            continue
        if values.constant(other) is None and values.same_shape(made, other):
            return _extended(layer, node, ("residual",), other)
    return None
