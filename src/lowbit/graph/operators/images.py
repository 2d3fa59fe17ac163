"""Images made larger or smaller: padding, resizing, and windows put back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from lowbit.graph.graph import Node, Tensor
from lowbit.graph.lower import Lowering, order_of, strides_of
from lowbit.graph.lowering.elementwise import compute, is_whole, plain
from lowbit.graph.lowering.movement import constant, settled
from lowbit.graph.operator import Array, Operator, operators
from lowbit.graph.operators.indices import taken
from lowbit.graph.operators.shapes import axes_of, ints
from lowbit.graph.operators.windows import put_back, taps_of, windows
from lowbit.graph.step import View
from lowbit.product.geometry import Geometry

_MODES = "constant", "reflect", "edge", "wrap"


def _pad(
    node: Node, x: Array, pads: Array, value: Array | None = None, axes: Array | None = None
) -> Array:
    mode = node.get("mode", "constant")
    if mode not in _MODES:
        raise ValueError(f"the mode {mode!r} of Pad is not one of {', '.join(_MODES)}")
    ends = pad_ends(node, x.ndim, pads, axes)
    x = x[tuple(slice(max(-b, 0), n - max(-a, 0)) for n, (b, a) in zip(x.shape, ends, strict=True))]
    around = [(max(before, 0), max(after, 0)) for before, after in ends]
    if mode != "constant":
        return np.pad(x, around, mode)
    return np.pad(x, around, constant_values=0 if value is None else value.item())


def pad_ends(node: Node, rank: int, pads: Array, axes: Array | None) -> list[tuple[int, int]]:
    """What is added before and after each axis; if it is negative, taken away."""
    found = axes_of(node, axes, rank)
    found = tuple(range(rank)) if found is None else found
    given = ints(pads)
    if len(given) != 2 * len(found):
        raise ValueError(f"expected {2 * len(found)} pads, got {given}")
    ends = [(0, 0)] * rank
    for index, axis in enumerate(found):
        ends[axis] = given[index], given[index + len(found)]
    return ends


def _padded_shape(
    node: Node,
    shape: tuple[int, ...],
    pads: Array,
    value: Array | None = None,
    axes: Array | None = None,
) -> list[int]:
    ends = pad_ends(node, len(shape), pads, axes)
    return [n + before + after for n, (before, after) in zip(shape, ends, strict=True)]


def _resize(
    node: Node,
    x: Array,
    roi: Array | None = None,
    scales: Array | None = None,
    sizes: Array | None = None,
) -> Array:
    _refuse(node)
    axes, factors, wanted = _lengths(node, x.shape, scales, sizes)
    dtype = x.dtype
    for axis, factor, length in zip(axes, factors, wanted, strict=True):
        if length == x.shape[axis] and factor == 1:
            continue
        sources = _taps(node, x.shape[axis], length, factor)
        if len(sources) == 1:
            x = np.take(x, sources[0][0], axis)
            continue
        made = np.zeros((), np.float64)
        along = [-1 if i == axis else 1 for i in range(x.ndim)]
        for index, weight in sources:
            made = made + np.take(x, index, axis) * weight.reshape(along)
        x = made if dtype.kind in "iu" else made.astype(dtype)
    return x.astype(dtype, copy=False)


def _refuse(node: Node) -> None:
    """ValueError: an attribute of Resize is not supported."""
    if node.get("antialias", 0) or node.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise ValueError("Resize with antialias or keep_aspect_ratio_policy is not supported")
    if node.get("exclude_outside", 0):
        raise ValueError("Resize with exclude_outside is not supported")


def _lengths(
    node: Node, shape: tuple[int, ...], scales: Array | None, sizes: Array | None
) -> tuple[tuple[int, ...], list[float], list[int]]:
    """The axes, by what each is scaled, and how long it becomes."""
    axes = axes_of(node, None, len(shape))
    axes = tuple(range(len(shape))) if axes is None else axes
    if sizes is not None and sizes.size:
        lengths = list(ints(sizes))
        return axes, [n / shape[axis] for n, axis in zip(lengths, axes, strict=True)], lengths
    if scales is None or not scales.size:
        raise ValueError("Resize needs scales or sizes")
    factors = [float(one) for one in scales]
    return axes, factors, [int(shape[a] * f) for a, f in zip(axes, factors, strict=True)]


def _resized_shape(
    node: Node,
    shape: tuple[int, ...],
    roi: Array | None = None,
    scales: Array | None = None,
    sizes: Array | None = None,
) -> list[int]:
    axes, _, wanted = _lengths(node, shape, scales, sizes)
    made = list(shape)
    for axis, length in zip(axes, wanted, strict=True):
        made[axis] = length
    return made


def _origins(node: Node, length: int, out: int, factor: float) -> Array:
    """Where in an axis of `length` the `out` elements come from, float32 as others compute it."""
    mode = node.get("coordinate_transformation_mode", "half_pixel")
    at, scale, half = np.arange(out, dtype=np.float32), np.float32(factor), np.float32(0.5)
    if mode == "align_corners":
        return at * np.float32(length - 1) / np.float32(out - 1) if out > 1 else at
    if mode == "asymmetric":
        return at / scale
    if mode == "pytorch_half_pixel" and out == 1:
        return np.zeros(1, np.float32)
    if mode in ("half_pixel", "pytorch_half_pixel"):
        return (at + half) / scale - half
    if mode == "half_pixel_symmetric":
        middle, adjustment = np.float32(length / 2), np.float32(out / (factor * length))
        return middle * (1 - adjustment) + (at + half) / scale - half
    raise ValueError(f"the coordinate_transformation_mode {mode!r} of Resize is not supported")


def _nearest(node: Node, at: Array) -> Array:
    mode = node.get("nearest_mode", "round_prefer_floor")
    if mode == "round_prefer_floor":
        return np.ceil(at - np.float32(0.5)).astype(np.int64)
    if mode == "round_prefer_ceil":
        return np.floor(at + np.float32(0.5)).astype(np.int64)
    if mode not in ("floor", "ceil"):
        raise ValueError(f"the nearest_mode {mode!r} of Resize is not known")
    return (np.floor if mode == "floor" else np.ceil)(at).astype(np.int64)


def _taps(node: Node, length: int, out: int, factor: float) -> list[tuple[Array, Array]]:
    """What each of the `out` elements of a resized axis is a sum of: indices of the axis, of
    `length`, and their weights, float64. Beyond its ends an axis goes on as they are."""
    at, mode = _origins(node, length, out, factor), node.get("mode", "nearest")
    if mode == "nearest":
        return [(np.clip(_nearest(node, at), 0, length - 1), np.ones(out))]
    floor = np.floor(at)
    past = (at - floor).astype(np.float64)
    if mode == "linear":
        weights = {0: 1 - past, 1: past}
    elif mode == "cubic":
        a = float(node.get("cubic_coeff_a", -0.75))
        weights = {step: _cubic(np.abs(past - step), a) for step in (-1, 0, 1, 2)}
    else:
        raise ValueError(f"the mode {mode!r} of Resize is not nearest, linear or cubic")
    return [
        (np.clip(floor.astype(np.int64) + step, 0, length - 1), weight)
        for step, weight in weights.items()
    ]


def _cubic(distance: Array, a: float) -> Array:
    """The weight of an element in cubic convolution (Keys 1981)."""
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0))


def _lower_pad(lowering: Lowering, node: Node) -> None:
    view = lowering.view(node.inputs[0])
    pads, value, axes = (constant(lowering, node, number) for number in (1, 2, 3))
    assert pads is not None
    ends = pad_ends(node, len(view.shape), pads, axes)
    for axis, (before, after) in enumerate(ends):  # what is taken away
        first, last = max(-before, 0), view.shape[axis] - max(-after, 0)
        view = view.along(axis, first, last - first)
    ends = [(max(before, 0), max(after, 0)) for before, after in ends]
    out = lowering.output(node.outputs[0], order_of(view))
    inner = out
    mode = node.get("mode", "constant")
    if mode == "constant":
        dtype = view.tensor.dtype if is_whole(view.tensor) else "float32"
        fill = np.full(1, 0 if value is None else value.item(), dtype)
        _fill_around(lowering, out, ends, view.shape, fill)
    for axis, (before, _) in enumerate(ends):
        inner = inner.along(axis, before, view.shape[axis])
    compute(lowering, inner, [view], (0,))
    if mode != "constant":
        _repeat(lowering, out, ends, view.shape, mode)


def _fill_around(
    lowering: Lowering, out: View, ends: Sequence[tuple[int, int]], inside: Sequence[int],
    fill: Array,
) -> None:  # fmt: skip
    """Constants, only where nothing else will be."""
    number = lowering.known_view(fill)
    for axis, (before, after) in enumerate(ends):
        for first, length in ((0, before), (before + inside[axis], after)):
            if length:
                compute(lowering, out.along(axis, first, length), [number], (0,))
        out = out.along(axis, before, inside[axis])


def _repeat(
    lowering: Lowering, out: View, ends: Sequence[tuple[int, int]], inside: Sequence[int],
    mode: str,
) -> None:  # fmt: skip
    """What lies inside again around it, axis by axis: in runs of even steps."""
    for axis, (before, after) in enumerate(ends):
        # Axes before this one are whole by now, those behind it are not.
        whole = out
        for other in range(axis + 1, len(ends)):
            whole = whole.along(other, ends[other][0], inside[other])
        index = np.pad(np.arange(inside[axis]), (before, after), mode) + before  # type: ignore[call-overload]
        for first, last in ((0, before), (before + inside[axis], len(index))):
            while first < last:
                step = int(index[first + 1] - index[first]) if first + 1 < last else 0
                end = first + 1
                while end < last and index[end] - index[end - 1] == step:
                    end += 1
                source = whole.along(axis, int(index[first]), end - first, step)
                compute(lowering, whole.along(axis, first, end - first), [source], (0,))
                first = end


def _lower_resize(lowering: Lowering, node: Node) -> None:
    """Each axis that changes is a sum of elements that are taken; whole copies are views."""
    _refuse(node)
    view = lowering.view(node.inputs[0])
    scales, sizes = (constant(lowering, node, number) for number in (2, 3))
    axes, factors, wanted = _lengths(node, view.shape, scales, sizes)
    changing = [
        (axis, _taps(node, view.shape[axis], length, factor))
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
    source = view.part(sizes, split(view.strides, False))
    target = out.part(sizes, split(out.strides, True))
    compute(lowering, target, [source], (0,))


def _blended(
    lowering: Lowering, node: Node, view: View, axis: int,
    sources: Sequence[tuple[np.ndarray, np.ndarray]], last: bool,
) -> View:  # fmt: skip
    """A weighted sum of elements that are taken from an axis. NotImplementedError: of integers,
    whose sums have fractions."""
    if is_whole(lowering.graph.tensors[node.outputs[0]]):
        raise NotImplementedError(f"between {view.tensor.dtype} numbers lie none: Cast to float32")
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


def _summed_windows(
    node: Node, x: tuple[int, ...], image: Array, block: Array
) -> tuple[Geometry, int]:
    """Where the windows of x [N, C · taps, L] lie, and the channels C. ValueError: they do not
    fit."""
    over = windows(node, ints(image), ints(block))
    taps = math.prod(over.kernel)
    if len(x) != 3 or x[1] % taps or x[2] != math.prod(over.output):
        raise ValueError(
            f"expected [N, C times {taps}, {math.prod(over.output)}] of windows, got {list(x)}"
        )
    return over, x[1] // taps


def _col2im(node: Node, x: Array, image: Array, block: Array) -> Array:
    over, channels = _summed_windows(node, x.shape, image, block)
    windowed = x.reshape(len(x), channels, *over.kernel, *over.output)
    return put_back(over, windowed).astype(x.dtype)


def _image_sizes(node: Node, x: tuple[int, ...], image: Array, block: Array) -> tuple[int, ...]:
    return x[0], _summed_windows(node, x, image, block)[1], *ints(image)


def _lower_col2im(lowering: Lowering, node: Node) -> None:
    """In an image as large as the windows reach, of which the output is a part."""
    x = plain(lowering, lowering.view(node.inputs[0]))
    image, block = (constant(lowering, node, number) for number in (1, 2))
    assert image is not None
    assert block is not None
    over, channels = _summed_windows(node, x.shape, image, block)
    batch, rank = x.shape[0], len(over.size)
    reach = [n + b + a for n, b, a in zip(over.size, over.before, over.after, strict=True)]
    dtype = x.tensor.dtype if is_whole(x.tensor) else "float32"
    whole = lowering.fresh(Tensor(dtype, (batch, channels, *reach)))
    compute(lowering, whole, [lowering.known_view(np.zeros(1, dtype))], (0,))
    strides = strides_of((batch, channels, *over.kernel, *over.output))
    outer, inner = strides[:2], strides[2 + rank :]
    shape = (batch, channels, *over.output)
    steps = whole.strides[2:]
    moved = tuple(s * stride for s, stride in zip(over.stride, steps, strict=True))
    for tap, at in taps_of(over, steps):
        first = sum(t * s for t, s in zip(tap, strides[2:], strict=False))
        part = x.part(shape, (*outer, *inner), first)
        target = whole.part(shape, (*whole.strides[:2], *moved), at)
        compute(lowering, target, [target, part], (0, 1, "add"))
    begin = sum(b * s for b, s in zip(over.before, steps, strict=True))
    settled(lowering, node, whole.part((batch, channels, *over.size), whole.strides, begin))


def _takes_pixels(known: Callable[[str], Array | None], node: Node) -> bool:
    return node.get("mode", "nearest") == "nearest"


def _fills_with_zeros(known: Callable[[str], Array | None], node: Node) -> bool:
    fill = (*node.inputs, "", "")[2]
    if node.get("mode", "constant") != "constant" or not fill:
        return True
    number = known(fill)
    return number is not None and not number.any()


operators.add("Pad", Operator(
    meaning=_pad, numbers_from=1, shape=_padded_shape, lowering=_lower_pad, eight_bits="format",
    eight_bits_if=_fills_with_zeros,
))  # fmt: skip
operators.add("Resize", Operator(
    meaning=_resize, numbers_from=1, shape=_resized_shape, lowering=_lower_resize,
    eight_bits="format", eight_bits_if=_takes_pixels,
))  # fmt: skip
operators.add("Col2Im", Operator(
    meaning=_col2im, numbers_from=1, shape=_image_sizes, lowering=_lower_col2im
))  # fmt: skip
