"""What the rungs compute: one product of 4-bit integers, on three layouts of its operands.

A row of a is a query, a row of b a vector; the values are 0 to 15. The sums are 32-bit integers,
which hold `LONGEST` products of such values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32, UInt8
from numpy.typing import NDArray

from lowbit.numerics.formats import check_values, int_format
from lowbit.numerics.nibbles import pack_nibbles
from lowbit.spec import longest_sum
from lowbit.spec.gemm import integer_product
from lowbit.spec.typed import Operation, operation

Bytes = NDArray[np.uint8]

LONGEST = longest_sum("u4", "u4")
"""The largest K: 2**31 - 1 over 15 * 15."""

Queries = UInt8[np.ndarray, "M K"]
Columns = UInt8[np.ndarray, "K N"]
Rows = UInt8[np.ndarray, "N K"]
PackedQueries = UInt8[np.ndarray, "M P"]
PackedRows = UInt8[np.ndarray, "N P"]
Sums = Int32[np.ndarray, "M N"]


@operation(exercise={"M": 256, "K": 256, "N": 16384})
def product_of_columns(a: Queries, b: Columns) -> Sums:
    """z[m, n] = Σ_k a[m, k] · b[k, n]: a vector is a column of b, as in a matrix product."""
    return integer_product(a, b)


@operation(exercise={"M": 256, "K": 256, "N": 16384})
def product_of_rows(a: Queries, b: Rows) -> Sums:
    """z[m, n] = Σ_k a[m, k] · b[n, k]: a vector is a row of b, as a search stores it."""
    return integer_product(a, b.T)


@operation(exercise={"M": 256, "P": 128, "N": 16384})
def product_of_packed_rows(a: PackedQueries, b: PackedRows) -> Sums:
    """z[m, n] = Σ_p low(a[m, p]) · low(b[n, p]) + high(a[m, p]) · high(b[n, p]): two values to a
    byte, the first in the low half. P = ceil(K / 2); beyond an odd K the high half is 0."""
    return integer_product(a & 15, (b & 15).T) + integer_product(a >> 4, (b >> 4).T)


@dataclass(frozen=True)
class Layout:
    """How a rung takes its operands.

    text: in words. operation: what it computes of them. arrange: makes them of a [M, K] and
    b [N, K], both unpacked.
    """

    text: str
    operation: Operation
    arrange: Callable[[Bytes, Bytes], tuple[Bytes, Bytes]]

    def sizes(self, a: Bytes, b: Bytes) -> dict[str, int]:
        """The sizes of the operation on arranged operands."""
        pairs = zip(self.operation.inputs, (a, b), strict=True)
        return {
            name: size for one, x in pairs for name, size in zip(one.dims, x.shape, strict=True)
        }


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
    """Refuse what no rung can multiply.

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
