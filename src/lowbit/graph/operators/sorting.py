"""The first elements of an axis in order: their places by a kernel, the elements by the places."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lowbit.graph.graph import Node, Tensor
from lowbit.graph.lower import Lowering
from lowbit.graph.lowering.elementwise import converted, format_of, plain
from lowbit.graph.operator import Array, Operator, Sizes, operators
from lowbit.graph.operators.indices import gathered
from lowbit.graph.operators.shapes import ints
from lowbit.kernels.cpu.tensors.route import route, routed_sum
from lowbit.kernels.cpu.tensors.sorting import ARRAYS, sort


def order(x: Array, axis: int, descending: bool) -> Array:
    """int64, like x: the places of an axis's elements in order; of equal ones, the lower first.
    NaN is above all numbers, as PyTorch has it."""
    if descending:  # the reverse of the reversed, so that equal ones stay in order
        back = np.flip(np.argsort(np.flip(x, axis), axis, kind="stable"), axis)
        return x.shape[axis] - 1 - back
    return np.argsort(x, axis, kind="stable")


def check(node: Node, shape: Sequence[int], k: Array) -> tuple[int, int]:
    """The axis and how many of it are taken. ValueError: it has not so many."""
    axis, (count, *_) = node.get("axis", -1), ints(k)
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"the axis {axis} does not exist in {len(shape)} dimensions")
    if not 0 <= count <= shape[axis]:
        raise ValueError(f"{count} elements of an axis of {shape[axis]}")
    return axis % len(shape), count


def _first(node: Node, x: Array, k: Array) -> tuple[Array, Array]:
    axis, count = check(node, x.shape, k)
    places = order(x, axis, bool(node.get("largest", 1)))
    places = places.take(np.arange(count), axis).astype(np.int64)
    return np.take_along_axis(x, places, axis), places


def _sizes(node: Node, x: Sizes, k: Array) -> Sizes:
    axis, count = check(node, x, k)
    return *x[:axis], count, *x[axis + 1 :]


def _top_k(lowering: Lowering, node: Node) -> None:
    view = lowering.view(node.inputs[0])
    rank = len(view.shape)
    axis = node.get("axis", -1) % rank
    order = (*(one for one in range(rank) if one != axis), axis)
    x = plain(lowering, view, order)
    values, places = (*node.outputs, "")[:2]
    shape = lowering.graph.tensors[values or places].sizes
    count, kept = x.shape[axis], shape[axis]
    indices = Tensor("int64", shape)
    out = lowering.output(places, order) if places else lowering.fresh(indices, order)
    form = {"format": format_of(x.tensor), "descending": bool(node.get("largest", 1))}
    lowering.add(sort.program(lowering.isa, **form), {
        "places": out.place, "x": x.place,
        "scratch": lowering.scratch(8 * ARRAYS * count * lowering.threads),
        "rows": math.prod(shape) // max(1, kept), "count": count, "kept": kept,
        "levels": max(0, count - 1).bit_length(),
    })  # fmt: skip
    if values:
        gathered(lowering, x, out, lowering.output(values, order), order, axis, True)


# The K greatest (largest=0: least) elements of x along `axis`, in order, and their places. They are
# in order whatever `sorted` says, which leaves the order open.
operators.add("TopK", Operator(
    meaning=_first, numbers_from=1, shape=_sizes, lowering=_top_k,
    further=lambda node, tensors, values: (Tensor("int64", values.shape),),
))  # fmt: skip


def _route_sizes(node: Node, experts: Sizes) -> Sizes:
    return (math.prod(experts),)


def _route_further(
    node: Node, tensors: Sequence[Tensor | None], rows: Tensor
) -> tuple[Tensor, ...]:
    assert tensors[0] is not None
    return Tensor("int64", tensors[0].shape), Tensor("int64", (node.get("count"),))


def _routed_pairs(node: Node, experts: Array) -> tuple[Array, Array, Array]:
    """Pairs of rows and experts in the order of the experts, see kernels/cpu/tensors/route.py.

    experts [rows, k] int64; attribute `count`: of experts. Outputs, int64: the rows of the pairs in
    order [rows · k], where each pair is [rows, k], and where those of each expert end [count]."""
    flat = experts.reshape(-1)
    sorted_pairs = np.argsort(flat, kind="stable")
    ends = np.cumsum(np.bincount(flat, minlength=node.get("count")))
    places = np.argsort(sorted_pairs, kind="stable").reshape(experts.shape)
    return sorted_pairs // experts.shape[1], places, ends


def _lower_route(lowering: Lowering, node: Node) -> None:
    experts = plain(lowering, lowering.view(node.inputs[0]))
    rows, places, ends = (lowering.output(name).place for name in node.outputs)
    lowering.add(route.program(lowering.isa), {
        "rows": rows, "places": places, "ends": ends, "experts": experts.place,
        "count": math.prod(experts.shape), "each": experts.shape[1], "groups": node.get("count"),
    })  # fmt: skip


operators.add("Route", Operator(
    meaning=_routed_pairs, shape=_route_sizes, further=_route_further, lowering=_lower_route,
    onnx=False,
))  # fmt: skip


def _routed_sum(node: Node, x: Array, places: Array, shares: Array, residual: Array) -> Array:
    """residual [rows, n] and, of x, the rows at places [rows, k], times shares [rows, k]."""
    parts = x[places].astype(np.float64) * shares[..., None]
    return (residual + parts.sum(1)).astype(residual.dtype)


def _routed_sum_sizes(node: Node, x: Sizes, places: Sizes, shares: Sizes, residual: Sizes) -> Sizes:
    if places != shares or (places[0], x[1]) != residual:
        raise ValueError(f"x {x}, places {places}, shares {shares}, residual {residual} do not fit")
    return residual


def _lower_routed_sum(lowering: Lowering, node: Node) -> None:
    x, places, shares, residual = (plain(lowering, lowering.view(name)) for name in node.inputs)
    x, shares, residual = (
        converted(lowering, one, Tensor("float32", one.shape)) for one in (x, shares, residual)
    )
    (rows, each), width = places.shape, x.shape[1]
    lowering.add(routed_sum.program(lowering.isa), {
        "out": lowering.output(node.outputs[0]).place, "x": x.place, "places": places.place,
        "shares": shares.place, "residual": residual.place, "rows": rows, "each": each,
        "width": width,
    })  # fmt: skip


operators.add("RoutedSum", Operator(
    meaning=_routed_sum, shape=_routed_sum_sizes, dtype="float32", lowering=_lower_routed_sum,
    onnx=False,
))  # fmt: skip
