"""Static quantization: from observed ranges to a graph of 8-bit integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from lowbit.graph.graph import Constant, Graph, Node, Tensor, numbers
from lowbit.graph.operator import Array, operators
from lowbit.graph.passes.fold_qdq import UNKNOWN
from lowbit.graph.passes.quantization_regions import (
    demanded,
    only_for_attention,
    sharing,
    with_copies,
)
from lowbit.graph.passes.weights import Seen, WeightSetting, correction
from lowbit.numerics import QTensor, affine_parameters, int_format
from lowbit.numerics.methods import Activations
from lowbit.numerics.observers import Observer

Choice = Literal["int8", "dynamic", "int4", "float"]
"""What becomes of a product:

- "int8": 8-bit weight and activations, whose formats are known beforehand.
- "dynamic": 8-bit weight; rows of activations are quantized when they come. Linear.
- "int4": 4-bit weight in groups, float activations. Linear.
- "float": it stays.
"""


@dataclass(frozen=True)
class Decision:
    """What becomes of a product, and why.

    node: the name of its layer. output: that of its value, which no other has.
    """

    node: str
    op: str
    output: str
    choice: Choice
    why: str

    def __str__(self) -> str:
        return f"{self.choice:8} {self.op} {self.node or self.output}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How values are quantized: activations to `dtype`, per tensor, with a zero point unless
    `symmetric`; and weights."""

    dtype: Literal["uint8", "int8"] = "uint8"
    symmetric: bool = False
    weights: WeightSetting = field(default_factory=WeightSetting)


def decide(
    graph: Graph, wishes: Mapping[str, Choice] | None = None, default: Choice = "int8"
) -> tuple[Decision, ...]:
    """What is to become of each product: as `wishes` says by its output, else `default`.

    A product that cannot be quantized so stays in float.
    """
    made = []
    for node in graph.nodes:
        record = operators.get(node.op)
        if record.weight or record.stays:
            output = node.outputs[0]
            wish = (wishes or {}).get(output)
            refusal = _refusal(graph, node, wish or default)
            why = refusal or ("asked for" if wish else "by default")
            made.append(
                Decision(node.name, node.op, output, "float" if refusal else wish or default, why)
            )
    return tuple(made)


def _refusal(graph: Graph, node: Node, wish: Choice) -> str:
    """Why a product cannot be what is wished; "" if it can."""
    record = operators.get(node.op)
    if record.weight is None:
        return record.stays
    weight = graph.constants.get(node.inputs[1])
    if weight is None:
        return "its weight is not a constant"
    if not isinstance(weight, np.ndarray):
        kind = weight.format.name if isinstance(weight, QTensor) else weight.dtype
        return f"its weight is {kind} already"
    if not np.isfinite(weight).all():
        return "its weight holds NaN or infinity"
    if not weight.size:
        return "its weight is empty"
    if wish not in (*record.weight.choices, "float"):
        return f"a {node.op} cannot be {wish!r}"
    if record.weight.outputs and node.get("group", 1) != 1:
        return "a transposed convolution in groups has no scale for each output channel"
    return ""


def observed(graph: Graph, decisions: Sequence[Decision]) -> frozenset[str]:
    """The values whose ranges `quantized` needs."""
    return demanded(graph, {one.output for one in decisions if one.choice == "int8"})


def quantized(
    graph: Graph,
    decisions: Sequence[Decision],
    ranges: Mapping[str, Observer],
    setting: Setting | None = None,
    seen: Seen | None = None,
    means: Mapping[str, Array] | None = None,
) -> Graph:
    """The graph, float and fused, with the formats and the weights that the decisions ask for.

    ranges: by name, observers that have seen the values that are `observed`. seen: the inputs of
    products, for methods that need to know them; means: of each channel of these, where biases
    are to make up for what weights lose; both by the products' outputs. Inputs, outputs and biases
    stay in floats; what products make for attention is bfloat16. ValueError: a value was not
    observed.
    """
    setting = setting or Setting()
    choices: dict[str, Choice] = {
        one.output: one.choice for one in decisions if one.choice != "float"
    }
    static = {name for name, choice in choices.items() if choice == "int8"}
    formats = _formats(graph, demanded(graph, static), ranges, setting)
    constants: dict[str, Constant] = dict(graph.constants)
    nodes: list[Node] = []
    for node in graph.nodes:
        choice = choices.get(node.outputs[0])
        if choice is not None:
            known = (seen or {}).get(node.outputs[0])
            mean = (means or {}).get(node.outputs[0])
            node = _with_integers(node, choice, constants, setting, known, mean)
        nodes.append(node.replaced(activations="dynamic") if choice == "dynamic" else node)
    changed = graph.replaced(nodes=tuple(nodes), constants=constants)
    changed, copies = with_copies(changed, static)
    narrow = only_for_attention(changed, choices.keys())
    tensors = dict(changed.tensors) | dict.fromkeys(narrow, Tensor("bfloat16", UNKNOWN))
    for name, (scale, zero) in formats.items():
        tensors[copies.get(name, name)] = Tensor(setting.dtype, UNKNOWN, scale, zero)
    return changed.replaced(tensors=tensors)


def _with_integers(
    node: Node,
    choice: Choice,
    constants: dict[str, Constant],
    setting: Setting,
    seen: Activations | None,
    mean: Array | None,
) -> Node:
    """A product whose weight is of integers, which are put among the constants, with its bias."""
    x, weight, *rest = node.inputs
    given, name = constants[weight], f"{weight}.{'int4' if choice == 'int4' else 'int8'}"
    assert isinstance(given, np.ndarray)
    made = constants.get(name)
    if not isinstance(made, QTensor):
        constants[name] = made = setting.weights.quantized(node, given, choice, seen)
    if mean is not None:
        old = numbers(constants[rest[0]]) if rest and rest[0] else np.zeros((), np.float32)
        bias = f"{node.outputs[0]}.bias"
        constants[bias] = (old + correction(node, given, made, mean)).astype(np.float32)
        rest = [bias, *rest[1:]]
    return node.replaced(inputs=(x, name, *rest))


def _formats(
    graph: Graph, wanted: frozenset[str], ranges: Mapping[str, Observer], setting: Setting
) -> dict[str, tuple[float, int]]:
    """Scale and zero point of each value: those that share a format have a range that holds all."""
    format = int_format(setting.dtype)
    limits: dict[str, tuple[float, float]] = {}
    leaders = sharing(graph, wanted)
    for name, leader in leaders.items():
        if name not in ranges:
            raise ValueError(f"the value {name!r} was not observed: calibrate this very graph")
        low, high = (float(end) for end in ranges[name].range(format, setting.symmetric))
        known = limits.get(leader, (low, high))
        limits[leader] = min(low, known[0]), max(high, known[1])
    found: dict[str, tuple[float, int]] = {}
    for leader, (low, high) in limits.items():
        scale, zero = affine_parameters(low, high, format, setting.symmetric)
        found[leader] = float(scale), int(zero)
    return {name: found[leader] for name, leader in leaders.items()}
