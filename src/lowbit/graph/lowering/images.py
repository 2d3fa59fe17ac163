"""Images made larger or smaller: padding and resizing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lowbit.graph.graph import Node, Tensor, numbers
from lowbit.graph.lower import Lowering, lowerings, order_of
from lowbit.graph.lowering.elementwise import compute
from lowbit.graph.lowering.indices import taken
from lowbit.graph.lowering.shapes import further, settled
from lowbit.graph.operators.images import lengths, pad_ends, refuse, taps
from lowbit.graph.step import View


def _constant(lowering: Lowering, node: Node, number: int) -> np.ndarray | None:
    """An input that has to be known; None if it is left out."""
    name = node.inputs[number] if number < len(node.inputs) else ""
    if not name:
        return None
    value = lowering.graph.constants.get(name)
    if value is None:
        raise NotImplementedError(f"{name!r} has to be a constant")
    return numbers(value)


def _part(view: View, axis: int, first: int, length: int, step: int = 1) -> View:
    """Some elements of an axis."""
    shape, strides = list(view.shape), list(view.strides)
    made = further(view, first * strides[axis])
    shape[axis] = length
    strides[axis] *= step
    return View(replace(view.tensor, shape=tuple(shape)), made.place, tuple(strides))


@lowerings.register("Pad")
def _pad(lowering: Lowering, node: Node) -> None:
    view = lowering.view(node.inputs[0])
    pads, value, axes = (_constant(lowering, node, number) for number in (1, 2, 3))
    assert pads is not None
    ends = pad_ends(node, len(view.shape), pads, axes)
    for axis, (before, after) in enumerate(ends):  # what is taken away
        first, last = max(-before, 0), view.shape[axis] - max(-after, 0)
        view = _part(view, axis, first, last - first)
    ends = [(max(before, 0), max(after, 0)) for before, after in ends]
    out = lowering.output(node.outputs[0], order_of(view))
    inner = out
    mode = node.get("mode", "constant")
    if mode == "constant":
        fill = np.float32(0 if value is None else value.item())
        _fill_around(lowering, out, ends, view.shape, fill)
    for axis, (before, _) in enumerate(ends):
        inner = _part(inner, axis, before, view.shape[axis])
    compute(lowering, inner, [view], (0,))
    if mode != "constant":
        _repeat(lowering, out, ends, view.shape, mode)


def _fill_around(
    lowering: Lowering, out: View, ends: Sequence[tuple[int, int]], inside: Sequence[int],
    fill: np.float32,
) -> None:  # fmt: skip
    """Constants, only where nothing else will be."""
    number = lowering.known_view(np.full(1, fill))
    for axis, (before, after) in enumerate(ends):
        for first, length in ((0, before), (before + inside[axis], after)):
            if length:
                compute(lowering, _part(out, axis, first, length), [number], (0,))
        out = _part(out, axis, before, inside[axis])


def _repeat(
    lowering: Lowering, out: View, ends: Sequence[tuple[int, int]], inside: Sequence[int],
    mode: str,
) -> None:  # fmt: skip
    """What lies inside again around it, axis by axis: in runs of even steps."""
    for axis, (before, after) in enumerate(ends):
        # Axes before this one are whole by now, those behind it are not.
        whole = out
        for other in range(axis + 1, len(ends)):
            whole = _part(whole, other, ends[other][0], inside[other])
        index = np.pad(np.arange(inside[axis]), (before, after), mode) + before  # type: ignore[call-overload]
        for first, last in ((0, before), (before + inside[axis], len(index))):
            while first < last:
                step = int(index[first + 1] - index[first]) if first + 1 < last else 0
                end = first + 1
                while end < last and index[end] - index[end - 1] == step:
                    end += 1
                source = _part(whole, axis, int(index[first]), end - first, step)
                compute(lowering, _part(whole, axis, first, end - first), [source], (0,))
                first = end


@lowerings.register("Resize")
def _resize(lowering: Lowering, node: Node) -> None:
    """Each axis that changes is a sum of elements that are taken; whole copies are views."""
    refuse(node)
    view = lowering.view(node.inputs[0])
    scales, sizes = (_constant(lowering, node, number) for number in (2, 3))
    axes, factors, wanted = lengths(node, view.shape, scales, sizes)
    changing = [
        (axis, taps(node, view.shape[axis], length, factor))
        for axis, factor, length in zip(axes, factors, wanted, strict=True)
        if length != view.shape[axis] or factor != 1
    ]
    repeats = {axis: _repeats(found[0][0], view.shape[axis]) for axis, found in changing}
    if node.get("mode", "nearest") == "nearest" and all(repeats.values()):
        _repeated(lowering, node, view, repeats)
        return
    for number, (axis, sources) in enumerate(changing):
        if len(sources) == 1:
            view = taken(lowering, view, axis, sources[0][0].tolist())
            continue
        last = number == len(changing) - 1
        view = _blended(lowering, node, view, axis, sources, last)
    if node.outputs[0] not in lowering.views:
        settled(lowering, node, view)


def _repeats(index: np.ndarray, length: int) -> int:
    """How often each element of an axis is taken, if all are as often and in order; else 0."""
    times = len(index) // max(length, 1)
    same = times > 0 and np.array_equal(index, np.repeat(np.arange(length), times))
    return times if same else 0


def _repeated(lowering: Lowering, node: Node, view: View, times: dict[int, int]) -> None:
    """One copy, from a view in which each element stands several times."""
    out = lowering.output(node.outputs[0], order_of(view))

    def split(strides: Sequence[int], inner: bool) -> tuple[int, ...]:
        made = list[int]()
        for axis, stride in enumerate(strides):
            count = times.get(axis, 1)
            made += [stride * count, stride] if inner else [stride, 0]
        return tuple(made)

    sizes = [n for axis, size in enumerate(view.shape) for n in (size, times.get(axis, 1))]
    source = View(replace(view.tensor, shape=tuple(sizes)), view.place, split(view.strides, False))
    target = View(replace(out.tensor, shape=tuple(sizes)), out.place, split(out.strides, True))
    compute(lowering, target, [source], (0,))


def _blended(
    lowering: Lowering, node: Node, view: View, axis: int,
    sources: Sequence[tuple[np.ndarray, np.ndarray]], last: bool,
) -> View:  # fmt: skip
    """A weighted sum of elements that are taken from an axis."""
    shape = (*view.shape[:axis], len(sources[0][0]), *view.shape[axis + 1 :])
    order = order_of(view)
    along = [-1 if one == axis else 1 for one in range(len(shape))]
    total: View | None = None
    for number, (index, weight) in enumerate(sources):
        part = taken(lowering, view, axis, index.tolist())
        factor = lowering.known_view(weight.astype(np.float32).reshape(along))
        ending = last and number == len(sources) - 1
        out = (
            lowering.output(node.outputs[0], order)
            if ending
            else lowering.fresh(Tensor("float32", shape), order)
        )
        if total is None:
            compute(lowering, out, [part, factor], (0, 1, "mul"))
        else:
            compute(lowering, out, [part, factor, total], (0, 1, "mul", 2, "add"))
        total = out
    assert total is not None
    return total
