"""What the operators of a graph mean: one class each, in operators/.

Kernels are chosen elsewhere (lowering/); this is the definition that they are held against.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lowbit.graph.graph import Node, Tensor
from lowbit.registry import Registry

Array = npt.NDArray[Any]
T = TypeVar("T")


class Operator(ABC):
    """An operator, by what it computes."""

    @abstractmethod
    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        """The outputs, of real numbers (float32 where inputs are) or of integers and booleans.

        An input that is left out is None. ValueError: the inputs do not fit."""

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        """What the outputs are: from what the inputs are, and from those that are constants.

        As it stands here, by computing on zeros, which suits what is quickly done."""
        arrays = [
            one if one is not None or tensor is None else np.zeros(tensor.sizes, real(tensor))
            for tensor, one in zip(tensors, known, strict=True)
        ]
        made = self.compute(node, *arrays)
        return tuple(Tensor(one.dtype.name, one.shape) for one in made)


def given(inputs: Sequence[T | None], count: int = 1) -> tuple[T, ...]:
    """The first inputs, so many. ValueError: one of them is left out."""
    found = tuple(one for one in inputs[:count] if one is not None)
    if len(found) < count:
        raise ValueError(f"an input is missing: of the first {count}, {len(found)} are there")
    return found


def finite(x: Array) -> Array:
    """x, as it is rounded to 8 bits: infinities become the greatest float32s, NaN the least."""
    most = float(np.finfo(np.float32).max)
    return np.nan_to_num(x, nan=-most, posinf=most, neginf=-most)


def real(tensor: Tensor) -> np.dtype[Any]:
    """The dtype of the numbers that a tensor stands for: float32 where it has a scale."""
    return np.dtype("float32" if tensor.scale is not None else tensor.dtype)


operators: Registry[Operator] = Registry("operator", "lowbit.graph.operators")
