"""The first elements of an axis in order: their places by a kernel, the elements by the places."""

from __future__ import annotations

import math

from lowbit.graph.graph import Node, Tensor
from lowbit.graph.lower import Lowering, lowerings
from lowbit.graph.lowering.elementwise import format_of, plain
from lowbit.graph.lowering.indices import gathered
from lowbit.kernels.cpu.tensors.sort import ARRAYS, sort


@lowerings.register("TopK")
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
