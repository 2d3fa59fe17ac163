"""Operators that move elements, or ask how many there are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lowbit.graph.graph import Node, Tensor
from lowbit.graph.operator import Array, Operator, given, operators, real

Sizes = tuple[int, ...]
Compute = Any  # (node, *inputs) -> array or tuple of arrays


class Moving(Operator):
    """A function of a node and its inputs.

    From the input `numbers_from` on, the shape depends on the numbers, which have to be known.
    The shape is `shape` of the node, the first input's shape and the other inputs. Without that it
    is found on views that take no room, which serves where the function makes no copy.
    """

    def __init__(
        self,
        function: Compute,
        numbers_from: int | None = None,
        shape: Callable[..., Sequence[int]] | None = None,
        dtype: str | None = None,
    ) -> None:
        self.function = function
        self.numbers_from = numbers_from
        self.shape = shape
        self.dtype = dtype

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        made = self.function(node, *inputs)
        return made if isinstance(made, tuple) else (np.asarray(made),)

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        self.check_known(node, tensors, known)
        x = tensors[0]
        if self.shape is not None and x is not None:
            shape = self.shape(node, x.sizes, *known[1:])
            return (Tensor(self.dtype or real(x).name, tuple(int(size) for size in shape)),)
        arrays = [
            one if one is not None or t is None else np.broadcast_to(np.zeros((), real(t)), t.sizes)
            for t, one in zip(tensors, known, strict=True)
        ]
        made = self.compute(node, *arrays)
        return tuple(Tensor(one.dtype.name, one.shape) for one in made)

    def check_known(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> None:
        """ValueError: the shape depends on numbers that are not known."""
        if self.numbers_from is None:
            return
        for index in range(self.numbers_from, len(tensors)):
            if tensors[index] is not None and known[index] is None:
                raise ValueError(
                    f"its shape depends on the numbers of {node.inputs[index]!r}, which are "
                    "known only when the network runs: that is not supported"
                )


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


def _gather_elements(node: Node, x: Array, indices: Array) -> Array:
    axis = node.get("axis", 0) % x.ndim
    lines = tuple(slice(None) if i == axis else slice(n) for i, n in enumerate(indices.shape))
    return np.take_along_axis(x[lines], indices, axis)


def _expand(node: Node, x: Array, shape: Array) -> Array:
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, ints(shape)))


def _tile(node: Node, x: Array, repeats: Array) -> Array:
    return np.tile(x, ints(repeats))


def _shape(node: Node, x: Array) -> Array:
    return np.array(x.shape[node.get("start", 0) : node.get("end")], np.int64)


def _size(node: Node, x: Array) -> Array:
    return np.array(x.size, np.int64)


def _constant_of_shape(node: Node, shape: Array) -> Array:
    return np.full(ints(shape), node.get("value", 0.0), node.get("dtype", "float32"))


def _range(node: Node, start: Array, limit: Array, delta: Array) -> Array:
    return np.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)


def _dropout(node: Node, x: Array, ratio: Any = None, training: Array | None = None) -> Any:
    if training is not None and training.any():
        raise ValueError("Dropout in training mode is not supported: export for inference")
    return x if len(node.outputs) < 2 else (x, np.ones(x.shape, bool))


def _trilu(node: Node, x: Array, k: Array | None = None) -> Array:
    return (np.triu if node.get("upper", 1) else np.tril)(x, 0 if k is None else ints(k)[0])


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
    moved = parts.transpose(space_to_depth_order(node))
    return moved.reshape(n, -1, high // block, wide // block)


def space_to_depth_order(node: Node) -> tuple[int, ...]:
    """Of the axes batch, channel, row, row of a block, column, column of a block."""
    return (0, 1, 3, 5, 2, 4) if node.get("mode", "DCR") == "CRD" else (0, 3, 5, 1, 2, 4)


class ConstantOfShape(Moving):
    """An array of one number."""

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        self.check_known(node, tensors, known)
        assert known[0] is not None
        return (Tensor(node.get("dtype", "float32"), ints(known[0])),)


class Concat(Operator):
    """Inputs one after another along `axis`."""

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        return (np.concatenate([one for one in inputs if one is not None], node.get("axis")),)

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        given = [one for one in tensors if one is not None]
        first, axis = given[0], node.get("axis") % len(given[0].shape)
        others = {one.sizes[:axis] + one.sizes[axis + 1 :] for one in given}
        if len(others) > 1:
            raise ValueError(f"only axis {axis} may differ")
        length = sum(one.sizes[axis] for one in given)
        shape = (*first.sizes[:axis], length, *first.sizes[axis + 1 :])
        return (Tensor(real(first).name, shape),)


class Gather(Operator):
    """The elements of x at indices of `axis`, which may count from the end."""

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        x, indices = given(inputs, 2)
        axis = node.get("axis", 0)
        least, greatest = (find(indices, initial=0) for find in (np.min, np.max))
        if not -x.shape[axis] <= least <= greatest < max(x.shape[axis], 1):
            raise ValueError(f"indices from {least} to {greatest} of {x.shape[axis]} elements")
        return (np.take(x, indices, axis),)

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        x, indices = given(tensors, 2)
        axis = node.get("axis", 0) % len(x.sizes)
        return (Tensor(real(x).name, x.sizes[:axis] + indices.sizes + x.sizes[axis + 1 :]),)


def flat(indices: Array, sizes: tuple[int, ...]) -> Array:
    """Where indices [..., axes] are in an array of these sizes, in C order, int64; negative ones
    count from the end. ValueError: one is out of range."""
    limits = np.array(sizes, np.int64)
    if np.any((indices < -limits) | (indices >= limits)):
        raise ValueError(f"an index is out of range for axes of {list(sizes)}")
    steps = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    places = np.where(indices < 0, indices + limits, indices) * np.array(steps, np.int64)
    return places.sum(-1, dtype=np.int64)


class GatherND(Operator):
    """x at indices [..., axes]: the last dimension of the indices counts the axes of x that they
    are of, behind `batch_dims` axes which both have."""

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        x, indices = given(inputs, 2)
        shape, own, axes = self._shape(node, x.shape, indices.shape)
        outer = math.prod(x.shape[:own])
        table = x.reshape(outer, math.prod(x.shape[own : own + axes]), *x.shape[own + axes :])
        places = flat(indices, x.shape[own : own + axes]).reshape(outer, -1 if outer else 0)
        return (table[np.arange(outer)[:, None], places].reshape(shape),)

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        x, indices = given(tensors, 2)
        return (Tensor(real(x).name, self._shape(node, x.sizes, indices.sizes)[0]),)

    def _shape(self, node: Node, x: Sizes, indices: Sizes) -> tuple[Sizes, int, int]:
        """The output's shape, the axes of the batch, and how many numbers are an index."""
        own, axes = node.get("batch_dims", 0), indices[-1] if indices else 0
        if not 0 <= own < len(indices) or x[:own] != indices[:own] or own + axes > len(x):
            raise ValueError(
                f"indices of shape {list(indices)}, with {own} axes of a batch, do not name "
                f"elements of an array of shape {list(x)}"
            )
        return (*indices[:-1], *x[own + axes :]), own, axes


