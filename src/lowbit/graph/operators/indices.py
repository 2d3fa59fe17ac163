"""Elements by their numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lowbit.graph.graph import Node, Tensor, numbers
from lowbit.graph.lower import Lowering, order_of, strides_of
from lowbit.graph.lowering.elementwise import format_of, index_format, pairs_of, plain, same_format
from lowbit.graph.lowering.movement import settled
from lowbit.graph.operator import Array, Operator, Sizes, operators
from lowbit.graph.step import Place, View
from lowbit.kernels.cpu.tensors.elementwise import parameters_array
from lowbit.kernels.cpu.tensors.indexing import GatherForm, flat_indices, gather, gather_block
from lowbit.numerics import QTensor


def flat(indices: Array, sizes: tuple[int, ...]) -> Array:
    """Where indices [..., axes] are in an array of these sizes, in C order, int64; negative ones
    count from the end. ValueError: one is out of range."""
    limits = np.array(sizes, np.int64)
    if np.any((indices < -limits) | (indices >= limits)):
        raise ValueError(f"an index is out of range for axes of {list(sizes)}")
    steps = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    places = np.where(indices < 0, indices + limits, indices) * np.array(steps, np.int64)
    return places.sum(-1, dtype=np.int64)


def _gather(node: Node, x: Array, indices: Array) -> Array:
    axis = node.get("axis", 0)
    least, greatest = (find(indices, initial=0) for find in (np.min, np.max))
    if not -x.shape[axis] <= least <= greatest < max(x.shape[axis], 1):
        raise ValueError(f"indices from {least} to {greatest} of {x.shape[axis]} elements")
    return np.take(x, indices, axis)


def _gathered_sizes(node: Node, x: Sizes, indices: Sizes) -> Sizes:
    axis = node.get("axis", 0) % len(x)
    return x[:axis] + indices + x[axis + 1 :]


def _gather_nd(node: Node, x: Array, indices: Array) -> Array:
    shape, own, axes = _named(node, x.shape, indices.shape)
    outer = math.prod(x.shape[:own])
    table = x.reshape(outer, math.prod(x.shape[own : own + axes]), *x.shape[own + axes :])
    places = flat(indices, x.shape[own : own + axes]).reshape(outer, -1 if outer else 0)
    return table[np.arange(outer)[:, None], places].reshape(shape)


def _named(node: Node, x: Sizes, indices: Sizes) -> tuple[Sizes, int, int]:
    """The output's shape, the axes of the batch, and how many numbers are an index."""
    own, axes = node.get("batch_dims", 0), indices[-1] if indices else 0
    if not 0 <= own < len(indices) or x[:own] != indices[:own] or own + axes > len(x):
        raise ValueError(
            f"indices of shape {list(indices)}, with {own} axes of a batch, do not name "
            f"elements of an array of shape {list(x)}"
        )
    return (*indices[:-1], *x[own + axes :]), own, axes


def _gather_elements(node: Node, x: Array, indices: Array) -> Array:
    axis = node.get("axis", 0) % x.ndim
    lines = tuple(slice(None) if i == axis else slice(n) for i, n in enumerate(indices.shape))
    return np.take_along_axis(x[lines], indices, axis)


def taken(lowering: Lowering, view: View, axis: int, index: Sequence[int]) -> View:
    """The elements of an axis at known places: a view, where the places are evenly apart."""
    steps = set(np.diff(index).tolist())
    if len(steps) <= 1:
        return view.along(axis, index[0] if index else 0, len(index), steps.pop() if steps else 1)
    order, shape = order_of(view), (*view.shape[:axis], len(index), *view.shape[axis + 1 :])
    x = plain(lowering, view, order)
    out = lowering.fresh(replace(view.tensor, shape=shape), order)
    places = lowering.known_view(np.array(index, np.int64))
    gathered(lowering, x, places, out, order, axis)
    return out


def gathered(
    lowering: Lowering, x: View, indices: View, out: View, order: Sequence[int], axis: int,
    of_each: bool = False,
) -> None:  # fmt: skip
    """Add the step that takes elements of an axis, all dense in this order of x's dimensions.

    of_each: whether what lies before the axis has indices of its own."""
    at = list(order).index(axis)
    copied = same_format(x, out)
    raw = f"raw{x.tensor.itemsize}"
    form = GatherForm(
        raw if copied else format_of(x.tensor),
        raw if copied else format_of(out.tensor),
        index_format(indices),
    )
    given = [] if copied else pairs_of(x.tensor)
    outer = math.prod(x.shape[one] for one in order[:at])
    count = indices.shape[axis] if of_each else math.prod(indices.shape)
    inner = math.prod(x.shape[one] for one in order[at + 1 :])
    sizes = outer, x.shape[axis], count, inner
    _add(lowering, form, x.place, indices, out, given, sizes, of_each)


def _add(
    lowering: Lowering, form: GatherForm, table: Place, indices: View, out: View,
    given: Sequence[tuple[float, int]], sizes: tuple[int, int, int, int], of_each: bool = False,
) -> None:  # fmt: skip
    outer, rows, count, inner = sizes
    target = None if form.out.startswith("raw") else next(iter(pairs_of(out.tensor)), None)
    lowering.add(gather.program(lowering.isa, form=form), {
        "out": out.place, "table": table, "indices": indices.place,
        "table_parameters": lowering.known(parameters_array(given)) if given else None,
        "parameter_stride": 2 if len(given) > 1 else 0,
        "out_parameters": lowering.known(parameters_array([], (), target)) if target else None,
        "outside": lowering.scratch(4) if indices.place.buffer in lowering.constants
        else lowering.flag(f"an index is out of range for an axis of {rows}"),
        "outer": outer, "rows": rows, "count": count, "inner": inner,
        "index_stride": count if of_each else 0, "block": gather_block(inner),
    })  # fmt: skip


