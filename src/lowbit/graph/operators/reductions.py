"""Pools, and sums, means and greatest elements along axes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from lowbit.graph.expression import quotient
from lowbit.graph.graph import Node, Tensor
from lowbit.graph.lower import Lowering, channels_last
from lowbit.graph.lowering.elementwise import (
    compute,
    converted,
    format_of,
    is_whole,
    plain,
    same_format,
)
from lowbit.graph.lowering.movement import constant, settled
from lowbit.graph.operator import Array, Operator, Sizes, operators
from lowbit.graph.operators.shapes import axes_of
from lowbit.graph.operators.windows import divisors, pool_windows, seen_through
from lowbit.graph.parts import Parts
from lowbit.graph.step import Place, View
from lowbit.kernels.cpu.tensors.elementwise import parameters_array
from lowbit.kernels.cpu.tensors.reductions import (
    ELEMENTS,
    Reduction,
    pool,
    pool_block,
    reduce_columns,
    reduce_rows,
    running_sums,
)
from lowbit.kernels.cpu.tensors.sorting import argmax, argmax_block

Reduce = Callable[[Array, tuple[int, ...]], Array]


def _greatest_of_windows(node: Node, x: Array) -> Array:
    """[N, C, *out] of x [N, C, *image]. ValueError: the indices are asked for."""
    if len(node.outputs) > 1 and node.outputs[1]:
        raise ValueError("the second output of MaxPool, indices, is not supported")
    over = pool_windows(node, x.shape[2:])
    least = -np.inf if x.dtype.kind not in "iu" else np.iinfo(x.dtype).min
    view = seen_through(over, x, least)
    return view.max(axis=tuple(range(x.ndim, view.ndim)))


def _mean_of_windows(node: Node, x: Array) -> Array:
    """Of what lies in the image, with count_include_pad also in `pads`."""
    over = pool_windows(node, x.shape[2:])
    view = seen_through(over, _sum_of(x), 0)
    total = view.sum(tuple(range(x.ndim, view.ndim)))
    return quotient(total, divisors(node, over).astype(total.dtype)).astype(x.dtype)


def _pooled_sizes(node: Node, x: Sizes) -> Sizes:
    return *x[:2], *pool_windows(node, x[2:]).output


def _mean_of_images(node: Node, x: Array) -> Array:
    return _mean(x, tuple(range(2, x.ndim))).astype(x.dtype)


def _greatest_of_images(node: Node, x: Array) -> Array:
    return x.max(axis=tuple(range(2, x.ndim)), keepdims=True)


def _image_sizes(node: Node, x: Sizes) -> Sizes:
    return *x[:2], *(1,) * (len(x) - 2)


def _wide(x: Array) -> Array:
    """In what a sum is computed: float64, or integers as they are."""
    return x if x.dtype.kind in "iu" else x.astype(np.float64)


def _sum_of(x: Array) -> Array:
    """In what the sum of a mean is computed: float64, or integers of 64 bits."""
    return x.astype({"u": np.uint64, "i": np.int64}.get(x.dtype.kind, np.float64))


def _mean(x: Array, axes: tuple[int, ...]) -> Array:
    """Of integers without its fraction."""
    total = np.asarray(_sum_of(x).sum(axes, keepdims=True))
    count = math.prod(x.shape[axis] for axis in axes)
    with np.errstate(all="ignore"):  # the mean of nothing
        return quotient(total, np.asarray(count, total.dtype))


def _reduce(function: Reduce, node: Node, x: Array, axes: Array | None = None) -> Array:
    """A function of numbers and axes that keeps those axes, one long."""
    found = _axes(node, axes, x.ndim)
    made = np.asarray(function(x, found)).astype(x.dtype)
    return made if node.get("keepdims", 1) else made.squeeze(found)


def _kept(node: Node, shape: tuple[int, ...], reduced: tuple[int, ...]) -> list[int]:
    """The shape after axes were reduced."""
    if node.get("keepdims", 1):
        return [1 if i in reduced else n for i, n in enumerate(shape)]
    return [n for i, n in enumerate(shape) if i not in reduced]


def _reduced_shape(node: Node, shape: tuple[int, ...], axes: Array | None = None) -> list[int]:
    return _kept(node, shape, _axes(node, axes, len(shape)))


def _extreme_shape(node: Node, shape: tuple[int, ...]) -> list[int]:
    return _kept(node, shape, (node.get("axis", 0) % len(shape),))


def _axes(node: Node, given: Array | None, rank: int) -> tuple[int, ...]:
    """The axes that are reduced: all where none are given, unless an attribute says none."""
    found = axes_of(node, given, rank)
    return found or (() if node.get("noop_with_empty_axes", 0) else tuple(range(rank)))


def _log_sum_exp(x: Array, axes: tuple[int, ...]) -> Array:
    greatest = np.max(_wide(x), axes, keepdims=True)
    with np.errstate(all="ignore"):
        powers = np.exp(_wide(x) - np.where(np.isfinite(greatest), greatest, 0))
        return np.log(powers.sum(axes, keepdims=True)) + greatest


def _cumulative_sum(node: Node, x: Array, axis: Array) -> Array:
    along = axes_of(node, axis, x.ndim)
    assert along is not None
    values = np.flip(_wide(x), along) if node.get("reverse", 0) else _wide(x)
    if node.get("exclusive", 0):
        count = x.shape[along[0]]
        first = np.zeros([*x.shape[: along[0]], 1, *x.shape[along[0] + 1 :]], values.dtype)
        values = np.concatenate([first, values], along[0]).take(np.arange(count), along[0])
    made = values.cumsum(along[0])
    return (np.flip(made, along) if node.get("reverse", 0) else made).astype(x.dtype)


def _extreme(find: Callable[..., Array]) -> Callable[..., Array]:
    def computed(node: Node, x: Array) -> Array:
        axis, keep = node.get("axis", 0), bool(node.get("keepdims", 1))
        if not node.get("select_last_index", 0):
            return find(x, axis=axis, keepdims=keep).astype(np.int64)
        return x.shape[axis] - 1 - find(np.flip(x, axis), axis=axis, keepdims=keep).astype(np.int64)

    return computed


def _reduction(lowering: Lowering, kind: str, x: View, out: View) -> tuple[Reduction, Place | None]:
    """The kernel's static argument, and its numbers."""
    made = Reduction(kind, format_of(x.tensor), format_of(out.tensor),
                     kind == "max" and not same_format(x, out))  # fmt: skip
    if not made.converted:
        return made, None
    given = [(one.tensor.scale, one.tensor.zero_point) for one in (x, out)]
    pairs = [(scale, zero) for scale, zero in given[:1] if scale is not None]
    scale, zero = given[1]
    target = None if scale is None else (scale, zero)
    return made, lowering.known(parameters_array(pairs, (), target))


