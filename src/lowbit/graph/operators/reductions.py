"""Sums, means and greatest elements along axes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lowbit.graph.graph import Node
from lowbit.graph.operator import Array, operators
from lowbit.graph.operators.shapes import Moving, axes_of

Reduce = Callable[[Array, tuple[int, ...]], Array]


def _wide(x: Array) -> Array:
    """In what a sum is computed: float64, or integers as they are."""
    return x if x.dtype.kind in "iu" else x.astype(np.float64)


class Reducing(Moving):
    """A function of numbers and axes that keeps those axes, one long."""

    def __init__(self, reduce: Reduce) -> None:
        super().__init__(self._computed, 1, _reduced_shape)
        self.reduce = reduce

    def _computed(self, node: Node, x: Array, axes: Array | None = None) -> Array:
        found = _axes(node, axes, x.ndim)
        made = np.asarray(self.reduce(x, found)).astype(x.dtype)
        return made if node.get("keepdims", 1) else made.squeeze(found)


def _kept(node: Node, shape: tuple[int, ...], reduced: tuple[int, ...]) -> list[int]:
    """The shape after axes were reduced."""
    if node.get("keepdims", 1):
        return [1 if i in reduced else n for i, n in enumerate(shape)]
    return [n for i, n in enumerate(shape) if i not in reduced]


def _reduced_shape(node: Node, shape: tuple[int, ...], axes: Array | None = None) -> list[int]:
    return _kept(node, shape, _axes(node, axes, len(shape)))


def _extreme_shape(node: Node, shape: tuple[int, ...]) -> list[int]:
    return _kept(node, shape, (node.get("axis", 0) % len(shape),))


def _axes(node: Node, given: Array | None, rank: int) -> tuple[int, ...]:
    """The axes that are reduced: all where none are given, unless an attribute says none."""
    found = axes_of(node, given, rank)
    return found or (() if node.get("noop_with_empty_axes", 0) else tuple(range(rank)))


def _log_sum_exp(x: Array, axes: tuple[int, ...]) -> Array:
    greatest = np.max(_wide(x), axes, keepdims=True)
    with np.errstate(all="ignore"):
        powers = np.exp(_wide(x) - np.where(np.isfinite(greatest), greatest, 0))
        return np.log(powers.sum(axes, keepdims=True)) + greatest


def _cumulative_sum(node: Node, x: Array, axis: Array) -> Array:
    along = axes_of(node, axis, x.ndim)
    assert along is not None
    values = np.flip(_wide(x), along) if node.get("reverse", 0) else _wide(x)
    made = values.cumsum(along[0])
    made = made - values if node.get("exclusive", 0) else made
    return (np.flip(made, along) if node.get("reverse", 0) else made).astype(x.dtype)


def _extreme(find: Callable[..., Array]) -> Callable[..., Array]:
    def computed(node: Node, x: Array) -> Array:
        axis, keep = node.get("axis", 0), bool(node.get("keepdims", 1))
        if not node.get("select_last_index", 0):
            return find(x, axis=axis, keepdims=keep).astype(np.int64)
        return x.shape[axis] - 1 - find(np.flip(x, axis), axis=axis, keepdims=keep).astype(np.int64)

    return computed


_TABLE: dict[str, Reduce] = {
    "ReduceMean": lambda x, axes: _wide(x).mean(axes, keepdims=True),
    "ReduceSum": lambda x, axes: _wide(x).sum(axes, keepdims=True),
    "ReduceProd": lambda x, axes: _wide(x).prod(axes, keepdims=True),
    "ReduceMax": lambda x, axes: x.max(axes, keepdims=True),
    "ReduceMin": lambda x, axes: x.min(axes, keepdims=True),
    "ReduceL1": lambda x, axes: np.abs(_wide(x)).sum(axes, keepdims=True),
    "ReduceL2": lambda x, axes: np.sqrt(np.square(_wide(x)).sum(axes, keepdims=True)),
    "ReduceLogSumExp": _log_sum_exp,
    "ReduceSumSquare": lambda x, axes: np.square(_wide(x)).sum(axes, keepdims=True),
}

for _name, _reduce in _TABLE.items():
    operators.add(_name, Reducing(_reduce))
operators.add("CumSum", Moving(_cumulative_sum, None, lambda node, shape, axis: shape))
operators.add("ArgMax", Moving(_extreme(np.argmax), None, _extreme_shape, "int64"))
operators.add("ArgMin", Moving(_extreme(np.argmin), None, _extreme_shape, "int64"))