def _lower_gather(lowering: Lowering, node: Node) -> None:
    """Places that are known and evenly apart are a view. A table of 8-bit rows with scales of their
    own is read as it is."""
    table = lowering.graph.constants.get(node.inputs[0])
    known = lowering.graph.constants.get(node.inputs[1])
    known = None if known is None else numbers(known)
    if known is not None:
        _check(lowering, node, known)
    if isinstance(table, QTensor) and _by_rows(table) and not node.get("axis", 0):
        indices = plain(lowering, lowering.view(node.inputs[1]))
        out = lowering.output(node.outputs[0])
        pairs = [*zip(table.scale.tolist(), table.zero_point.tolist(), strict=True)]
        form = GatherForm("s8" if table.values.dtype == np.int8 else "u8", format_of(out.tensor),
                          index_format(indices))  # fmt: skip
        sizes = 1, table.shape[0], math.prod(indices.shape), math.prod(table.shape[1:])
        place = lowering.known(np.ascontiguousarray(table.values))
        _add(lowering, form, place, indices, out, pairs, sizes)
        return
    view = lowering.view(node.inputs[0])
    axis = node.get("axis", 0) % len(view.shape)
    if known is not None and known.ndim <= 1 and len(set(np.diff(np.ravel(known)))) < 2:
        size = view.shape[axis]
        part = taken(lowering, view, axis, [int(one) % size for one in np.ravel(known)])
        drop = slice(axis, axis + 1) if known.ndim == 0 else slice(0, 0)
        shape, strides = list(part.shape), list(part.strides)
        del shape[drop], strides[drop]
        settled(lowering, node, part.part(shape, strides))
        return
    x = plain(lowering, view)
    indices = plain(lowering, lowering.view(node.inputs[1]))
    out = lowering.output(node.outputs[0])
    gathered(lowering, x, indices, out, tuple(range(len(x.shape))), axis)


def _lower_gather_nd(lowering: Lowering, node: Node) -> None:
    """The axes that an index names are read as a single one. What lies before them has indices of
    its own."""
    x, indices = (plain(lowering, lowering.view(name)) for name in node.inputs)
    own, axes = node.get("batch_dims", 0), indices.shape[-1]
    within, inner = x.shape[own : own + axes], x.shape[own + axes :]
    outer, count = math.prod(x.shape[:own]), math.prod(indices.shape[own:-1])
    if node.inputs[1] in lowering.graph.constants:
        known = numbers(lowering.graph.constants[node.inputs[1]])
        places = lowering.known_view(flat(known, within).reshape(outer, count))
    else:
        places = lowering.fresh(Tensor("int64", (outer, count)))
        lowering.add(flat_indices.program(
            lowering.isa, axes=axes, format=index_format(indices)
        ), {
            "flat": places.place, "indices": indices.place, "count": outer * count,
            "sizes": lowering.known(np.array(within, np.int64)),
        })  # fmt: skip
    table = (outer, math.prod(within), *inner)
    out = lowering.output(node.outputs[0])
    made = out.part((outer, count, *inner), ())
    x = x.part(table, strides_of(table))
    gathered(lowering, x, places, made, range(len(table)), 1, own > 0)


def _lower_gather_elements(lowering: Lowering, node: Node) -> None:
    """Of each line along the axis, the elements at its own places."""
    x, indices = (lowering.view(name) for name in node.inputs)
    known = lowering.graph.constants.get(node.inputs[1])
    if known is not None:
        _check(lowering, node, numbers(known))
    rank = len(x.shape)
    axis = node.get("axis", 0) % rank
    order = (*(one for one in range(rank) if one != axis), axis)
    lines = tuple(x.shape[i] if i == axis else n for i, n in enumerate(indices.shape))
    x = x.part(lines, x.strides)  # others are not looked at
    x, indices = (plain(lowering, one, order) for one in (x, indices))
    gathered(lowering, x, indices, lowering.output(node.outputs[0], order), order, axis, True)


def _check(lowering: Lowering, node: Node, known: np.ndarray) -> None:
    """ValueError: one of the indices, which are known, does not exist."""
    table = lowering.graph.constants.get(node.inputs[0])
    shape = lowering.graph.tensors[node.inputs[0]].sizes if table is None else table.shape
    size = shape[node.get("axis", 0) % len(shape)]
    if known.size and not -size <= known.min() <= known.max() < size:
        raise ValueError(f"{node.op} {lowering.node!r}: indices of {size} elements, not {known}")


def _by_rows(table: QTensor) -> bool:
    return table.axis == 0 and table.group_size is None and table.format.bits == 8


operators.add("Gather", Operator(
    meaning=_gather, shape=_gathered_sizes, lowering=_lower_gather, eight_bits="moved",
    positions="indices", positions_if=lambda node, rank, count: not node.get("axis", 0),
))  # fmt: skip
# Of each line along the axis, the elements at its own places.
operators.add("GatherElements", Operator(
    meaning=_gather_elements, shape=lambda node, x, indices: indices,
    lowering=_lower_gather_elements,
))  # fmt: skip
# x at indices [..., axes]: the last dimension of the indices counts the axes of x that they are of,
# behind `batch_dims` axes which both have.
operators.add("GatherND", Operator(
    meaning=_gather_nd, shape=lambda node, x, indices: _named(node, x, indices)[0],
    lowering=_lower_gather_nd,
))  # fmt: skip
