"""What the steps compute: products of bytes and of floats, and that of 4-bit integers on three
layouts of its operands, where a row of a is a query and a vector of b is what it is compared with.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Int8, Int32, UInt4, UInt8

from lowbit.spec.case import Case
from lowbit.spec.dtypes import Array
from lowbit.spec.operations import specified
from lowbit.spec.operations.products import gemm_budget, integer_product

_SIZES = {"M": 5, "K": 70, "N": 131}


@specified(exercise=_SIZES, factors=("a", "b"))
def product_of_columns(
    a: UInt4[np.ndarray, "M K"], b: UInt4[np.ndarray, "K N"]
) -> Int32[np.ndarray, "M N"]:
    """z[m, n] = Σ_k a[m, k] · b[k, n]: a vector is a column of b, as in a matrix product."""
    return integer_product(a, b)


@specified(exercise=_SIZES, factors=("a", "b"))
def product_of_rows(
    a: UInt4[np.ndarray, "M K"], b: UInt4[np.ndarray, "N K"]
) -> Int32[np.ndarray, "M N"]:
    """z[m, n] = Σ_k a[m, k] · b[n, k]: a vector is a row of b, as a search stores it."""
    return integer_product(a, b.T)


@specified(exercise={"M": 5, "P": 35, "N": 131}, operations="4*M*N*P")
def product_of_packed_rows(
    a: UInt8[np.ndarray, "M P"], b: UInt8[np.ndarray, "N P"]
) -> Int32[np.ndarray, "M N"]:
    """z[m, n] = Σ_p low(a[m, p]) · low(b[n, p]) + high(a[m, p]) · high(b[n, p]): two values to a
    byte, the first in the low half. P = ceil(K / 2); beyond an odd K the high half is 0."""
    return integer_product(a & 15, (b & 15).T) + integer_product(a >> 4, (b >> 4).T)


@specified(exercise=_SIZES, factors=("a", "b"))
def product_of_bytes(
    a: UInt8[np.ndarray, "M K"], b: Int8[np.ndarray, "K N"]
) -> Int32[np.ndarray, "M N"]:
    """z[m, n] = Σ_k a[m, k] · b[k, n], exactly."""
    return integer_product(a, b)


def _budget(case: Case, a: Array, b: Array) -> Array:
    return gemm_budget(case, a, b, alpha=1.0, beta=0.0)


@specified(exercise=_SIZES, factors=("a", "b"), accumulator="float32", special=True, budget=_budget)
def product_of_floats(
    a: Float32[np.ndarray, "M K"], b: Float32[np.ndarray, "K N"]
) -> Float32[np.ndarray, "M N"]:
    """z[m, n] = Σ_k a[m, k] · b[k, n], summed in float32 in any order."""
    return a @ b
