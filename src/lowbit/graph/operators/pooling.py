"""The greatest and the mean of windows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowbit.graph.graph import Node, Tensor
from lowbit.graph.operator import Array, Operator, given, operators, real
from lowbit.graph.operators.windows import divisors, pool_windows, seen_through


class _Pool(Operator):
    """x [N, C, *image] -> [N, C, *out]."""

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        (x,) = given(tensors)
        over = pool_windows(node, x.sizes[2:])
        return (Tensor(real(x).name, (*x.sizes[:2], *over.output)),)


class MaxPool(_Pool):
    """The greatest of each window. ValueError: the indices are asked for."""

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        (x,) = given(inputs)
        if len(node.outputs) > 1 and node.outputs[1]:
            raise ValueError("the second output of MaxPool, indices, is not supported")
        over = pool_windows(node, x.shape[2:])
        least = -np.inf if x.dtype.kind not in "iu" else np.iinfo(x.dtype).min
        view = seen_through(over, x, least)
        return (view.max(axis=tuple(range(x.ndim, view.ndim))),)


class AveragePool(_Pool):
    """The mean of each window: of what lies in the image, with count_include_pad also in `pads`."""

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        (x,) = given(inputs)
        over = pool_windows(node, x.shape[2:])
        view = seen_through(over, x.astype(np.float64), 0)
        total = view.sum(tuple(range(x.ndim, view.ndim)))
        return ((total / divisors(node, over)).astype(x.dtype),)


class _Global(Operator):
    """x [N, C, *image] -> [N, C, 1, ...]."""

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        (x,) = given(tensors)
        return (Tensor(real(x).name, (*x.sizes[:2], *(1,) * (len(x.shape) - 2))),)


class GlobalAveragePool(_Global):
    """The mean of each channel."""

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        (x,) = given(inputs)
        mean = x.mean(axis=tuple(range(2, x.ndim)), keepdims=True, dtype=np.float64)
        return (mean.astype(x.dtype),)


class GlobalMaxPool(_Global):
    """The greatest of each channel."""

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        (x,) = given(inputs)
        return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


operators.add("MaxPool", MaxPool())
operators.add("AveragePool", AveragePool())
operators.add("GlobalAveragePool", GlobalAveragePool())
operators.add("GlobalMaxPool", GlobalMaxPool())
