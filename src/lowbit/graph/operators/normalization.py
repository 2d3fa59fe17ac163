"""Operators that normalize: in float64, rounded once. Each has its first input's shape.

Rows are normalized by a kernel, channels by it and a scale and a shift.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lowbit.graph.graph import Node, Tensor, numbers
from lowbit.graph.lower import Lowering, order_of
from lowbit.graph.lowering.elementwise import affine, compute, format_of, in_format, plain
from lowbit.graph.operator import Array, Operator, operators, real
from lowbit.graph.parts import Parts
from lowbit.graph.step import Place, View, Word
from lowbit.kernels.cpu.tensors.rows import (
    NormalizeForm,
    RowsPlan,
    SoftmaxForm,
    normalize,
    normalize_parameters,
    plan_normalize,
    plan_softmax,
    softmax,
    softmax_parameters,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Normalizing(Operator):
    """meaning: of a node and inputs, the first in float64.

    kept: (node, axis, rank) -> whether the other inputs have to fit this axis of the first."""

    kept: Callable[[Node, int, int], bool] = lambda node, axis, rank: False

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        self.check_given(inputs)
        x, *others = inputs
        assert x is not None
        if any(node.outputs[1:]):
            raise ValueError(f"further outputs of {node.op} than the first are not supported")
        with np.errstate(all="ignore"):
            return (self.meaning(node, x.astype(np.float64), *others).astype(x.dtype),)

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        self.check_given(tensors)
        x = tensors[0]
        assert x is not None
        # On few numbers: that the others fit.
        few = tuple(
            size if self.kept(node, i, len(x.sizes)) else 1 for i, size in enumerate(x.sizes)
        )
        zeros = (None if one is None else np.zeros(one.sizes, real(one)) for one in tensors[1:])
        self.compute(node, np.zeros(few, real(x)), *zeros)
        return (Tensor(real(x).name, x.sizes),)


def _channels(node: Node, axis: int, rank: int) -> bool:
    return axis == 1


def _last(node: Node, axis: int, rank: int) -> bool:
    return axis >= node.get("axis", -1) % rank


def _softmax(node: Node, x: Array) -> Array:
    """exp(x) / sum(exp(x)) along an axis; NaN where all of it is minus infinity."""
    axis = node.get("axis", -1)
    powers = np.exp(x - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


def _log_softmax(node: Node, x: Array) -> Array:
    axis = node.get("axis", -1)
    shifted = x - x.max(axis, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis, keepdims=True))


def _normalized(x: Array, axes: tuple[int, ...], epsilon: float) -> Array:
    """(x - mean) / sqrt(variance + epsilon) over axes."""
    centred = x - x.mean(axes, keepdims=True)
    return centred / np.sqrt(np.square(centred).mean(axes, keepdims=True) + epsilon)


def _by_axis_1(vector: Array, x: Array, what: str) -> Array:
    """A vector that broadcasts along axis 1 of x. ValueError: it has another length."""
    if vector.shape != x.shape[1:2]:
        raise ValueError(f"expected {what} of shape {x.shape[1:2]}, got {vector.shape}")
    return vector.reshape(-1, *(1,) * (x.ndim - 2)).astype(np.float64)


def _batch(node: Node, x: Array, *vectors: Array) -> Array:
    if node.get("training_mode", 0):
        raise ValueError("BatchNormalization in training mode is not supported")
    names = ("scale", "bias", "mean", "variance")
    scale, bias, mean, variance = (
        _by_axis_1(vector, x, name) for vector, name in zip(vectors, names, strict=True)
    )
    return (x - mean) * (scale / np.sqrt(variance + float(node.get("epsilon", 1e-5)))) + bias


def _layer(node: Node, x: Array, scale: Array, bias: Array | None = None) -> Array:
    axis = node.get("axis", -1) % x.ndim
    axes = tuple(range(axis, x.ndim))
    made = _normalized(x, axes, float(node.get("epsilon", 1e-5))) * scale
    made = made if bias is None else made + bias
    if made.shape != x.shape:
        raise ValueError(f"scale {scale.shape} does not fit x {x.shape}")
    return made


def _instance(node: Node, x: Array, scale: Array, bias: Array) -> Array:
    made = _normalized(x, tuple(range(2, x.ndim)), float(node.get("epsilon", 1e-5)))
    return made * _by_axis_1(scale, x, "scale") + _by_axis_1(bias, x, "bias")


def _group(node: Node, x: Array, scale: Array, bias: Array) -> Array:
    """Scale and bias for each channel, or (before opset 21) for each group."""
    groups = node.get("num_groups")
    if x.shape[1] % groups:
        raise ValueError(f"{x.shape[1]} channels are not {groups} groups")
    parts = x.reshape(x.shape[0], groups, -1)
    made = _normalized(parts, (2,), float(node.get("epsilon", 1e-5))).reshape(x.shape)
    each = x.shape[1] // groups
    scale, bias = (np.repeat(v, each) if v.shape == (groups,) else v for v in (scale, bias))
    return made * _by_axis_1(scale, x, "scale") + _by_axis_1(bias, x, "bias")


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


def _rows_in(lowering: Lowering, view: View) -> View:
    """A tensor that a kernel reads as rows: of float32, bfloat16 or 8 bits with a scale."""
    if view.tensor.scale is not None or view.tensor.dtype in ("float32", "bfloat16"):
        return view
    return in_format(lowering, view, Tensor("float32", view.shape))


def _planned(lowering: Lowering, plan: RowsPlan) -> Mapping[str, Word]:
    """The words of a plan, and its scratch memory."""
    return {**plan.words, "scratch": lowering.scratch(plan.scratch_bytes * lowering.threads)}


def _lower_softmax(logarithm: bool, lowering: Lowering, node: Node) -> None:
    """The axis is brought to stand last in memory, and the output lies as the input then does."""
    view = _rows_in(lowering, lowering.view(node.inputs[0]))
    rank = len(view.shape)
    axis = node.get("axis", -1) % max(rank, 1)
    order = (*(one for one in order_of(view) if one != axis), axis)
    x = plain(lowering, view, order)
    out = lowering.output(node.outputs[0], order)
    form = SoftmaxForm(format_of(x.tensor), format_of(out.tensor),
                       logarithm=logarithm)  # fmt: skip
    width = x.shape[axis] if rank else 1
    plan = plan_softmax(form, math.prod(x.shape) // max(width, 1), width)
    lowering.add(softmax.program(lowering.isa, form=form), {
        "out": out.place, "x": x.place, "mask": None,
        "parameters": lowering.known(
            softmax_parameters(1.0, affine(x.tensor), affine(out.tensor))
        ),
        **_planned(lowering, plan),
    })  # fmt: skip


def _rows_normalized(
    lowering: Lowering, x: View, out: View, sizes: tuple[int, int], epsilon: float, centred: bool,
    vectors: Sequence[Place | None] = (None, None),
) -> None:  # fmt: skip
    """Add the step that normalizes dense rows of x, [rows, width]."""
    weight, bias = vectors
    form = NormalizeForm(format_of(x.tensor), format_of(out.tensor), centred=centred,
                         weight=weight is not None, bias=bias is not None)  # fmt: skip
    parameters = normalize_parameters(epsilon, affine(x.tensor), out=affine(out.tensor))
    lowering.add(normalize.program(lowering.isa, form=form), {
        "out": out.place, "x": x.place, "weight": weight, "bias": bias,
        "parameters": lowering.known(parameters),
        **_planned(lowering, plan_normalize(form, *sizes)),
    })  # fmt: skip


def _vector(lowering: Lowering, name: str, shape: tuple[int, ...]) -> Place | None:
    """A scale or bias as float32 of all that is normalized."""
    if not name:
        return None
    known = lowering.graph.constants.get(name)
    if isinstance(known, np.ndarray):
        whole = np.broadcast_to(known, shape).astype(np.float32)
        return lowering.known(np.ascontiguousarray(whole))
    target = lowering.fresh(Tensor("float32", shape))
    compute(lowering, target, [lowering.view(name)], (0,))
    return target.place


def _lower_rows(centred: bool, lowering: Lowering, node: Node) -> None:
    """The axes from `axis` on are brought to stand last."""
    view = _rows_in(lowering, lowering.view(node.inputs[0]))
    axis = node.get("axis", -1) % len(view.shape)
    order = (*(one for one in order_of(view) if one < axis), *range(axis, len(view.shape)))
    x = plain(lowering, view, order)
    _, weight, bias = (*node.inputs, "")[:3]
    shape = x.shape[axis:]
    vectors = [_vector(lowering, name, shape) for name in (weight, bias)]
    sizes = math.prod(x.shape[:axis]), math.prod(shape)
    out = lowering.output(node.outputs[0], order)
    epsilon = float(node.get("epsilon", 1e-5))
    _rows_normalized(lowering, x, out, sizes, epsilon, centred, vectors)


def _by_channel(
    lowering: Lowering, x: View, out: View, scale: np.ndarray, shift: np.ndarray
) -> None:
    """x times a number a channel, and another added."""
    shape = (-1, *(1,) * (len(x.shape) - 2))
    vectors = [lowering.known_view(v.astype(np.float32).reshape(shape)) for v in (scale, shift)]
    compute(lowering, out, [x, *vectors], (0, 1, "mul", 2, "add"))


def _constants(lowering: Lowering, node: Node) -> list[np.ndarray]:
    """The vectors of a normalization, float64. NotImplementedError: one is no constant."""
    found = [lowering.graph.constants.get(name) for name in node.inputs[1:]]
    made = [numbers(one).astype(np.float64) for one in found if one is not None]
    if len(made) != len(found):
        raise NotImplementedError("scales and biases are served where they are constants")
    return made


def _lower_batch(lowering: Lowering, node: Node) -> None:
    scale, bias, mean, variance = _constants(lowering, node)
    scale = scale / np.sqrt(variance + float(node.get("epsilon", 1e-5)))
    x = lowering.view(node.inputs[0])
    out = lowering.output(node.outputs[0], order_of(x))
    _by_channel(lowering, x, out, scale, bias - mean * scale)


def _lower_groups(lowering: Lowering, node: Node) -> None:
    """A group of an image is a row; the numbers of its channels come afterwards."""
    view = _rows_in(lowering, lowering.view(node.inputs[0]))
    groups = node.get("num_groups")
    scale, bias = _constants(lowering, node)
    channels = view.shape[1]
    scale, bias = (
        np.repeat(one, channels // groups) if one.shape == (groups,) else one
        for one in (scale, bias)
    )
    x = plain(lowering, view)
    target = lowering.fresh(Tensor("float32", x.shape))
    rows = view.shape[0] * groups
    sizes = rows, math.prod(view.shape) // max(rows, 1)
    _rows_normalized(lowering, x, target, sizes, float(node.get("epsilon", 1e-5)), True)
    out = lowering.output(node.outputs[0], order_of(view))
    _by_channel(lowering, target, out, scale, bias)


def _lp_in_parts(parts: Parts, node: Node) -> bool:
    p, x = node.get("p", 2), node.inputs[0]
    if p not in (1, 2):
        return False
    norm = parts.reduce(f"l{p}", x, [node.get("axis", -1)])
    tiny = parts.constant(np.finfo(np.float32).tiny)  # so that zeros stay what they are
    return parts.end(parts.div(x, parts.maximum(norm, tiny)))


def _instance_in_parts(parts: Parts, node: Node) -> bool:
    groups = parts.tensor(node.inputs[0]).sizes[1]
    return parts.end(
        parts.op("GroupNormalization", *node.inputs, num_groups=groups, **parts.attributes)
    )


def _add(name: str, meaning: Callable[..., Array], **traits: Any) -> None:
    operators.add(name, Normalizing(meaning=meaning, positions="kept", **traits))


_add("Softmax", _softmax, lowering=partial(_lower_softmax, False), qlinear=True)
_add("LogSoftmax", _log_softmax, lowering=partial(_lower_softmax, True),
     aten=("_log_softmax",), arguments={"axis": "dim"})  # fmt: skip
_add("BatchNormalization", _batch, kept=_channels, lowering=_lower_batch, outputs=1)
_add("LayerNormalization", _layer, kept=_last, lowering=partial(_lower_rows, True), outputs=1)
_add("RMSNormalization", _root_mean_square, kept=_last, lowering=partial(_lower_rows, False))
_add("GroupNormalization", _group, kept=_channels, lowering=_lower_groups)
_add("InstanceNormalization", _instance, kept=_channels, parts=_instance_in_parts)
_add("LpNormalization", _lp, parts=_lp_in_parts)