_FIXED: dict[str, Compute] = {
    "Flatten": _flatten,
    "Transpose": _transpose,
    "GatherElements": _gather_elements,
    "Shape": _shape,
    "Size": _size,
    "Dropout": _dropout,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
}
_BY_NUMBERS: dict[str, tuple[Compute, int]] = {
    "Reshape": (_reshape, 1),
    "Squeeze": (_squeeze, 1),
    "Unsqueeze": (_unsqueeze, 1),
    "Split": (_split, 1),
    "Slice": (_slice, 1),
    "Expand": (_expand, 1),
    "Range": (_range, 0),
    "NonZero": (lambda node, x: np.array(np.nonzero(x)), 0),
}

for _name, _function in _FIXED.items():
    operators.add(_name, Moving(_function))
for _name, (_function, _first) in _BY_NUMBERS.items():
    operators.add(_name, Moving(_function, _first))
operators.add("Trilu", Moving(_trilu, None, lambda node, shape, *k: shape))
operators.add("Tile", Moving(_tile, 1, lambda node, shape, times: ints(np.multiply(shape, times))))
operators.add("ConstantOfShape", ConstantOfShape(_constant_of_shape, 0))
operators.add("Concat", Concat())
operators.add("Gather", Gather())
operators.add("GatherND", GatherND())