def _lower_pool(kind: str, lowering: Lowering, node: Node) -> None:
    view = lowering.view(node.inputs[0])
    order = channels_last(len(view.shape))
    x = plain(lowering, view, order)
    batch, channels, *size = x.shape
    over = pool_windows(node, tuple(size))
    out = lowering.output(node.outputs[0], order)
    reduction, parameters = _reduction(lowering, kind, x, out)
    places, counts = over.places().astype(np.int32), divisors(node, over).astype(np.int32)
    taps = places.shape[1]
    lowering.add(pool.program(lowering.isa, reduction=reduction), {
        "out": out.place, "x": x.place, "places": lowering.known(places),
        "divisors": lowering.known(counts.ravel()), "parameters": parameters, "batch": batch,
        "x_pixels": math.prod(size), "pixels": over.pixels, "taps": taps,
        "channels": channels, "x_stride": channels, "out_stride": channels,
        "block": pool_block(taps, channels),
    })  # fmt: skip


def _lower_reduction(lowering: Lowering, node: Node, kind: str, axes: tuple[int, ...]) -> None:
    """Over neighbouring axes, in the order in which they lie."""
    x = lowering.view(node.inputs[0])
    rank = len(x.shape)
    axes = tuple(sorted(axis % rank for axis in axes))
    kept = [axis for axis in range(rank) if axis not in axes]
    # Channels-last images are read as they lie; else the axes that are reduced stand last.
    spatial = axes == tuple(range(2, rank)) and rank > 2
    order = channels_last(rank) if spatial else (*kept, *axes)
    x = plain(lowering, x, order)
    out = lowering.output(node.outputs[0])
    reduction, parameters = _reduction(lowering, kind, x, out)
    count = math.prod(x.shape[axis] for axis in axes)
    words = {"out": out.place, "x": x.place, "parameters": parameters, "count": count}
    if spatial:
        program = reduce_columns.program(lowering.isa, reduction=reduction)
        lowering.add(program, {**words, "outer": x.shape[0], "inner": x.shape[1]})
        return
    program = reduce_rows.program(lowering.isa, reduction=reduction)
    lowering.add(program, {**words, "rows": math.prod(x.shape[axis] for axis in kept)})


