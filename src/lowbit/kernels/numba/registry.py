"""Where the steps make themselves known, and how they take their operands: rows of a are queries,
rows of b vectors, of values 0 to 15.

The sums are 32-bit integers, which hold `LONGEST` products of such values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowbit.numerics.formats import check_values, int_format
from lowbit.numerics.nibbles import pack_nibbles
from lowbit.numerics.sums import longest_sum
from lowbit.registry import Registry
from lowbit.spec import Operation
from lowbit.spec.operations.uint4_steps import (
    product_of_columns,
    product_of_packed_rows,
    product_of_rows,
)

Bytes = NDArray[np.uint8]

LONGEST = longest_sum("uint4", "uint4")
"""The largest K: 2**31 - 1 over 15 * 15."""


@dataclass(frozen=True)
class Layout:
    """How a step takes its operands.

    text: in words. operation: what it computes of them. arrange: makes them of a [M, K] and
    b [N, K], both unpacked.
    """

    text: str
    operation: Operation
    arrange: Callable[[Bytes, Bytes], tuple[Bytes, Bytes]]


COLUMNS = Layout(
    "bytes, a vector to a column",
    product_of_columns,
    lambda a, b: (np.ascontiguousarray(a), np.ascontiguousarray(b.T)),
)
ROWS = Layout(
    "bytes, a vector to a row",
    product_of_rows,
    lambda a, b: (np.ascontiguousarray(a), np.ascontiguousarray(b)),
)
PACKED_ROWS = Layout(
    "two values to a byte, a vector to a row",
    product_of_packed_rows,
    lambda a, b: (pack_nibbles(a), pack_nibbles(b)),
)


def check_operands(a: Bytes, b: Bytes) -> None:
    """Refuse what no step can multiply.

    a: uint8 [M, K], b: uint8 [N, K], of values 0 to 15. TypeError: another dtype. ValueError:
    not two-dimensional, nothing in it, rows of different lengths, a K whose sums could overflow,
    or a value above 15, naming the first.
    """
    for name, array, form in (("a", a, "[M, K]"), ("b", b, "[N, K]")):
        if array.dtype != np.uint8:
            raise TypeError(f"{name} is of {array.dtype}; give uint4 values 0 to 15 as uint8")
        if array.ndim != 2 or array.size == 0:
            raise ValueError(
                f"{name} has the shape {array.shape}; expected {form} with nothing below 1"
            )
    if a.shape[1] != b.shape[1]:
        raise ValueError(
            f"a {a.shape} and b {b.shape} have rows of different lengths; both are queries or "
            "vectors of K values, so give b as [N, K]"
        )
    if a.shape[1] > LONGEST:
        raise ValueError(
            f"K is {a.shape[1]}; 32-bit sums hold {LONGEST} products of uint4, so split K"
        )
    for name, array in (("a", a), ("b", b)):
        check_values(array, int_format("uint4"), name)


Kernel = Callable[[Bytes, Bytes, NDArray[np.int32]], None]


@dataclass(frozen=True)
class Uint4Step:
    """A kernel of the ladder.

    step: its place, from 1. kernel: a function under numba.njit of a, b and out: int32 [M, N],
    which it fills. layout: how it takes a and b.
    """

    name: str
    step: int
    kernel: Kernel
    layout: Layout

    @property
    def idea(self) -> str:
        """The first line of the kernel's docstring, without its full stop."""
        return (inspect.getdoc(self.kernel) or "").partition("\n")[0].rstrip(".")

    def prepare(self, a: Bytes, b: Bytes) -> Callable[[], NDArray[np.int32]]:
        """The product as a call: arranges the operands now, compiles when first called.

        a: uint8 [M, K], b: uint8 [N, K], of values 0 to 15. The call returns a new int32 [M, N].
        TypeError or ValueError as `check_operands`.
        """
        check_operands(a, b)
        return partial(_multiply, self.kernel, *self.layout.arrange(a, b), (len(a), len(b)))


def _multiply(kernel: Kernel, a: Bytes, b: Bytes, shape: tuple[int, int]) -> NDArray[np.int32]:
    out = np.empty(shape, np.int32)
    kernel(a, b, out)
    return out


_steps: Registry[Uint4Step] = Registry("step of uint4 products", "lowbit.kernels.numba")


def uint4_step(step: int, layout: Layout) -> Callable[[Any], Any]:
    """Register a function under numba.njit as a step.

    ValueError if the step is taken by another one.
    """

    def register(kernel: Any) -> Any:
        _steps.add(str(step), Uint4Step(kernel.__name__, step, kernel, layout))
        return kernel

    return register


def uint4_steps() -> tuple[Uint4Step, ...]:
    """All steps from the lowest. ModuleNotFoundError if Numba or jaxtyping is not installed."""
    return tuple(sorted(_steps, key=lambda one: one.step))
