"""Elements written by indices: a copy, in which a kernel writes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lowbit.graph.graph import Node, Tensor
from lowbit.graph.lower import Lowering, itemsize, lowerings
from lowbit.graph.lowering.elementwise import compute, converted, format_of, plain, same_format
from lowbit.graph.operators.scatter import reduction_of
from lowbit.graph.step import View
from lowbit.kernels.cpu.tensors.scatter import ELEMENTS, ScatterForm, scatter

Rows = tuple[int, int, int, int]  # outer, rows, count, inner


def _copied(lowering: Lowering, node: Node, order: Sequence[int]) -> tuple[View, View, View]:
    """x in memory that is written, the updates in the same format, and the output. A reduction of
    what stands for other numbers is one of float32."""
    x, _, updates = (lowering.view(name) for name in node.inputs)
    out = lowering.output(node.outputs[0], order)
    work = out
    reduced = reduction_of(node) != "none"
    if reduced and (out.tensor.scale is not None or format_of(out.tensor) not in ELEMENTS):
        work = lowering.fresh(Tensor("float32", out.shape), order)
    compute(lowering, work, [x], (0,))
    return work, converted(lowering, updates, work.tensor, order_of_updates(updates, order)), out


def order_of_updates(updates: View, order: Sequence[int]) -> Sequence[int]:
    """The order of x's dimensions, where updates have the same, else their own."""
    return order if len(updates.shape) == len(order) else range(len(updates.shape))


def _scattered(
    lowering: Lowering, node: Node, work: View, updates: View, indices: View, sizes: Sequence[int],
    rows: Rows,
) -> None:  # fmt: skip
    """Add the step that writes, all dense in one order."""
    outer, count_rows, count, inner = rows
    if indices.tensor.dtype not in ("int32", "int64"):
        raise NotImplementedError(f"indices are int32 or int64, not {indices.tensor.dtype}")
    reduction = reduction_of(node)
    raw = f"raw{itemsize(work.tensor)}"
    form = ScatterForm(
        raw if reduction == "none" else format_of(work.tensor),
        "s32" if indices.tensor.dtype == "int32" else "s64", reduction,
    )  # fmt: skip
    lowering.add(scatter.program(lowering.isa, form=form), {
        "out": work.place, "updates": updates.place, "indices": indices.place,
        "sizes": lowering.known(np.array(sizes, np.int64)),
        "outside": lowering.flag(f"an index is out of range for axes of {list(sizes)}"),
        "outer": outer, "rows": count_rows, "count": count, "inner": inner, "depth": len(sizes),
        "index_stride": count if outer > 1 else 0,
    })  # fmt: skip


def _finish(lowering: Lowering, work: View, out: View) -> None:
    if not (work.place == out.place and same_format(work, out)):
        compute(lowering, out, [work], (0,))


@lowerings.register("ScatterND")
def _scatter_nd(lowering: Lowering, node: Node) -> None:
    indices = plain(lowering, lowering.view(node.inputs[1]))
    shape = lowering.graph.tensors[node.outputs[0]].sizes
    *batch, depth = indices.shape
    work, updates, out = _copied(lowering, node, range(len(shape)))
    rows = 1, math.prod(shape[:depth]), math.prod(batch), math.prod(shape[depth:])
    _scattered(lowering, node, work, plain(lowering, updates), indices, shape[:depth], rows)
    _finish(lowering, work, out)


@lowerings.register("ScatterElements")
def _scatter_elements(lowering: Lowering, node: Node) -> None:
    """Lines along the axis; where there are updates of fewer lines, these alone, which are then
    put back."""
    shape = lowering.graph.tensors[node.outputs[0]].sizes
    rank, axis = len(shape), node.get("axis", 0) % len(shape)
    order = (*(one for one in range(rank) if one != axis), axis)
    indices = plain(lowering, lowering.view(node.inputs[1]), order)
    work, updates, out = _copied(lowering, node, order)
    lines = tuple(n if i == axis else m for i, (n, m) in enumerate(
        zip(shape, indices.shape, strict=True)))  # fmt: skip
    part = View(replace(work.tensor, shape=lines), work.place, work.strides)
    block = plain(lowering, part, order)
    outer = math.prod(n for i, n in enumerate(lines) if i != axis)
    rows = outer, shape[axis], indices.shape[axis], 1
    _scattered(lowering, node, block, updates, indices, shape[axis : axis + 1], rows)
    if block.place != part.place:
        compute(lowering, part, [block], (0,))
    _finish(lowering, work, out)