def _of_images(kind: str, lowering: Lowering, node: Node) -> None:
    rank = len(lowering.view(node.inputs[0]).shape)
    _lower_reduction(lowering, node, kind, tuple(range(2, rank)))


def _by_axes(kind: str, lowering: Lowering, node: Node) -> None:
    x = lowering.view(node.inputs[0])
    whole = is_whole(x.tensor)
    if kind == "prod" and not whole:
        raise NotImplementedError("only integers are multiplied")
    if kind in ("sum", "prod") and x.tensor.dtype == "bool":
        raise NotImplementedError("of booleans it has no kernel: Cast to int64 before")
    axes = _axes(node, constant(lowering, node, 1), len(x.shape))
    if axes:
        _lower_reduction(lowering, node, kind, axes)
    elif x.shape:
        steps = (0, "abs") if kind == "norm" else (0,)
        compute(lowering, lowering.output(node.outputs[0]), [x], steps)
    else:
        _lower_reduction(lowering, node, kind, ())


def _lower_cumulative(lowering: Lowering, node: Node) -> None:
    x, out = lowering.view(node.inputs[0]), lowering.graph.tensors[node.outputs[0]]
    found = constant(lowering, node, 1)
    assert found is not None
    rank, axis = len(x.shape), int(found.item()) % len(x.shape)
    order = (*(one for one in range(rank) if one != axis), axis)
    if out.dtype == "bool":
        raise NotImplementedError("of booleans it has no kernel: Cast to int64 before")
    # Numbers with a scale are added as what they stand for.
    work = out if out.scale is None and format_of(out) in ELEMENTS else Tensor("float32", out.shape)
    given = converted(lowering, x, work, order)
    sums = lowering.fresh(work, order)
    form = {name: bool(node.get(name, 0)) for name in ("exclusive", "reverse")}
    program = running_sums.program(lowering.isa, format=format_of(work), **form)
    count = x.shape[axis]
    lowering.add(program, {
        "out": sums.place, "x": given.place, "rows": math.prod(x.shape) // max(1, count),
        "count": count,
    })  # fmt: skip
    settled(lowering, node, sums)


def _lower_argmax(lowering: Lowering, node: Node) -> None:
    if node.get("select_last_index", 0):
        raise NotImplementedError("the first of equals is found, not the last")
    view = lowering.view(node.inputs[0])
    rank = len(view.shape)
    axis = node.get("axis", 0) % rank
    x = plain(lowering, view, (*(one for one in range(rank) if one != axis), axis))
    out = lowering.output(node.outputs[0])
    count = x.shape[axis]
    lowering.add(argmax.program(lowering.isa, format=format_of(x.tensor)), {
        "places": out.place, "x": x.place, "rows": math.prod(out.shape), "count": count,
        "block": argmax_block(count),
    })  # fmt: skip


Rule = Callable[[Parts, Node], bool]


Function = Callable[[Parts, str], str]


def _between(before: Function, op: str, after: Function = lambda parts, x: x) -> Rule:
    """A reduction of a function, and a function of what it makes."""

    def rule(parts: Parts, node: Node) -> bool:
        x, *axes = node.inputs
        made = parts.op(op, before(parts, x), *axes, **parts.attributes)
        return parts.end(after(parts, made))

    return rule


def _square(parts: Parts, x: str) -> str:
    return parts.mul(x, x)


def _log_sum_exp_in_parts(parts: Parts, node: Node) -> bool:
    x, *axes = node.inputs
    kept = {**parts.attributes, "keepdims": 1}
    greatest = parts.op("ReduceMax", x, *axes, **kept)
    infinite = parts.equal(parts.abs(greatest), parts.float32(math.inf))
    finite = parts.where(infinite, parts.float32(0), greatest)
    powers = parts.op("Exp", parts.sub(x, finite))
    total = parts.op("ReduceSum", powers, *axes, **parts.attributes)
    shape = parts.tensor(node.outputs[0]).sizes
    return parts.end(parts.add(parts.op("Log", total), parts.shaped(greatest, shape)))


