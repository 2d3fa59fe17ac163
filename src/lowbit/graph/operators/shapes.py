"""Operators that move elements, or ask how many there are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from lowbit.graph.graph import Node
from lowbit.graph.lower import Lowering, order_of
from lowbit.graph.lowering.elementwise import compute
from lowbit.graph.lowering.movement import identity, moved
from lowbit.graph.operator import Array, Operator, Sizes, operators
from lowbit.graph.parts import Parts


def ints(array: Array) -> tuple[int, ...]:
    """The numbers of a vector, or the one of a scalar."""
    return tuple(int(one) for one in np.atleast_1d(array))


def axes_of(node: Node, given: Array | None, rank: int) -> tuple[int, ...] | None:
    """The axes of an operator, an input or (before some opset) an attribute, not negative.

    None: none are given. ValueError: one does not exist, or is named twice."""
    axes = node.get("axes") if given is None else ints(given)
    if axes is None:
        return None
    if any(not -rank <= axis < rank for axis in axes):
        raise ValueError(f"the axes {tuple(axes)} do not exist in {rank} dimensions")
    found = tuple(axis % rank for axis in axes)
    if len(set(found)) < len(found):
        raise ValueError(f"an axis is named twice in {tuple(axes)}")
    return found


def _reshape(node: Node, x: Array, shape: Array) -> Array:
    sizes = list(ints(shape))
    if not node.get("allowzero", 0):
        sizes = [x.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
    return x.reshape(sizes)


def _flatten(node: Node, x: Array) -> Array:
    axis = node.get("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(int(np.prod(x.shape[:axis])), -1 if x.size else int(np.prod(x.shape[axis:])))


def _transpose(node: Node, x: Array) -> Array:
    return x.transpose(node.get("perm"))


def _squeeze(node: Node, x: Array, axes: Array | None = None) -> Array:
    return x.squeeze(axes_of(node, axes, x.ndim))


def _unsqueeze(node: Node, x: Array, axes: Array | None = None) -> Array:
    count = len(node.get("axes") if axes is None else ints(axes))
    found = axes_of(node, axes, x.ndim + count)
    assert found is not None
    return np.expand_dims(x, found)


def _split(node: Node, x: Array, sizes: Array | None = None) -> tuple[Array, ...]:
    axis = node.get("axis", 0)
    length, parts = x.shape[axis], node.get("num_outputs", len(node.outputs))
    if sizes is None and node.get("split") is None:
        each = -(-length // parts)
        lengths = [max(0, min(each, length - each * i)) for i in range(parts)]
    else:
        lengths = list(node.get("split") if sizes is None else ints(sizes))
    if sum(lengths) != length or len(lengths) != len(node.outputs):
        raise ValueError(f"parts of {lengths} are not {len(node.outputs)} of an axis of {length}")
    return tuple(np.split(x, np.cumsum(lengths)[:-1], axis))


def _slice(
    node: Node,
    x: Array,
    starts: Array,
    ends: Array,
    axes: Array | None = None,
    steps: Array | None = None,
) -> Array:
    first, last = ints(starts), ints(ends)
    found = axes_of(node, axes, x.ndim) or tuple(range(len(first)))
    strides = ints(steps) if steps is not None else (1,) * len(first)
    cut = [slice(None)] * x.ndim
    for start, end, axis, step in zip(first, last, found, strides, strict=True):
        # An end before the first element, which a slice of Python writes as None.
        stop = None if step < 0 and end < -x.shape[axis] else end
        cut[axis] = slice(start, stop, step)
    return x[tuple(cut)]


def _expand(node: Node, x: Array, shape: Array) -> Array:
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, ints(shape)), subok=True)


def _tile(node: Node, x: Array, repeats: Array) -> Array:
    pairs = list(zip(ints(repeats), x.shape, strict=True))
    split = x.reshape([n for _, size in pairs for n in (1, size)])
    wide = np.broadcast_to(split, [n for pair in pairs for n in pair], subok=True)
    return wide.reshape([times * size for times, size in pairs])


def _tiled(node: Node, x: Sizes, repeats: Array) -> Sizes:
    return tuple(times * size for times, size in zip(ints(repeats), x, strict=True))


def _shape(node: Node, x: Array) -> Array:
    return np.array(x.shape[node.get("start", 0) : node.get("end")], np.int64)


def _size(node: Node, x: Array) -> Array:
    return np.array(x.size, np.int64)


def _constant_of_shape(node: Node, shape: Array) -> Array:
    return np.full(ints(shape), node.get("value", 0.0), node.get("dtype", "float32"))


def _range(node: Node, start: Array, limit: Array, delta: Array) -> Array:
    return np.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)


def _count(node: Node, start: Array, limit: Array, delta: Array) -> Sizes:
    """How many numbers a Range has; of integers without rounding."""
    first, end, step = start.item(), limit.item(), delta.item()
    if isinstance(first, int) and isinstance(end, int) and isinstance(step, int):
        return (max(0, -((first - end) // step)),)
    return (max(0, math.ceil((end - first) / step)),)


def _dropout(node: Node, x: Array, ratio: Any = None, training: Array | None = None) -> Any:
    if training is not None and training.any():
        raise ValueError("Dropout in training mode is not supported: export for inference")
    return x if len(node.outputs) < 2 else (x, np.ones(x.shape, bool))


def _trilu(node: Node, x: Array, k: Array | None = None) -> Array:
    return (np.triu if node.get("upper", 1) else np.tril)(x, 0 if k is None else ints(k)[0])


def _triangle(parts: Parts, node: Node) -> bool:
    x, *given = (name for name in node.inputs if name)
    k = parts.known(given[0]) if given else np.zeros(1)
    if k is None:
        return False
    tensor = parts.tensor(x)
    cut = np.triu if node.get("upper", 1) else np.tril
    inside = cut(np.ones(tensor.sizes[-2:], bool), int(np.ravel(k)[0]))
    zero = np.zeros((), "float32" if tensor.scale is not None else tensor.dtype)
    return parts.end(parts.where(parts.constant(inside), x, parts.constant(zero)))


def _depth_to_space(node: Node, x: Array) -> Array:
    n, channels, high, wide = x.shape
    block = node.get("blocksize")
    if node.get("mode", "DCR") == "DCR":
        parts = x.reshape(n, block, block, channels // block**2, high, wide)
        parts = parts.transpose(0, 3, 4, 1, 5, 2)
    else:
        parts = x.reshape(n, channels // block**2, block, block, high, wide)
        parts = parts.transpose(0, 1, 4, 2, 5, 3)
    return parts.reshape(n, channels // block**2, high * block, wide * block)


def _space_to_depth(node: Node, x: Array) -> Array:
    n, channels, high, wide = x.shape
    block = node.get("blocksize")
    parts = x.reshape(n, channels, high // block, block, wide // block, block)
    moved = parts.transpose(_space_to_depth_order(node))
    return moved.reshape(n, -1, high // block, wide // block)


def _space_to_depth_order(node: Node) -> tuple[int, ...]:
    """Of the axes batch, channel, row, row of a block, column, column of a block."""
    return (0, 1, 3, 5, 2, 4) if node.get("mode", "DCR") == "CRD" else (0, 3, 5, 1, 2, 4)


def _concat(lowering: Lowering, node: Node) -> None:
    """Each input is copied to its place."""
    inputs = [lowering.view(name) for name in node.inputs]
    out = lowering.output(node.outputs[0], order_of(inputs[0]))
    axis = node.get("axis", 0) % len(out.shape)
    first = 0
    for one in inputs:
        compute(lowering, out.along(axis, first, one.shape[axis]), [one], (0,))
        first += one.shape[axis]


def _joined(node: Node, *inputs: Array | None) -> Array:
    return np.concatenate([one for one in inputs if one is not None], node.get("axis"))


def _joined_sizes(node: Node, *inputs: Sizes | None) -> Sizes:
    """ValueError: the inputs differ in more than the axis."""
    given = [one for one in inputs if one is not None]
    axis = node.get("axis") % len(given[0])
    if len({one[:axis] + one[axis + 1 :] for one in given}) > 1:
        raise ValueError(f"only axis {axis} may differ")
    return *given[0][:axis], sum(one[axis] for one in given), *given[0][axis + 1 :]


def _add(name: str, meaning: Callable[..., Any], numbers_from: int | None = None, **traits: Any
         ) -> None:  # fmt: skip
    """Make a movement known: its lowering is its meaning."""
    defaults: dict[str, Any] = {"lowering": moved, "eight_bits": "moved"}
    defaults |= traits
    operators.add(name, Operator(meaning=meaning, numbers_from=numbers_from, **defaults))


def _same_shape(node: Node, same: Callable[[], bool], dtype: Callable[[], str]) -> bool:
    return same()


def _is_in_order(node: Node, same: Callable[[], bool], dtype: Callable[[], str]) -> bool:
    perm = node.get("perm")
    return perm is not None and tuple(perm) == tuple(range(len(perm)))


def _keeps_first(node: Node, rank: int, count: int) -> bool:
    return node.get("perm", ())[:count] == tuple(range(count))


_RESHAPED: dict[str, Any] = {"positions": "reshaped", "idle": _same_shape}

_add("Reshape", _reshape, 1, **_RESHAPED)
_add("Flatten", _flatten, **_RESHAPED)
_add("Squeeze", _squeeze, 1, **_RESHAPED)
_add("Unsqueeze", _unsqueeze, 1, **_RESHAPED)
_add("Transpose", _transpose, positions="kept", positions_if=_keeps_first, idle=_is_in_order)
_add("Split", _split, 1, positions="kept")
_add("Slice", _slice, 1)
_add("Expand", _expand, 1, idle=_same_shape)
_add("Tile", _tile, 1, shape=_tiled, idle=_same_shape)
_add("DepthToSpace", _depth_to_space)
_add("SpaceToDepth", _space_to_depth)
_add("Dropout", _dropout, lowering=identity, eight_bits="", outputs=1,
     idle=lambda node, same, dtype: True)  # fmt: skip
_add("Concat", _joined, shape=_joined_sizes, lowering=_concat, data=None, positions="kept",
     idle=lambda node, same, dtype: len(node.inputs) == 1)  # fmt: skip
operators.add("Trilu", Operator(
    meaning=_trilu, shape=lambda node, shape, k=None: shape, parts=_triangle))  # fmt: skip
# Constants, once sizes are known.
operators.add("Shape", Operator(meaning=_shape, sizes_only=True))
operators.add("Size", Operator(meaning=_size, sizes_only=True))
operators.add("NonZero", Operator(
    meaning=lambda node, x: np.array(np.nonzero(x)), numbers_from=0
))  # fmt: skip
operators.add("Range", Operator(meaning=_range, shape=_count, numbers_from=0))
operators.add("ConstantOfShape", Operator(
    meaning=_constant_of_shape, shape=lambda node, shape: ints(shape), numbers_from=0,
    dtype=lambda node, tensors: node.get("dtype", "float32"),
))  # fmt: skip
