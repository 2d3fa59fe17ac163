"""Constants of products as integers with scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.graph.graph import Node
from lowbit.graph.operator import operators
from lowbit.numerics import QTensor, Range
from lowbit.numerics.methods import Activations, bias_correction, methods

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
