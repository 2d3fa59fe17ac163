"""Elements written by indices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lowbit.graph.graph import Node, Tensor
from lowbit.graph.operator import Array, Operator, given, operators, real

_REDUCE: dict[str, Callable[..., None]] = {
    "add": np.add.at, "mul": np.multiply.at, "max": np.maximum.at, "min": np.minimum.at,
}  # fmt: skip


def reduction_of(node: Node) -> str:
    """The attribute `reduction`. ValueError: it is unknown."""
    reduction = node.get("reduction", "none")
    if reduction != "none" and reduction not in _REDUCE:
        raise ValueError(f"reduction should be one of none, {', '.join(_REDUCE)}; got {reduction}")
    return reduction


class _Scatter(Operator):
    """A copy of x, in which `updates` are written at indices, which may count from the end, or
    with reduction "add", "mul", "max" or "min" reduced with what is there. Of several updates of
    an element without reduction the last stays."""

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        x, indices, updates = given(inputs, 3)
        self.check(node, x.shape, indices.shape, updates.shape)
        made, reduction = x.copy(), reduction_of(node)
        places = self.places(node, x.shape, indices)
        sizes = x.shape if len(places) == x.ndim else x.shape[: len(places)]
        for place, size in zip(places, sizes, strict=True):
            if place.size and not -size <= place.min() <= place.max() < size:
                raise ValueError(f"an index is out of range for an axis of {size}")
        if reduction == "none":
            made[places] = updates
        else:
            with np.errstate(all="ignore"):
                _REDUCE[reduction](made, places, updates)
        return (made,)

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        x, indices, updates = given(tensors, 3)
        self.check(node, x.sizes, indices.sizes, updates.sizes)
        return (Tensor(real(x).name, x.sizes),)

    def check(self, node: Node, x: Sequence[int], indices: Sequence[int], updates: Sequence[int]
              ) -> None:  # fmt: skip
        """ValueError: the shapes do not fit."""
        raise NotImplementedError

    def places(self, node: Node, x: Sequence[int], indices: Array) -> tuple[Array, ...]:
        """An index into x for each update: what NumPy takes."""
        raise NotImplementedError


class ScatterND(_Scatter):
    """indices [*batch, m] into the first m axes; updates [*batch, the other axes]."""

    def check(self, node: Node, x: Sequence[int], indices: Sequence[int], updates: Sequence[int]
              ) -> None:  # fmt: skip
        depth = indices[-1]
        if not 0 < depth <= len(x) or tuple(updates) != (*indices[:-1], *x[depth:]):
            raise ValueError(f"indices {list(indices)} and updates {list(updates)} of {list(x)}")

    def places(self, node: Node, x: Sequence[int], indices: Array) -> tuple[Array, ...]:
        return tuple(np.moveaxis(indices, -1, 0))


class ScatterElements(_Scatter):
    """indices and updates of one shape: each update's own place, but along `axis`."""

    def check(self, node: Node, x: Sequence[int], indices: Sequence[int], updates: Sequence[int]
              ) -> None:  # fmt: skip
        axis = node.get("axis", 0)
        fits = len(x) == len(indices) and tuple(indices) == tuple(updates)
        fits = fits and -len(x) <= axis < len(x)
        larger = [i for i, (n, most) in enumerate(zip(indices, x, strict=False)) if n > most]
        if not fits or set(larger) - {axis % len(x)}:
            raise ValueError(f"indices {list(indices)} and updates {list(updates)} of {list(x)}")

    def places(self, node: Node, x: Sequence[int], indices: Array) -> tuple[Array, ...]:
        every = list(np.ogrid[tuple(slice(n) for n in indices.shape)])
        every[node.get("axis", 0) % len(x)] = indices
        return tuple(np.broadcast_arrays(*every))


operators.add("ScatterND", ScatterND())
operators.add("ScatterElements", ScatterElements())
