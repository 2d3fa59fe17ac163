"""How the steps take their operands: rows of a are queries, rows of b vectors, of values 0 to 15.

The sums are 32-bit integers, which hold `LONGEST` products of such values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowbit.numerics.formats import check_values, int_format
from lowbit.numerics.nibbles import pack_nibbles
from lowbit.numerics.sums import longest_sum
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


def _by_columns(a: Bytes, b: Bytes) -> tuple[Bytes, Bytes]:
    return np.ascontiguousarray(a), np.ascontiguousarray(b.T)


def _by_rows(a: Bytes, b: Bytes) -> tuple[Bytes, Bytes]:
    return np.ascontiguousarray(a), np.ascontiguousarray(b)


def _packed(a: Bytes, b: Bytes) -> tuple[Bytes, Bytes]:
    return pack_nibbles(a), pack_nibbles(b)


COLUMNS = Layout("bytes, a vector to a column", product_of_columns, _by_columns)
ROWS = Layout("bytes, a vector to a row", product_of_rows, _by_rows)
PACKED_ROWS = Layout("two values to a byte, a vector to a row", product_of_packed_rows, _packed)


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
