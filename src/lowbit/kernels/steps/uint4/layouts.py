"""How the steps take their operands: rows of a are queries, rows of b vectors, of values 0 to 15.

The sums are 32-bit integers, which hold `LONGEST` products of such values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lowbit.kernels.steps.registry import Array, Layout
from lowbit.numerics.formats import check_values, int_format
from lowbit.numerics.nibbles import pack_nibbles
from lowbit.numerics.sums import longest_sum
from lowbit.spec import Operation
from lowbit.spec.operations.steps import (
    product_of_columns,
    product_of_packed_rows,
    product_of_rows,
)

LONGEST = longest_sum("uint4", "uint4")
"""The largest K: 2**31 - 1 over 15 * 15."""


def check_operands(a: Array, b: Array) -> None:
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


def _layout(text: str, operation: Operation, arrange: Callable[[Array, Array], Any]) -> Layout:
    def checked(a: Array, b: Array) -> tuple[Array, Array]:
        check_operands(a, b)
        return arrange(a, b)

    return Layout(text, operation, checked, stated=True, columns=len)


COLUMNS = _layout(
    "bytes, a vector to a column",
    product_of_columns,
    lambda a, b: (np.ascontiguousarray(a), np.ascontiguousarray(b.T)),
)
ROWS = _layout(
    "bytes, a vector to a row",
    product_of_rows,
    lambda a, b: (np.ascontiguousarray(a), np.ascontiguousarray(b)),
)
PACKED_ROWS = _layout(
    "two values to a byte, a vector to a row",
    product_of_packed_rows,
    lambda a, b: (pack_nibbles(a), pack_nibbles(b)),
)
