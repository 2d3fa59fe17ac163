"""The first elements of an axis in order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowbit.graph.graph import Node, Tensor
from lowbit.graph.operator import Array, given, operators, real
from lowbit.graph.operators.shapes import Moving, ints


def order(x: Array, axis: int, descending: bool) -> Array:
    """int64, like x: the places of an axis's elements in order; of equal ones, the lower first.
    NaN is above all numbers, as PyTorch has it."""
    if descending:  # the reverse of the reversed, so that equal ones stay in order
        back = np.flip(np.argsort(np.flip(x, axis), axis, kind="stable"), axis)
        return x.shape[axis] - 1 - back
    return np.argsort(x, axis, kind="stable")


def check(node: Node, shape: Sequence[int], k: Array) -> tuple[int, int]:
    """The axis and how many of it are taken. ValueError: it has not so many."""
    axis, (count, *_) = node.get("axis", -1), ints(k)
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"the axis {axis} does not exist in {len(shape)} dimensions")
    if not 0 <= count <= shape[axis]:
        raise ValueError(f"{count} elements of an axis of {shape[axis]}")
    return axis % len(shape), count


def _first(node: Node, x: Array, k: Array) -> tuple[Array, Array]:
    axis, count = check(node, x.shape, k)
    places = order(x, axis, bool(node.get("largest", 1)))
    places = places.take(np.arange(count), axis).astype(np.int64)
    return np.take_along_axis(x, places, axis), places


class TopK(Moving):
    """The K greatest (largest=0: least) elements of x along `axis`, in order, and their places.

    They are in order whatever `sorted` says, which leaves the order open."""

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        self.check_known(node, tensors, known)
        (x,), (k,) = given(tensors), given(known[1:2])
        axis, count = check(node, x.sizes, k)
        shape = (*x.sizes[:axis], count, *x.sizes[axis + 1 :])
        return Tensor(real(x).name, shape), Tensor("int64", shape)


operators.add("TopK", TopK(_first, 1))
