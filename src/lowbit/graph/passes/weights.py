"""Constants of products as integers with scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.graph.graph import Constant, Graph, Node
from lowbit.graph.operator import operators
from lowbit.graph.passes.rewriting import Values
from lowbit.numerics import QTensor, Range
from lowbit.numerics.methods import (
    Activations,
    bias_correction,
    equalization,
    methods,
    smoothquant_factors,
)

Array = npt.NDArray[Any]

METHODS = ("nearest", "gptq")
"""Those of `numerics.methods` whose result is integers and scales, and nothing else."""


@dataclass(frozen=True, kw_only=True)
class WeightSetting:
    """How weights are quantized.

    - method: "nearest" or "gptq" (`lowbit.numerics.methods`). range: see `lowbit.quantize`.
    - group_size: of 4-bit weights, how many inputs share a scale.
    """

    method: str = "nearest"
    range: Range = "minmax"
    group_size: int = 128

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            known = " or ".join(map(repr, METHODS))
            raise ValueError(f"unknown method {self.method!r} for weights; pass {known}")

    @property
    def needs_activations(self) -> bool:
        return methods.get(self.method).needs_activations

    def quantized(
        self, node: Node, weight: Array, choice: str, seen: Activations | None = None
    ) -> QTensor:
        """The weight of a product as integers: a scale for each output channel, or each group.

        seen: its inputs, as `rows` gives them; without, each number is rounded to the nearest."""
        rows = _as_matrix(node, weight)
        how: dict[str, Any] = {"dtype": "int8", "range": self.range}
        if choice == "int4":
            how |= {"dtype": "uint4", "symmetric": False}
            how |= {"group_size": min(self.group_size, rows.shape[1])}
        method = self.method if seen is not None else "nearest"
        made = methods.get(method)(**how).quantize(rows, seen).weight
        if weight.ndim == 2:
            return made
        axis = _outputs(node)
        moved = made.values.reshape(np.moveaxis(weight, axis, 0).shape)
        values = np.ascontiguousarray(np.moveaxis(moved, 0, axis))
        return QTensor(values, made.scale, made.zero_point, made.format, axis)


def _outputs(node: Node) -> int:
    """The axis of a weight that is the output's channels."""
    weight = operators.get(node.op).weight
    return 0 if weight is None else weight.outputs


def _as_matrix(node: Node, weight: Array) -> Array:
    """[N, K] of a weight, N output channels."""
    moved = np.moveaxis(weight, _outputs(node), 0)
    return moved.reshape(len(moved), -1)


def rows(node: Node, x: Array, weight_shape: tuple[int, ...]) -> Array | None:
    """The rows [..., K] that a product multiplies by its weight [N, K]; None where there is no one
    matrix of them, in groups and in transposed convolutions."""
    weight = operators.get(node.op).weight
    return None if weight is None else weight.rows(node, x, weight_shape)


