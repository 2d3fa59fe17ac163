"""What follows a product becomes part of its node."""

from __future__ import annotations

from typing import Any

import numpy as np

from lowbit.graph.graph import Graph, Node
from lowbit.graph.passes.rewriting import Replacement, Values, rewritten

_LAYERS = ("Conv", "ConvTranspose", "Linear")
_LARGEST = float(np.finfo(np.float32).max)
_NAMES = {"Relu": "relu", "Sigmoid": "sigmoid", "Silu": "silu", "HardSwish": "hardswish"}


def fused(graph: Graph) -> Graph:
    """Activations and additions behind products as their `post_ops`, with the same result.

    That is done where the value between is read by nothing else and has no format of its own."""
    return rewritten(graph, (_activation, _residual))


def _extended(layer: Node, node: Node, step: tuple[Any, ...], *operand: str) -> Replacement:
    inputs = layer.inputs
    if operand:
        inputs = (*layer.inputs, "", "")[:3] + operand
    steps = (*layer.get("post_ops", ()), step)
    return Replacement([layer.replaced(inputs=inputs, outputs=node.outputs, post_ops=steps)])


def _activation(values: Values, node: Node) -> Replacement | None:
    step = _step(values, node)
    layer = values.only(node.inputs[0], *_LAYERS) if step else None
    return None if layer is None or step is None else _extended(layer, node, step)


def _step(values: Values, node: Node) -> tuple[Any, ...] | None:
    """An activation as a post-operation."""
    if node.op in _NAMES:
        return (_NAMES[node.op],)
    if node.op == "Gelu":
        return ("gelu_tanh" if node.get("approximate", "none") == "tanh" else "gelu",)
    if node.op != "Clip":
        return None
    bounds = (*node.inputs[1:], "", "")[:2]
    low, high = (values.number(name) if name else None for name in bounds)
    if (bounds[0] and low is None) or (bounds[1] and high is None):
        return None
    if low == 0 and high is None:
        return ("relu",)
    return "clamp", -_LARGEST if low is None else low, _LARGEST if high is None else high


def _residual(values: Values, node: Node) -> Replacement | None:
    """The sum of a product and of another value of the same shape that is no constant."""
    if node.op != "Add":
        return None
    for made, other in (node.inputs, node.inputs[::-1]):
        layer = values.only(made, *_LAYERS)
        if layer is None or (*layer.inputs, "")[3:4] not in ((), ("",)):
            continue
        if values.constant(other) is None and values.same_shape(made, other):
            return _extended(layer, node, ("residual",), other)
    return None
