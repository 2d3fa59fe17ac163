"""Products of matrices, in float64, rounded once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowbit.graph.graph import Node, Tensor
from lowbit.graph.operator import Array, Operator, given, operators, real
from lowbit.graph.operators.post_ops import finished
from lowbit.numerics import quantize_rows

Sizes = tuple[int, ...]


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


class MatMul(Operator):
    """a [..., M, K] @ b [..., K, N], or vectors, as NumPy's."""

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        a, b = given(inputs, 2)
        return (exact(a, b).astype(a.dtype),)

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        a, b = given(tensors, 2)
        return (Tensor(real(a).name, product_shape(a.sizes, b.sizes)),)


class MatMulInteger(Operator):
    """(a - a_zero) @ (b - b_zero) of 8-bit integers, int32. Zero points: one, or one a row of a, a
    column of b."""

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        a, b = given(inputs, 2)
        a_zero, b_zero = (*inputs, None, None)[2:4]
        left, right = a.astype(np.float64), b.astype(np.float64)
        if a_zero is not None:
            left = left - (a_zero if a_zero.ndim != 1 or a_zero.size == 1 else a_zero[:, None])
        if b_zero is not None:
            right = right - b_zero
        return (exact(left, right).astype(np.int32),)

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        a, b = given(tensors, 2)
        return (Tensor("int32", product_shape(a.sizes, b.sizes)),)


class Gemm(Operator):
    """alpha · A @ B + beta · C, with transA and transB; C [M, N] or what broadcasts to it."""

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        a, b = given(inputs, 2)
        (c,) = (*inputs, None)[2:3]
        a, b = a.T if node.get("transA", 0) else a, b.T if node.get("transB", 0) else b
        made = exact(a, b) * float(node.get("alpha", 1.0))
        if c is not None:
            made = made + np.broadcast_to(c, made.shape) * float(node.get("beta", 1.0))
        return (made.astype(a.dtype),)

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        a, b = given(tensors, 2)
        (c,) = (*tensors, None)[2:3]
        left = a.sizes[::-1] if node.get("transA", 0) else a.sizes
        right = b.sizes[::-1] if node.get("transB", 0) else b.sizes
        if len(left) != 2 or len(right) != 2:
            raise ValueError(f"expected two matrices, got shapes {a.sizes} and {b.sizes}")
        shape = product_shape(left, right)
        if c is not None and np.broadcast_shapes(c.sizes, shape) != shape:
            raise ValueError(f"C {c.sizes} does not broadcast to {shape}")
        return (Tensor(real(a).name, shape),)


class Linear(Operator):
    """x [..., K] @ weight [N, K] transposed + bias [N]; residual as the output.

    activations="dynamic": each row of x is rounded to 8 bits first, with a scale and a zero point
    of its own (numerics.quantize_rows); "symmetric": with a scale, and a fixed zero point.
    """

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        x, weight = given(inputs, 2)
        bias, residual = (*inputs, None, None)[2:4]
        made = exact(_rows(node, x), weight.T)
        if bias is not None:
            if bias.shape != weight.shape[:1]:
                raise ValueError(f"bias {bias.shape} does not fit weight {weight.shape}")
            made += bias
        return (finished(node, made, x.dtype, residual),)

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        x, weight = given(tensors, 2)
        if len(weight.sizes) != 2:
            raise ValueError(f"expected a weight [N, K], got {weight.sizes}")
        return (Tensor(real(x).name, product_shape(x.sizes, weight.sizes[::-1])),)


def _rows(node: Node, x: Array) -> Array:
    """x as it enters the product. ValueError: `activations` is unknown."""
    activations = node.get("activations")
    if activations is None:
        return x
    if activations not in ("dynamic", "symmetric"):
        raise ValueError(
            f"activations should be 'dynamic', 'symmetric' or left out, got {activations!r}"
        )
    rows = x.reshape(-1, x.shape[-1]).astype(np.float32)
    q, scale, zero = quantize_rows(rows, symmetric=activations == "symmetric")
    return ((q.astype(np.float64) - zero[:, None]) * scale[:, None]).reshape(x.shape)


class Einsum(Operator):
    """Sums of products as Einstein wrote them; the equation names every axis, without "...\"."""

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        read, made, _ = _labels(node, [one.shape for one in inputs if one is not None])
        arrays = [one for one in inputs if one is not None]
        wide = [one.astype(np.float64) for one in arrays]
        value = np.einsum(f"{','.join(read)}->{made}", *wide, optimize=True)
        return (value.astype(arrays[0].dtype),)

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        given = [one for one in tensors if one is not None]
        _, made, sizes = _labels(node, [one.sizes for one in given])
        return (Tensor(real(given[0]).name, tuple(sizes[label] for label in made)),)


def _labels(node: Node, shapes: Sequence[Sizes]) -> tuple[list[str], str, dict[str, int]]:
    """The axes of the inputs and of the output, and how long they are. ValueError: they do not fit.
    Without an arrow the output has those that occur once, in alphabetical order."""
    equation = node.get("equation").replace(" ", "")
    if "." in equation:
        raise ValueError(f'the equation {equation!r} leaves axes open with "...", which is refused')
    left, arrow, made = equation.partition("->")
    read, sizes = left.split(","), dict[str, int]()
    made = made if arrow else "".join(sorted(x for x in set(left) - {","} if left.count(x) == 1))
    for labels, shape in zip(read, shapes, strict=True):
        for label, size in zip(labels, shape, strict=True):
            if sizes.setdefault(label, size) != size:
                raise ValueError(f"axis {label} of {equation!r} is {sizes[label]} and {size} long")
    return read, made, sizes


class GroupedMatMul(Operator):
    """x [M, K], weight [G, K, N], ends [G]: the rows from ends[g - 1], or 0, to before ends[g] of
    x times weight[g], as an expert of a mixture has them. Rows behind the last end are 0."""

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        x, weight, ends = given(inputs, 3)
        made, first = np.zeros((len(x), weight.shape[2]), x.dtype), 0
        for matrix, end in zip(weight, ends.tolist(), strict=True):
            made[first:end] = exact(x[first:end], matrix)
            first = max(first, end)
        return (made,)

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        x, weight, ends = (one.sizes for one in given(tensors, 3))
        if len(x) != 2 or len(weight) != 3 or weight[1] != x[1] or ends != weight[:1]:
            raise ValueError(f"x {x}, weight {weight} and ends {ends} do not fit")
        return (Tensor("float32", (x[0], weight[2])),)


operators.add("GroupedMatMul", GroupedMatMul())
operators.add("Einsum", Einsum())
operators.add("MatMul", MatMul())
operators.add("MatMulInteger", MatMulInteger())
operators.add("Gemm", Gemm())
operators.add("Linear", Linear())
