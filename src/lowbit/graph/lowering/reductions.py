"""Pools, and sums, means and maxima over axes."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from lowbit.graph.graph import Node, Tensor, numbers
from lowbit.graph.lower import Lowering, channels_last, lowerings
from lowbit.graph.lowering.elementwise import (
    compute,
    converted,
    format_of,
    plain,
    same_format,
)
from lowbit.graph.lowering.shapes import integers, settled
from lowbit.graph.operators.windows import divisors, pool_windows
from lowbit.graph.step import Place, View
from lowbit.kernels.cpu.tensors.elementwise import parameters_array
from lowbit.kernels.cpu.tensors.pool import pool, pool_block
from lowbit.kernels.cpu.tensors.reduce import reduce_columns, reduce_rows
from lowbit.kernels.cpu.tensors.reduction import Reduction
from lowbit.kernels.cpu.tensors.scan import ELEMENTS, running_sums


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


@lowerings.register("MaxPool")
@lowerings.register("AveragePool")
def pooling(lowering: Lowering, node: Node) -> None:
    view = lowering.view(node.inputs[0])
    order = channels_last(len(view.shape))
    x = plain(lowering, view, order)
    batch, channels, *size = x.shape
    over = pool_windows(node, tuple(size))
    out = lowering.output(node.outputs[0], order)
    kind = "max" if node.op == "MaxPool" else "mean"
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


def _reduced(lowering: Lowering, node: Node, kind: str, axes: tuple[int, ...]) -> None:
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


@lowerings.register("GlobalAveragePool")
def _global_mean(lowering: Lowering, node: Node) -> None:
    rank = len(lowering.view(node.inputs[0]).shape)
    _reduced(lowering, node, "mean", tuple(range(2, rank)))


@lowerings.register("GlobalMaxPool")
def _global_max(lowering: Lowering, node: Node) -> None:
    rank = len(lowering.view(node.inputs[0]).shape)
    _reduced(lowering, node, "max", tuple(range(2, rank)))


def _by_axes(kind: str, lowering: Lowering, node: Node) -> None:
    axes: tuple[int, ...] | None = node.get("axes")
    name, *given = (one for one in node.inputs if one)
    x = lowering.view(name)
    if axes is None and given:
        axes = tuple(map(int, numbers(lowering.graph.constants[given[0]]).ravel()))
    if not axes:
        if node.get("noop_with_empty_axes", 0):
            compute(lowering, lowering.output(node.outputs[0]), [x], (0,))
            return
        axes = tuple(range(len(x.shape)))
    _reduced(lowering, node, kind, axes)


@lowerings.register("CumSum")
def _cumulative(lowering: Lowering, node: Node) -> None:
    x, out = lowering.view(node.inputs[0]), lowering.graph.tensors[node.outputs[0]]
    axis = integers(lowering, node, 1)
    assert axis is not None
    rank = len(x.shape)
    order = (*(one for one in range(rank) if one != axis[0] % rank), axis[0] % rank)
    # Numbers with a scale are added as what they stand for.
    work = out if out.scale is None and format_of(out) in ELEMENTS else Tensor("float32", out.shape)
    given = converted(lowering, x, work, order)
    sums = lowering.fresh(work, order)
    form = {name: bool(node.get(name, 0)) for name in ("exclusive", "reverse")}
    program = running_sums.program(lowering.isa, format=format_of(work), **form)
    count = x.shape[axis[0]]
    lowering.add(program, {
        "out": sums.place, "x": given.place, "rows": math.prod(x.shape) // max(1, count),
        "count": count,
    })  # fmt: skip
    settled(lowering, node, sums)


for _op, _kind in (("ReduceMean", "mean"), ("ReduceSum", "sum"), ("ReduceMax", "max")):
    lowerings.add(_op, partial(_by_axes, _kind))
