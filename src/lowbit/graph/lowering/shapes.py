"""Operators that move numbers, or only say how they lie."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lowbit.graph.graph import Node
from lowbit.graph.lower import Lowering, channels_last, itemsize, lowerings, order_of, strides_of
from lowbit.graph.lowering.elementwise import compute, converted, plain, same_format
from lowbit.graph.step import View


def settled(lowering: Lowering, node: Node, view: View) -> None:
    """Let the output be a view of the input; copied where its format is another."""
    tensor = lowering.graph.tensors[node.outputs[0]]
    made = View(replace(view.tensor, shape=tensor.shape), view.place, view.strides)
    if same_format(made, View(tensor, view.place, view.strides)):
        lowering.views[node.outputs[0]] = made
    else:
        compute(lowering, lowering.output(node.outputs[0], order_of(made)), [made], (0,))


@lowerings.register("Identity")
@lowerings.register("Dropout")
def identity(lowering: Lowering, node: Node) -> None:
    """The same value; images that become 8 bits lie with channels last, as their readers ask."""
    view, name = lowering.view(node.inputs[0]), node.outputs[0]
    tensor = lowering.graph.tensors[name]
    image = len(view.shape) > 3 and view.tensor.scale is None and tensor.scale is not None
    if image:
        lowering.views[name] = converted(lowering, view, tensor, channels_last(len(view.shape)))
    else:
        settled(lowering, node, view)


@lowerings.register("Reshape")
@lowerings.register("Flatten")
@lowerings.register("Squeeze")
@lowerings.register("Unsqueeze")
def reshape(lowering: Lowering, node: Node) -> None:
    """The same numbers in C order, with other sizes: a view where strides allow it."""
    view = lowering.view(node.inputs[0])
    shape = lowering.graph.tensors[node.outputs[0]].sizes
    settled(lowering, node, reshaped(lowering, view, shape))


def reshaped(lowering: Lowering, view: View, shape: tuple[int, ...]) -> View:
    """A view with other sizes, copied where strides do not allow it."""
    strides = _strides_in(view, shape)
    if strides is None:
        view, strides = plain(lowering, view), strides_of(shape)
    return View(replace(view.tensor, shape=shape), view.place, strides)


def _strides_in(view: View, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides of a view's numbers in another shape, if they have any."""
    have = [(n, s) for n, s in zip(view.shape, view.strides, strict=True) if n != 1]
    if not all(view.shape):
        return strides_of(shape)
    made = list[int]()
    for size in reversed(shape):
        if size == 1:
            made.append(0)
            continue
        # Neighbours become one where the outer one steps over the whole of the inner one.
        while have and len(have) > 1 and have[-1][0] % size:
            (outer, wide), (inner, near) = have[-2:]
            if wide != inner * near:
                return None
            have[-2:] = [(outer * inner, near)]
        if not have or have[-1][0] % size:
            return None
        count, stride = have.pop()
        made.append(stride)
        if count != size:
            have.append((count // size, stride * size))
    return tuple(reversed(made))


@lowerings.register("Transpose")
def transpose(lowering: Lowering, node: Node) -> None:
    view = lowering.view(node.inputs[0])
    axes = node.get("perm") or tuple(reversed(range(len(view.shape))))
    shape = tuple(view.shape[axis] for axis in axes)
    strides = tuple(view.strides[axis] for axis in axes)
    settled(lowering, node, View(replace(view.tensor, shape=shape), view.place, strides))


@lowerings.register("Expand")
def expand(lowering: Lowering, node: Node) -> None:
    view = lowering.view(node.inputs[0])
    shape = lowering.graph.tensors[node.outputs[0]].sizes
    added = len(shape) - len(view.shape)
    own = [0 if n == 1 else s for n, s in zip(view.shape, view.strides, strict=True)]
    strides = (*(0,) * added, *own)
    settled(lowering, node, View(replace(view.tensor, shape=shape), view.place, strides))


def integers(lowering: Lowering, node: Node, number: int) -> list[int] | None:
    """An input of integers that is known; None if it is left out."""
    name = node.inputs[number] if number < len(node.inputs) else ""
    if not name:
        return None
    value = lowering.graph.constants.get(name)
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"{node.op} is served where {name!r} is a constant")
    return [int(one) for one in value.ravel()]


@lowerings.register("Slice")
def slice_(lowering: Lowering, node: Node) -> None:
    view = lowering.view(node.inputs[0])
    rank = len(view.shape)
    starts, ends, axes, steps = (integers(lowering, node, i) for i in range(1, 5))
    assert starts is not None
    assert ends is not None
    strides, distance = list(view.strides), 0
    for at, (start, end) in enumerate(zip(starts, ends, strict=True)):
        axis = (axes[at] if axes else at) % rank
        step = steps[at] if steps else 1
        first = range(*slice(start, end, step).indices(view.shape[axis]))
        distance += (first.start if first else 0) * view.strides[axis]
        strides[axis] = view.strides[axis] * step
    shape = lowering.graph.tensors[node.outputs[0]].sizes
    place = further(view, distance)
    settled(lowering, node, View(replace(view.tensor, shape=shape), place.place, tuple(strides)))


def further(view: View, elements: int) -> View:
    """What begins so many elements behind."""
    return replace(view, place=view.place + elements * itemsize(view.tensor))


@lowerings.register("Split")
def split(lowering: Lowering, node: Node) -> None:
    view = lowering.view(node.inputs[0])
    axis = node.get("axis", 0) % len(view.shape)
    first = 0
    for name in node.outputs:
        size = lowering.graph.tensors[name].sizes[axis]
        part = further(view, first * view.strides[axis])
        one = replace(node, outputs=(name,))
        shape = lowering.graph.tensors[name].sizes
        settled(lowering, one, View(replace(view.tensor, shape=shape), part.place, view.strides))
        first += size


@lowerings.register("Concat")
def concat(lowering: Lowering, node: Node) -> None:
    """Each input is copied to its place."""
    inputs = [lowering.view(name) for name in node.inputs]
    out = lowering.output(node.outputs[0], order_of(inputs[0]))
    axis = node.get("axis", 0) % len(out.shape)
    first = 0
    for one in inputs:
        shape = one.shape
        target = further(out, first * out.strides[axis])
        target = View(replace(out.tensor, shape=shape), target.place, out.strides)
        compute(lowering, target, [one], (0,))
        first += shape[axis]
