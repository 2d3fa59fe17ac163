"""Formulas that exporters write for one function, and the function they stand for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.random import default_rng

from lowbit.graph.graph import Node
from lowbit.graph.operator import Array, operators
from lowbit.graph.passes.rewriting import Replacement, Rule, Values

_MOST = 12  # nodes of a formula
# Near 0 and far away, of both signs. What agrees at all of them is one function: no node of a
# formula compares, so none means something else at single places.
_SAMPLES = np.concatenate([
    np.linspace(-12, 12, 65) + math.pi / 1000, *np.outer((-1, 1), np.geomspace(12.5, 1e6, 16)),
])  # fmt: skip
_MEAN, _NORMS = "ReduceMean", ("LayerNormalization", "RMSNormalization")
_SPREAD = np.array([1e-3, 0.03, 1.0, 30.0])  # of samples of rows: the first tells epsilons apart
_CLOSE = 1e-4  # numbers of formulas may have been rounded to 16 bits


def activation(values: Values, node: Node) -> Replacement | None:
    """A formula of one value that is what an operator is defined as: GELU, SiLU, Mish, ..."""
    for x, result, _ in _functions(values, node):
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


def _functions(
    values: Values, node: Node, samples: Array = _SAMPLES, vectors: Mapping[str, Array] = {}
) -> Iterator[tuple[str, Array, list[float]]]:
    """Each value that a node and others before it are a function of, numbers aside; the results of
    that function for samples; and the numbers. vectors: what stands for a constant, by its name;
    with one, means over its axes count too."""
    chain, waiting, numbers = list[Node](), set[str](), list[float]()
    maker: Node | None = node
    while maker is not None and len(chain) < _MOST and _computes(values, maker, vectors):
        chain.append(maker)
        waiting -= {*maker.outputs}
        inputs = maker.inputs[:1] if maker.op == _MEAN else maker.inputs
        for name in inputs:
            number = values.number(name)
            if number is not None and maker.op != "Pow" and _is_integer(values, name):
                return
            if number is not None:
                numbers.append(number)
            elif name and name not in vectors:
                waiting.add(name)
        if len(waiting) == 1 and len(chain) > 1:
            (x,) = waiting
            result = _results(values, chain[::-1], {x: samples, **vectors})
            if result is None:
                return
            yield x, result, numbers
        last = max(waiting, key=lambda name: values.order.get(name, -1), default="")
        maker = None if values.formatted(last) else values.producers.get(last)


def _is_integer(values: Values, name: str) -> bool:
    """Whether a constant is of integers: a formula of integers rounds, and is no function."""
    array = values.array(name)
    return array is not None and array.dtype.kind in "iub"


def _computes(values: Values, node: Node, vectors: Mapping[str, Array]) -> bool:
    """Whether a node is a function of each element, or the mean over the axes of a vector."""
    if node.op != _MEAN:
        return operators.get(node.op).post_op is not None
    given = _axes(values, node) if node.get("keepdims", 1) else None
    return given is not None and any(
        sorted(given) == [*range(-one.ndim, 0)] for one in vectors.values()
    )


def _results(values: Values, chain: Sequence[Node], known: dict[str, Any]) -> Array | None:
    """Of the last of a chain of nodes, in float64; None where a node compares."""
    made = np.zeros(0)
    for node in chain:
        read = [
            values.array(name) if node.op == _MEAN and number
            else known.get(name) if name in known or not name
            else np.asarray(values.number(name), float)
            for number, name in enumerate(node.inputs)
        ]  # fmt: skip
        (made,) = operators.get(node.op).compute(node, *read)
        if made.dtype != np.float64:
            return None
        known[node.outputs[0]] = made
    return made


def normalization(values: Values, node: Node) -> Replacement | None:
    """A formula of one value and a vector that is a layer or RMS normalization, as written before
    ONNX had these. (Without the mean, that of a difference from it is both: the first counts.)"""
    scales = {name: one for name in node.inputs if (one := values.array(name)) is not None}
    if len(scales) != 1 or not _computes(values, node, {}):
        return None
    ((scale, given),) = scales.items()
    if not given.ndim:
        return None
    vector = np.linspace(1, 2, given.size).reshape(given.shape)  # tiny numbers would hide all else
    rows = default_rng(0).standard_normal((len(_SPREAD), *given.shape)).T * _SPREAD
    samples, found = (rows + 10 * _SPREAD).T, None
    for x, result, numbers in _functions(values, node, samples, {scale: vector}):
        for op in _NORMS:
            for epsilon in numbers:
                how = {"axis": -vector.ndim, "epsilon": epsilon}
                made = Node(op, (x, scale), node.outputs, how, node.name)
                (expected,) = operators.get(op).compute(made, samples, vector)
                if not np.all(np.abs(result - expected) <= _CLOSE * (1 + np.abs(expected))):
                    continue
                if op == _NORMS[0]:
                    return Replacement([made])
                found = found or made
    return None if found is None else Replacement([found])


def _axes(values: Values, node: Node) -> list[int] | None:
    """The axes of a reduction, if they are known."""
    inputs = (*node.inputs, "")
    given = values.array(inputs[1]) if inputs[1] else node.get("axes")
    return None if given is None else [int(one) for one in given]


def layer_bias(values: Values, node: Node) -> Replacement | None:
    """A vector that is added to a LayerNormalization becomes its bias."""
    if node.op != "Add":
        return None
    for made, bias in (node.inputs, node.inputs[::-1]):
        layer, vector = values.only(made, _NORMS[0]), values.array(bias)
        if layer is None or vector is None or any(layer.inputs[2:]):
            continue
        scale = values.array(layer.inputs[1])
        if scale is not None and scale.shape == vector.shape:
            new = layer.replaced(inputs=(*layer.inputs, bias), outputs=node.outputs)
            return Replacement([new])
    return None


def average(values: Values, node: Node) -> Replacement | None:
    """The mean over all of an image, of two axes or more, is GlobalAveragePool."""
    if node.op != _MEAN or not node.get("keepdims", 1):
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
    normalization,
    layer_bias,
    average,
)