def correction(node: Node, weight: Array, quantized: QTensor, mean: Array) -> Array:
    """What to add to the bias [N] so that the mean of each output channel stays as it was, for
    inputs of these means [C]. (Near the border of an image, where there is padding, it does not.)
    """
    groups = node.get("group", 1)
    axis = _outputs(node)
    totals = []
    for one in (weight, quantized.dequantize()):
        moved = np.moveaxis(one, axis, 0)
        sums = moved.reshape(*moved.shape[:2], -1).sum(-1, dtype=np.float64)
        totals.append(sums.reshape(groups, len(moved) // groups, -1))
    parts = zip(*totals, mean.reshape(groups, -1), strict=True)
    return np.concatenate([bias_correction(*part) for part in parts])


Seen = Mapping[str, Activations]
"""What is known of the inputs of products, by the products' outputs."""


# Graphs that mean the same and are quantized with less error: factors move between constants.

Constants = dict[str, Constant]

_TURNS = 10
_NEAR = 0.01  # Turns end when no factor is further from 1.


def equalized(graph: Graph) -> Graph:
    """Neighbouring layers with equal ranges of each channel's weights, in both of them.

    Nagel et al. 2019 (arXiv:1906.04721), section 4.1: of a Conv or Linear whose output only one
    other layer of its kind reads, and with nothing between but a ReLU, each channel's weights are
    divided by a factor and those that meet it in the other layer multiplied. Pairs take turns until
    the factors are near 1. Weights that are read twice stay as they are.
    """
    constants, pairs = dict(graph.constants), _pairs(graph)
    for _ in range(_TURNS):
        furthest = 0.0
        for first, second in pairs:
            w1, w2 = constants[first.inputs[1]], constants[second.inputs[1]]
            assert isinstance(w1, np.ndarray)
            assert isinstance(w2, np.ndarray)
            factors = equalization(w1.reshape(len(w1), -1), _columns(second, w2)[None])
            furthest = max(furthest, float(np.abs(factors - 1).max(initial=0)))
            _divide_outputs(constants, first, factors)
            constants[second.inputs[1]] = _times_inputs(second, w2, factors)
        if furthest < _NEAR:
            break
    return graph.replaced(constants=constants)


def _pairs(graph: Graph) -> list[tuple[Node, Node]]:
    """Layers and those of their kind, whose channels are on the same axis, that alone read what
    they make."""
    values = Values(graph)
    pairs = []
    for node in graph.nodes:
        if not _is_layer(values, node) or node.inputs[0] in graph.constants:
            continue
        first = values.only(node.inputs[0], node.op)
        if first is None or not _is_layer(values, first):
            continue
        if all(step == ("relu",) for step in first.get("post_ops", ())):
            pairs.append((first, node))
    return pairs


def _is_layer(values: Values, node: Node) -> bool:
    """Whether a node's weight, and bias, are float constants that nothing else reads."""
    weight = operators.get(node.op).weight
    if weight is None or weight.outputs:
        return False
    own = [name for name in node.inputs[1:3] if name]
    return all(values.array(name) is not None and values.uses[name] == 1 for name in own)


def _divide_outputs(constants: Constants, node: Node, factors: Array) -> None:
    for name in filter(None, node.inputs[1:3]):
        given = constants[name]
        assert isinstance(given, np.ndarray)
        constants[name] = given / factors.reshape(-1, *(1,) * (given.ndim - 1))


def _by_input(node: Node, weight: Array) -> Array:
    """A view [groups, outputs of a group, inputs of a group, elements of a kernel] of a weight."""
    groups = node.get("group", 1)
    return weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)


def _columns(node: Node, weight: Array) -> Array:
    """[C], the greatest magnitude of the weights that each input channel meets."""
    return np.abs(_by_input(node, weight)).max(axis=(1, 3), initial=0).reshape(-1)


def _times_inputs(node: Node, weight: Array, factors: Array) -> Array:
    view = _by_input(node, weight)
    return (view * factors.reshape(len(view), 1, -1, 1)).reshape(weight.shape)


@dataclass(frozen=True)
class Smoothing:
    """A norm whose output only linear layers read."""

    norm: Node
    readers: tuple[Node, ...]

    @property
    def value(self) -> str:
        return self.norm.outputs[0]


def smoothings(graph: Graph) -> tuple[Smoothing, ...]:
    """Where `smoothed` can move factors: layer norms all of whose readers are Linear nodes. None of
    their constants is read elsewhere."""
    values, found = Values(graph), []
    for node in graph.nodes:
        output = node.outputs[0]
        if node.op != "LayerNormalization" or values.leaves(output):
            continue
        readers = tuple(one for one in graph.nodes if output in one.inputs)
        fits = readers and all(
            _sums_last(one) and output not in one.inputs[1:] and _is_layer(values, one)
            for one in readers
        )
        own = [values.array(name) for name in node.inputs[1:3] if name]
        unshared = all(values.uses[name] == 1 for name in node.inputs[1:3] if name)
        if fits and unshared and all(one is not None and one.ndim == 1 for one in own):
            found.append(Smoothing(node, readers))
    return tuple(found)


def _sums_last(node: Node) -> bool:
    """Whether a product sums over the last axis, which norms of rows have scales for."""
    weight = operators.get(node.op).weight
    return weight is not None and weight.channels == -1


def smoothed(
    graph: Graph, largest: Mapping[str, Array], alpha: float
) -> tuple[Graph, dict[str, Array]]:
    """The graph with outliers moved from the outputs of norms into weights, and the factors.

    Xiao et al. 2022, SmoothQuant (arXiv:2211.10438), equation 4. largest: of the value of each of
    the `smoothings`, the greatest magnitude [K] of each channel. The factors, by value, are what it
    was divided by.
    """
    constants, moved = dict(graph.constants), dict[str, Array]()
    for place in smoothings(graph):
        weights = [constants[node.inputs[1]] for node in place.readers]
        arrays = [one for one in weights if isinstance(one, np.ndarray)]
        factors = smoothquant_factors(largest[place.value], np.concatenate(arrays), alpha)
        moved[place.value] = factors
        _divide_outputs(constants, place.norm, factors)
        for node, weight in zip(place.readers, arrays, strict=True):
            constants[node.inputs[1]] = weight * factors
    return graph.replaced(constants=constants), moved
