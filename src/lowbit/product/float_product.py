"""The product of float matrices, as one record: alpha·A·B + beta·C."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from ml_dtypes import bfloat16

_KINDS = {np.dtype(np.float32): "f32", np.dtype(bfloat16): "bf16"}


class Layout(NamedTuple):
    """What a matrix is, but for its address: its type, shape, strides in bytes."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, matrix: npt.NDArray[Any]) -> Layout:
        return cls(matrix.dtype, matrix.shape, matrix.strides)

    @property
    def T(self) -> Layout:
        """The transposed matrix, which is the same memory."""
        return Layout(self.dtype, self.shape[::-1], self.strides[::-1])

    @property
    def kind(self) -> str:
        """What the kernels call the type: "f32" or "bf16"."""
        return _KINDS[self.dtype]

    @property
    def steps(self) -> tuple[int, int]:
        """Strides in elements, where an axis of at most one element counts as contiguous."""
        pairs = zip(self.strides, self.shape, strict=True)
        rows, columns = (s // self.dtype.itemsize if n > 1 else 1 for s, n in pairs)
        return rows, columns


class FloatProduct(NamedTuple):
    """out = alpha·(a @ b) + beta·c, all sizes at least 1; c None: it is not read.

    The kernels take rows of out and c that are contiguous. isa: the level of instruction sets,
    whose extensions serve too. threads: how many.
    """

    a: Layout
    b: Layout
    c: Layout | None
    out: Layout
    isa: str
    threads: int

    @property
    def m(self) -> int:
        return self.out.shape[0]

    @property
    def n(self) -> int:
        return self.out.shape[1]

    @property
    def k(self) -> int:
        return self.a.shape[1]

    @property
    def kind(self) -> str:
        """Of both operands: "f32" or "bf16"."""
        return self.a.kind

    @property
    def item_bytes(self) -> int:
        """Of an element of both operands."""
        return self.a.dtype.itemsize

    @property
    def right_bytes(self) -> int:
        """Of the right operand."""
        return self.k * self.n * self.item_bytes

    @property
    def a_along(self) -> str:
        """The axis of a with stride 1: "k", "x" for its rows, or "" for neither."""
        return _along(self.a.steps[1], self.a.steps[0], "k")

    @property
    def b_along(self) -> str:
        """The axis of b with stride 1: "x" for its columns, "k", or "" for neither."""
        return _along(self.b.steps[0], self.b.steps[1], "x")


def _along(k_step: int, x_step: int, first: str) -> str:
    """Which axis is contiguous; `first` is asked first."""
    axes = [axis for axis, step in (("k", k_step), ("x", x_step)) if step == 1]
    return first if first in axes else "".join(axes)
