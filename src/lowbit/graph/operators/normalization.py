"""Operators that normalize: in float64, rounded once. Each has its first input's shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lowbit.graph.graph import Node, Tensor
from lowbit.graph.operator import Array, Operator, given, operators, real


class Normalizing(Operator):
    """A function of a node and inputs, the first in float64.

    kept: (node, axis, rank) -> whether the other inputs have to fit this axis of the first."""

    def __init__(
        self, function: Callable[..., Array], kept: Callable[[Node, int, int], bool]
    ) -> None:
        self.function = function
        self.kept = kept

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        (x,) = given(inputs)
        others = inputs[1:]
        if any(node.outputs[1:]):
            raise ValueError(f"further outputs of {node.op} than the first are not supported")
        with np.errstate(all="ignore"):
            return (self.function(node, x.astype(np.float64), *others).astype(x.dtype),)

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        (x,) = given(tensors)
        # On few numbers: that the others fit.
        few = tuple(
            size if self.kept(node, i, len(x.sizes)) else 1 for i, size in enumerate(x.sizes)
        )
        zeros = (None if one is None else np.zeros(one.sizes, real(one)) for one in tensors[1:])
        self.compute(node, np.zeros(few, real(x)), *zeros)
        return (Tensor(real(x).name, x.sizes),)


def _none(node: Node, axis: int, rank: int) -> bool:
    return False


def _channels(node: Node, axis: int, rank: int) -> bool:
    return axis == 1


def _normalized(node: Node, axis: int, rank: int) -> bool:
    return axis >= node.get("axis", -1) % rank


def softmax(x: Array, axis: int) -> Array:
    """exp(x) / sum(exp(x)) along an axis; NaN where all of it is minus infinity."""
    powers = np.exp(x - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


def _log_softmax(node: Node, x: Array) -> Array:
    axis = node.get("axis", -1)
    shifted = x - x.max(axis, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis, keepdims=True))


def normalized(x: Array, axes: tuple[int, ...], epsilon: float) -> Array:
    """(x - mean) / sqrt(variance + epsilon) over axes."""
    centred = x - x.mean(axes, keepdims=True)
    return centred / np.sqrt(np.square(centred).mean(axes, keepdims=True) + epsilon)


def channels(vector: Array, x: Array, what: str) -> Array:
    """A vector that broadcasts along axis 1 of x. ValueError: it has another length."""
    if vector.shape != x.shape[1:2]:
        raise ValueError(f"expected {what} of shape {x.shape[1:2]}, got {vector.shape}")
    return vector.reshape(-1, *(1,) * (x.ndim - 2)).astype(np.float64)


def _batch(node: Node, x: Array, *vectors: Array) -> Array:
    if node.get("training_mode", 0):
        raise ValueError("BatchNormalization in training mode is not supported")
    names = ("scale", "bias", "mean", "variance")
    scale, bias, mean, variance = (
        channels(vector, x, name) for vector, name in zip(vectors, names, strict=True)
    )
    return (x - mean) * (scale / np.sqrt(variance + float(node.get("epsilon", 1e-5)))) + bias


def _layer(node: Node, x: Array, scale: Array, bias: Array | None = None) -> Array:
    axis = node.get("axis", -1) % x.ndim
    axes = tuple(range(axis, x.ndim))
    made = normalized(x, axes, float(node.get("epsilon", 1e-5))) * scale
    made = made if bias is None else made + bias
    if made.shape != x.shape:
        raise ValueError(f"scale {scale.shape} does not fit x {x.shape}")
    return made


def _instance(node: Node, x: Array, scale: Array, bias: Array) -> Array:
    made = normalized(x, tuple(range(2, x.ndim)), float(node.get("epsilon", 1e-5)))
    return made * channels(scale, x, "scale") + channels(bias, x, "bias")


def _group(node: Node, x: Array, scale: Array, bias: Array) -> Array:
    """Scale and bias for each channel, or (before opset 21) for each group."""
    groups = node.get("num_groups")
    if x.shape[1] % groups:
        raise ValueError(f"{x.shape[1]} channels are not {groups} groups")
    parts = x.reshape(x.shape[0], groups, -1)
    made = normalized(parts, (2,), float(node.get("epsilon", 1e-5))).reshape(x.shape)
    each = x.shape[1] // groups
    scale, bias = (np.repeat(v, each) if v.shape == (groups,) else v for v in (scale, bias))
    return made * channels(scale, x, "scale") + channels(bias, x, "bias")


def _root_mean_square(node: Node, x: Array, scale: Array) -> Array:
    axes = tuple(range(node.get("axis", -1) % x.ndim, x.ndim))
    mean = np.square(x).mean(axes, keepdims=True)
    made = x / np.sqrt(mean + float(node.get("epsilon", 1e-5))) * scale
    if made.shape != x.shape:
        raise ValueError(f"scale {scale.shape} does not fit x {x.shape}")
    return made


def _lp(node: Node, x: Array) -> Array:
    axis, p = node.get("axis", -1), node.get("p", 2)
    norm = (np.abs(x) ** p).sum(axis, keepdims=True) ** (1 / p)
    return np.divide(x, norm, out=np.zeros_like(x), where=norm != 0)


_TABLE: dict[str, tuple[Callable[..., Array], Callable[[Node, int, int], bool]]] = {
    "Softmax": (lambda node, x: softmax(x, node.get("axis", -1)), _none),
    "LogSoftmax": (_log_softmax, _none),
    "BatchNormalization": (_batch, _channels),
    "LayerNormalization": (_layer, _normalized),
    "InstanceNormalization": (_instance, _channels),
    "GroupNormalization": (_group, _channels),
    "RMSNormalization": (_root_mean_square, _normalized),
    "LpNormalization": (_lp, _none),
}

for _name, (_function, _kept) in _TABLE.items():
    operators.add(_name, Normalizing(_function, _kept))
