"""What is normalized: rows by a kernel, channels by it and a scale and a shift."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from lowbit.graph.graph import Node, Tensor, numbers
from lowbit.graph.lower import Lowering, lowerings, order_of
from lowbit.graph.lowering.elementwise import compute, format_of, in_format, plain
from lowbit.graph.step import Place, View, Word
from lowbit.kernels.cpu.tensors.normalize import (
    NormalizeForm,
    normalize,
    normalize_parameters,
    plan_normalize,
)
from lowbit.kernels.cpu.tensors.rows import RowsPlan
from lowbit.kernels.cpu.tensors.softmax import (
    SoftmaxForm,
    plan_softmax,
    softmax,
    softmax_parameters,
)


def rows_in(lowering: Lowering, view: View) -> View:
    """A tensor that a kernel reads as rows: of float32, bfloat16 or 8 bits with a scale."""
    if view.tensor.scale is not None or view.tensor.dtype in ("float32", "bfloat16"):
        return view
    return in_format(lowering, view, Tensor("float32", view.shape))


def affine(tensor: Tensor) -> tuple[float, int] | None:
    """Scale and zero point, if there are any."""
    return None if tensor.scale is None else (tensor.scale, tensor.zero_point)


def _planned(lowering: Lowering, plan: RowsPlan) -> Mapping[str, Word]:
    """The words of a plan, and its scratch memory."""
    return {**plan.words, "scratch": lowering.scratch(plan.scratch_bytes * lowering.threads)}


@lowerings.register("Softmax")
@lowerings.register("LogSoftmax")
def _softmax(lowering: Lowering, node: Node) -> None:
    """The axis is brought to stand last in memory, and the output lies as the input then does."""
    view = rows_in(lowering, lowering.view(node.inputs[0]))
    rank = len(view.shape)
    axis = node.get("axis", -1) % max(rank, 1)
    order = (*(one for one in order_of(view) if one != axis), axis)
    x = plain(lowering, view, order)
    out = lowering.output(node.outputs[0], order)
    form = SoftmaxForm(format_of(x.tensor), format_of(out.tensor),
                       logarithm=node.op == "LogSoftmax")  # fmt: skip
    width = x.shape[axis] if rank else 1
    plan = plan_softmax(form, math.prod(x.shape) // max(width, 1), width)
    lowering.add(softmax.program(lowering.isa, form=form), {
        "out": out.place, "x": x.place, "mask": None,
        "parameters": lowering.known(
            softmax_parameters(1.0, affine(x.tensor), affine(out.tensor))
        ),
        **_planned(lowering, plan),
    })  # fmt: skip


def _normalized(
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


@lowerings.register("LayerNormalization")
@lowerings.register("RMSNormalization")
def _rows(lowering: Lowering, node: Node) -> None:
    """The axes from `axis` on are brought to stand last."""
    view = rows_in(lowering, lowering.view(node.inputs[0]))
    axis = node.get("axis", -1) % len(view.shape)
    order = (*(one for one in order_of(view) if one < axis), *range(axis, len(view.shape)))
    x = plain(lowering, view, order)
    _, weight, bias = (*node.inputs, "")[:3]
    shape = x.shape[axis:]
    vectors = [_vector(lowering, name, shape) for name in (weight, bias)]
    sizes = math.prod(x.shape[:axis]), math.prod(shape)
    out = lowering.output(node.outputs[0], order)
    epsilon = float(node.get("epsilon", 1e-5))
    _normalized(lowering, x, out, sizes, epsilon, node.op == "LayerNormalization", vectors)


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


@lowerings.register("BatchNormalization")
def _batch(lowering: Lowering, node: Node) -> None:
    scale, bias, mean, variance = _constants(lowering, node)
    scale = scale / np.sqrt(variance + float(node.get("epsilon", 1e-5)))
    x = lowering.view(node.inputs[0])
    out = lowering.output(node.outputs[0], order_of(x))
    _by_channel(lowering, x, out, scale, bias - mean * scale)


@lowerings.register("GroupNormalization")
def _groups(lowering: Lowering, node: Node) -> None:
    """A group of an image is a row; the numbers of its channels come afterwards."""
    view = rows_in(lowering, lowering.view(node.inputs[0]))
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
    _normalized(lowering, x, target, sizes, float(node.get("epsilon", 1e-5)), True)
    out = lowering.output(node.outputs[0], order_of(view))
    _by_channel(lowering, target, out, scale, bias)
