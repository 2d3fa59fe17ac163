"""Elements written by indices: a copy, in which a kernel writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from lowbit.graph.graph import Node, Tensor
from lowbit.graph.lower import Lowering
from lowbit.graph.lowering.elementwise import (
    compute,
    converted,
    format_of,
    index_format,
    plain,
    same_format,
)
from lowbit.graph.operator import Array, Operator, operators
from lowbit.graph.step import View
from lowbit.kernels.cpu.tensors.indexing import ELEMENTS, ScatterForm, scatter

Rows = tuple[int, int, int, int]  # outer, rows, count, inner

_REDUCE: dict[str, Callable[..., None]] = {
    "add": np.add.at, "mul": np.multiply.at, "max": np.maximum.at, "min": np.minimum.at,
}  # fmt: skip


def reduction_of(node: Node) -> str:
    """The attribute `reduction`. ValueError: it is unknown."""
    reduction = node.get("reduction", "none")
    if reduction != "none" and reduction not in _REDUCE:
        raise ValueError(f"reduction should be one of none, {', '.join(_REDUCE)}; got {reduction}")
    return reduction


Places = Callable[[Node, Sequence[int], Array], tuple[Array, ...]]


def _scatter(places_of: Places, check: Callable[..., None], node: Node, x: Array, indices: Array,
             updates: Array) -> Array:  # fmt: skip
    """A copy of x, in which `updates` are written at indices, which may count from the end, or
    with reduction "add", "mul", "max" or "min" reduced with what is there. Of several updates of
    an element without reduction the last stays."""
    check(x.shape, indices.shape, updates.shape, node)
    made, reduction = x.copy(), reduction_of(node)
    places = places_of(node, x.shape, indices)
    sizes = x.shape if len(places) == x.ndim else x.shape[: len(places)]
    for place, size in zip(places, sizes, strict=True):
        if place.size and not -size <= place.min() <= place.max() < size:
            raise ValueError(f"an index is out of range for an axis of {size}")
    if reduction == "none":
        made[places] = updates
    else:
        with np.errstate(all="ignore"):
            _REDUCE[reduction](made, places, updates)
    return made


def _check_nd(x: Sequence[int], indices: Sequence[int], updates: Sequence[int], node: Node) -> None:
    """ValueError: the shapes do not fit: indices [*batch, m] into the first m axes, and updates
    [*batch, the other axes]."""
    depth = indices[-1]
    if not 0 < depth <= len(x) or tuple(updates) != (*indices[:-1], *x[depth:]):
        raise ValueError(f"indices {list(indices)} and updates {list(updates)} of {list(x)}")


def _check_elements(x: Sequence[int], indices: Sequence[int], updates: Sequence[int], node: Node
                    ) -> None:  # fmt: skip
    """The same of indices and updates of one shape: each update's own place, but along `axis`."""
    axis = node.get("axis", 0)
    fits = len(x) == len(indices) and tuple(indices) == tuple(updates)
    fits = fits and -len(x) <= axis < len(x)
    larger = [i for i, (n, most) in enumerate(zip(indices, x, strict=False)) if n > most]
    if not fits or set(larger) - {axis % len(x)}:
        raise ValueError(f"indices {list(indices)} and updates {list(updates)} of {list(x)}")


def _places_of_elements(node: Node, x: Sequence[int], indices: Array) -> tuple[Array, ...]:
    every = list(np.ogrid[tuple(slice(n) for n in indices.shape)])
    every[node.get("axis", 0) % len(x)] = indices
    return tuple(np.broadcast_arrays(*every))


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
    reduction = reduction_of(node)
    raw = f"raw{work.tensor.itemsize}"
    form = ScatterForm(
        raw if reduction == "none" else format_of(work.tensor),
        index_format(indices), reduction,
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


def _scatter_nd(lowering: Lowering, node: Node) -> None:
    indices = plain(lowering, lowering.view(node.inputs[1]))
    shape = lowering.graph.tensors[node.outputs[0]].sizes
    *batch, depth = indices.shape
    work, updates, out = _copied(lowering, node, range(len(shape)))
    rows = 1, math.prod(shape[:depth]), math.prod(batch), math.prod(shape[depth:])
    _scattered(lowering, node, work, plain(lowering, updates), indices, shape[:depth], rows)
    _finish(lowering, work, out)


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
    part = work.part(lines, work.strides)
    block = plain(lowering, part, order)
    outer = math.prod(n for i, n in enumerate(lines) if i != axis)
    rows = outer, shape[axis], indices.shape[axis], 1
    _scattered(lowering, node, block, updates, indices, shape[axis : axis + 1], rows)
    if block.place != part.place:
        compute(lowering, part, [block], (0,))
    _finish(lowering, work, out)


def _add(name: str, places: Places, check: Callable[..., None], lowering: Callable[..., None]
         ) -> None:  # fmt: skip
    def sizes(node: Node, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        check(*shapes, node)
        return shapes[0]

    meaning = partial(_scatter, places, check)
    operators.add(name, Operator(meaning=meaning, shape=sizes, lowering=lowering))


_add("ScatterND", lambda node, x, indices: tuple(np.moveaxis(indices, -1, 0)), _check_nd,
     _scatter_nd)  # fmt: skip
_add("ScatterElements", _places_of_elements, _check_elements, _scatter_elements)
