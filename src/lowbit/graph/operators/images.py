"""Images made larger: padding and resizing."""

from __future__ import annotations

import numpy as np

from lowbit.graph.graph import Node
from lowbit.graph.operator import Array, operators
from lowbit.graph.operators.shapes import Moving, axes_of, ints

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
    refuse(node)
    axes, factors, wanted = lengths(node, x.shape, scales, sizes)
    for axis, factor, length in zip(axes, factors, wanted, strict=True):
        if length == x.shape[axis] and factor == 1:
            continue
        sources = taps(node, x.shape[axis], length, factor)
        if len(sources) == 1:
            x = np.take(x, sources[0][0], axis)
            continue
        made = np.zeros((), np.float64)
        along = [-1 if i == axis else 1 for i in range(x.ndim)]
        for index, weight in sources:
            made = made + np.take(x, index, axis) * weight.reshape(along)
        x = made.astype(x.dtype)
    return x


def refuse(node: Node) -> None:
    """ValueError: an attribute of Resize is not supported."""
    if node.get("antialias", 0) or node.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise ValueError("Resize with antialias or keep_aspect_ratio_policy is not supported")
    if node.get("exclude_outside", 0):
        raise ValueError("Resize with exclude_outside is not supported")


def lengths(
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
    axes, _, wanted = lengths(node, shape, scales, sizes)
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


def taps(node: Node, length: int, out: int, factor: float) -> list[tuple[Array, Array]]:
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


operators.add("Pad", Moving(_pad, 1, _padded_shape))
operators.add("Resize", Moving(_resize, 1, _resized_shape))