def _reversing(parts: Parts, x: str) -> str:
    """The operator that makes the least the greatest. Of integers it turns all bits: numbers
    without sign, and the least of the others, have no negative."""
    return "BitwiseNot" if is_whole(parts.tensor(x)) else "Neg"


def _least_in_parts(parts: Parts, node: Node) -> bool:
    x, *axes = node.inputs
    reverse = _reversing(parts, x)
    greatest = parts.op("ReduceMax", parts.op(reverse, x), *axes, **parts.attributes)
    return parts.end(parts.op(reverse, greatest))


def _arg_min(parts: Parts, node: Node) -> bool:
    x = node.inputs[0]
    return parts.end(parts.op("ArgMax", parts.op(_reversing(parts, x), x), **parts.attributes))


def _add(name: str, function: Reduce, kind: str = "", parts: Rule | None = None) -> None:
    """Make a reduction known; kind: the kernel's, if there is one."""
    operators.add(name, Operator(
        meaning=partial(_reduce, function), numbers_from=1, shape=_reduced_shape, parts=parts,
        lowering=partial(_by_axes, kind) if kind else None,
    ))  # fmt: skip


def _unless_floats(rule: Rule) -> Rule:
    """What the kernel does only of float32."""

    def unless(parts: Parts, node: Node) -> bool:
        tensor = parts.tensor(node.inputs[0])
        return (tensor.scale is not None or tensor.dtype != "float32") and rule(parts, node)

    return unless


_add("ReduceMean", _mean, "mean")
_add("ReduceSum", lambda x, axes: _wide(x).sum(axes, keepdims=True), "sum")
_add("ReduceMax", lambda x, axes: x.max(axes, keepdims=True), "max")
_add("ReduceMin", lambda x, axes: x.min(axes, keepdims=True),
     parts=_least_in_parts)  # fmt: skip
_add("ReduceProd", lambda x, axes: _wide(x).prod(axes, keepdims=True), "prod")
_add("ReduceL1", lambda x, axes: np.abs(_wide(x)).sum(axes, keepdims=True),
     parts=_between(Parts.abs, "ReduceSum"))  # fmt: skip
_add("ReduceL2", lambda x, axes: np.sqrt(np.square(_wide(x)).sum(axes, keepdims=True)), "norm",
     _unless_floats(_between(_square, "ReduceSum", Parts.sqrt)))  # fmt: skip
_add("ReduceSumSquare", lambda x, axes: np.square(_wide(x)).sum(axes, keepdims=True),
     parts=_between(_square, "ReduceSum"))  # fmt: skip
_add("ReduceLogSumExp", _log_sum_exp, parts=_log_sum_exp_in_parts)
operators.add("CumSum", Operator(
    meaning=_cumulative_sum, shape=lambda node, x, axis: x, lowering=_lower_cumulative
))  # fmt: skip
operators.add("ArgMax", Operator(
    meaning=_extreme(np.argmax), shape=_extreme_shape, dtype="int64", lowering=_lower_argmax
))  # fmt: skip
operators.add("ArgMin", Operator(
    meaning=_extreme(np.argmin), shape=_extreme_shape, dtype="int64", parts=_arg_min
))  # fmt: skip
operators.add("MaxPool", Operator(
    meaning=_greatest_of_windows, shape=_pooled_sizes, lowering=partial(_lower_pool, "max"),
    outputs=1, eight_bits="moved", samples="alone",
))  # fmt: skip
operators.add("AveragePool", Operator(
    meaning=_mean_of_windows, shape=_pooled_sizes, lowering=partial(_lower_pool, "mean"),
    qlinear=True, eight_bits="format", samples="alone",
))  # fmt: skip
operators.add("GlobalAveragePool", Operator(
    meaning=_mean_of_images, shape=_image_sizes, lowering=partial(_of_images, "mean"),
    qlinear=True, eight_bits="rescaled", samples="alone",
))  # fmt: skip
operators.add("GlobalMaxPool", Operator(
    meaning=_greatest_of_images, shape=_image_sizes, lowering=partial(_of_images, "max"),
    eight_bits="moved", samples="alone",
))  # fmt: skip
