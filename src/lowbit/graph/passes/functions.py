"""Formulas that exporters write for one function, and the function they stand for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from lowbit.graph.graph import Node
from lowbit.graph.operator import Array, operators
from lowbit.graph.passes.rewriting import Replacement, Rule, Values

_MOST = 12  # nodes of a formula
# Near 0 and far away, of both signs. What agrees at all of them is one function: no node of a
# formula compares, so none means something else at single places.
_SAMPLES = np.concatenate([
    np.linspace(-12, 12, 65) + math.pi / 1000, *np.outer((-1, 1), np.geomspace(12.5, 1e6, 16)),
])  # fmt: skip
_CLOSE = 1e-4  # numbers of formulas may have been rounded to 16 bits


def _plus(values: Values, name: str) -> tuple[float, str] | None:
    """A value as the sum of a number and another."""
    node = values.maker(name, "Add")
    if node is None:
        return None
    for number, other in (node.inputs, node.inputs[::-1]):
        found = values.number(number)
        if found is not None:
            return found, other
    return None


def activation(values: Values, node: Node) -> Replacement | None:
    """A formula of one value that is what an operator is defined as: GELU, SiLU, Mish, ..."""
    for x, result in _functions(values, node):
        known, expected = _definitions()
        near = np.abs(result - expected) <= _CLOSE * (1 + np.abs(expected))
        for same in np.flatnonzero(np.all(near, axis=1)):
            op, attributes = known[same]
            return Replacement([Node(op, (x,), node.outputs, attributes, node.name)])
    return None


@cache
def _definitions() -> tuple[list[tuple[str, Mapping[str, Any]]], Array]:
    """What exporters write as formulas: operators and attributes, and results for _SAMPLES."""
    known = [(op, one) for op, record in operators.load().items() for one in record.formulas]
    nodes = [Node(op, ("x",), ("y",), one) for op, one in known]
    return known, np.stack([operators.get(one.op).compute(one, _SAMPLES)[0] for one in nodes])


def _functions(values: Values, node: Node) -> Iterator[tuple[str, Array]]:
    """Each value that a node and others before it are a function of, numbers aside; and the results
    of that function for _SAMPLES."""
    chain, waiting = list[Node](), set[str]()
    maker: Node | None = node
    while maker is not None and len(chain) < _MOST and operators.get(maker.op).post_op is not None:
        chain.append(maker)
        waiting -= {*maker.outputs}
        waiting |= {name for name in maker.inputs if name and values.number(name) is None}
        if len(waiting) == 1 and len(chain) > 1:
            (x,) = waiting
            result = _results(values, chain[::-1], x)
            if result is None:
                return
            yield x, result
        last = max(waiting, key=lambda name: values.order.get(name, -1), default="")
        maker = None if values.formatted(last) else values.producers.get(last)


def _results(values: Values, chain: Sequence[Node], x: str) -> Array | None:
    """Of the last of a chain of nodes, for _SAMPLES as x; None where a node compares."""
    known: dict[str, Any] = {"": None, x: _SAMPLES}
    made = _SAMPLES
    for node in chain:
        read = [known.get(name, np.asarray(values.number(name), float)) for name in node.inputs]
        (made,) = operators.get(node.op).compute(node, *read)
        if made.dtype != np.float64:
            return None
        known[node.outputs[0]] = made
    return made


def layer_normalization(values: Values, node: Node) -> Replacement | None:
    """(x - mean) / sqrt(variance + epsilon) · scale, as written before opset 17."""
    if node.op != "Mul":
        return None
    for quotient, scale in (node.inputs, node.inputs[::-1]):
        vector, divide = values.array(scale), values.maker(quotient, "Div")
        if vector is None or divide is None:
            continue
        centred = values.maker(divide.inputs[0], "Sub")
        root = values.maker(divide.inputs[1], "Sqrt")
        if centred is None or root is None:
            continue
        variance = _plus(values, root.inputs[0])
        mean = _mean(values, centred.inputs[1])
        square = None if variance is None else _mean(values, variance[1])
        if variance is None or mean is None or square is None:
            continue
        x, axes = centred.inputs[0], tuple(range(-vector.ndim, 0))
        base = _squared(values, square[0])
        again = None if base is None else values.maker(base, "Sub")  # the mean as before
        if mean == (x, axes) and square[1] == axes and again and again.inputs[0] == x:
            attributes = {"axis": axes[0], "epsilon": variance[0]}
            made = Node("LayerNormalization", (x, scale), node.outputs, attributes, node.name)
            return Replacement([made])
    return None


def rms_normalization(values: Values, node: Node) -> Replacement | None:
    """x / sqrt(mean(x²) + epsilon) · scale, as written before opset 23."""
    if node.op != "Mul":
        return None
    for quotient, scale in (node.inputs, node.inputs[::-1]):
        vector = values.array(scale)
        if vector is None:
            continue
        for x, root in _over_roots(values, quotient):
            square = _plus(values, root.inputs[0])
            mean = None if square is None else _mean(values, square[1])
            if square is None or mean is None or _squared(values, mean[0]) != x:
                continue
            axes = tuple(range(-vector.ndim, 0))
            if mean[1] == axes:
                attributes = {"axis": axes[0], "epsilon": square[0]}
                made = Node("RMSNormalization", (x, scale), node.outputs, attributes, node.name)
                return Replacement([made])
    return None


def _over_roots(values: Values, name: str) -> Iterator[tuple[str, Node]]:
    """Whatever a value is x over, if that is a square root, and x."""
    node = values.maker(name, "Div", "Mul")
    if node is None:
        return
    for x, other in (node.inputs, node.inputs[::-1]):
        if node.op == "Div":
            root = values.maker(other, "Sqrt") if x == node.inputs[0] else None
        else:
            inverse = values.maker(other, "Reciprocal", "Div")
            one = inverse and (inverse.op == "Reciprocal" or values.number(inverse.inputs[0]) == 1)
            root = values.maker(inverse.inputs[-1], "Sqrt") if inverse and one else None
        if root is not None:
            yield x, root


def _mean(values: Values, name: str) -> tuple[str, tuple[int, ...]] | None:
    """What a value is the mean of, along which axes, which it keeps."""
    node = values.maker(name, "ReduceMean")
    if node is None or not node.get("keepdims", 1):
        return None
    given = _axes(values, node)
    return None if given is None else (node.inputs[0], tuple(sorted(given)))


def _axes(values: Values, node: Node) -> list[int] | None:
    """The axes of a reduction, if they are known."""
    inputs = (*node.inputs, "")
    given = values.array(inputs[1]) if inputs[1] else node.get("axes")
    return None if given is None else [int(one) for one in given]


def _squared(values: Values, name: str) -> str | None:
    """What a value is the square of."""
    node = values.maker(name, "Pow", "Mul")
    if node is None:
        return None
    base, other = node.inputs
    twice = base == other if node.op == "Mul" else values.number(other) == 2
    return base if twice else None


def layer_bias(values: Values, node: Node) -> Replacement | None:
    """A vector that is added to a LayerNormalization becomes its bias."""
    if node.op != "Add":
        return None
    for made, bias in (node.inputs, node.inputs[::-1]):
        layer, vector = values.only(made, "LayerNormalization"), values.array(bias)
        if layer is None or vector is None or any(layer.inputs[2:]):
            continue
        scale = values.array(layer.inputs[1])
        if scale is not None and scale.shape == vector.shape:
            new = layer.replaced(inputs=(*layer.inputs, bias), outputs=node.outputs)
            return Replacement([new])
    return None


def average(values: Values, node: Node) -> Replacement | None:
    """The mean over all of an image, of two axes or more, is GlobalAveragePool."""
    if node.op != "ReduceMean" or not node.get("keepdims", 1):
        return None
    given = _axes(values, node)
    rank = values.rank(node.inputs[0]) if given else None
    if given is None or rank is None or rank < 4:
        return None
    if sorted(axis % rank for axis in given) != list(range(2, rank)):
        return None
    return Replacement([Node("GlobalAveragePool", node.inputs[:1], node.outputs, {}, node.name)])


FUNCTION_RULES: tuple[Rule, ...] = (
    activation,
    layer_normalization,
    layer_bias,
    rms_normalization,
    average,
)
