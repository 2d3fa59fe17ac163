"""Products of integers that stand for themselves, which wrap, and what all products share."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lowbit.graph.graph import Node
from lowbit.graph.lowering.elementwise import is_whole
from lowbit.graph.operator import Array, Sizes
from lowbit.graph.parts import Parts

_MOST_PRODUCTS = 1 << 24  # of integers, which are written to memory


def product_shape(a: Sizes, b: Sizes) -> Sizes:
    """The shape of a @ b. ValueError: they do not fit."""
    if not a or not b or a[-1] != b[max(len(b) - 2, 0)]:
        raise ValueError(f"{a} @ {b}: the sizes that are summed over differ")
    rows, columns = a[-2:-1], b[-1:] if len(b) > 1 else ()
    return (*np.broadcast_shapes(a[:-2], b[:-2]), *rows, *columns)


def exact(a: Array, b: Array) -> Array:
    """a @ b in float64."""
    product_shape(a.shape, b.shape)
    # In order: of other strides NumPy multiplies some stacks without a library.
    return np.matmul(np.ascontiguousarray(a, np.float64), np.ascontiguousarray(b, np.float64))


def wrapping_product(a: Array, b: Array) -> Array:
    """a @ b in float64, or of integers as integers, which wrap."""
    if a.dtype.kind not in "iu":
        return exact(a, b)
    product_shape(a.shape, b.shape)
    return np.asarray(np.matmul(a, b))


def integers_in_parts(parts: Parts, node: Node) -> bool:
    """Of integers that stand for themselves all products, and their sums. NotImplementedError: they
    would need too much memory."""
    a, b = node.inputs[:2]
    left, right = parts.tensor(a), parts.tensor(b)
    if not (is_whole(left) and is_whole(right)):
        return False
    shape = product_shape(left.sizes, right.sizes)
    k = left.sizes[-1]
    if math.prod(shape) * k > _MOST_PRODUCTS:
        raise NotImplementedError(
            f"MatMul {node.name!r}: a product of integers, {list(left.sizes)} times "
            f"{list(right.sizes)}, has more than {_MOST_PRODUCTS} multiplications: Cast to float32 "
            "before, if the numbers are small enough"
        )
    rows = parts.shaped(a, (*left.sizes[:-1], 1, k))  # [..., M, 1, K]
    columns = b
    if len(right.sizes) > 1:
        order = (*range(len(right.sizes) - 2), len(right.sizes) - 1, len(right.sizes) - 2)
        turned = parts.transpose(b, order)
        columns = parts.shaped(turned, (*right.sizes[:-2], 1, right.sizes[-1], k))
    products = parts.mul(rows, columns)  # [..., M, N, K]
    return parts.end(parts.shaped(parts.reduce("sum", products, [-1]), shape))


def integer_linear_in_parts(parts: Parts, node: Node) -> bool:
    """Of integers that stand for themselves as other products of them."""
    x, weight, bias = (*node.inputs, "")[:3]
    if not (is_whole(parts.tensor(x)) and is_whole(parts.tensor(weight))):
        return False
    made = parts.matmul(x, parts.transpose(weight, (1, 0)))
    return parts.end(parts.add(made, bias) if bias else made)


def factor_of(node: Node, name: str, dtype: np.dtype[Any]) -> Array:
    """A factor of integers of this dtype, or in float64. ValueError: of integers it has a
    fraction."""
    value = float(node.get(name, 1.0))
    if dtype.kind not in "iu":
        return np.array(value)
    if not value.is_integer():
        raise ValueError(f"{name} of a product of integers is {value}, and has a fraction")
    return np.array(int(value)).astype(dtype)
