"""Products of matrices, in float64, rounded once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from operator import mul
from typing import Any

import numpy as np

from lowbit.graph.graph import Constant, Node, Tensor
from lowbit.graph.lower import Lowering, is_dense
from lowbit.graph.lowering.elementwise import (
    broadcast,
    compute,
    converted,
    in_format,
    index_format,
    is_whole,
    plain,
)
from lowbit.graph.lowering.movement import settled
from lowbit.graph.lowering.products import (
    SHORT,
    Epilogue,
    as_float32,
    finished,
    float_products,
    floats,
    gemm,
    is_short,
    launch,
    row_parameters,
    weight_of,
)
from lowbit.graph.operator import Array, Operator, Sizes, Weight, operators
from lowbit.graph.operators.integer_products import (
    exact,
    factor_of,
    integer_linear_in_parts,
    integers_in_parts,
    product_shape,
    wrapping_product,
)
from lowbit.graph.parts import Parts
from lowbit.graph.step import Place, View
from lowbit.kernels.cpu.tensors.grouped import grouped_product
from lowbit.numerics import QTensor, quantize_rows
from lowbit.numerics.float32 import moderate
from lowbit.product import requests
from lowbit.weights.panels import PackedMatrix, group_refusal, pack, padded


def _matmul(node: Node, a: Array, b: Array) -> Array:
    return wrapping_product(a, b).astype(a.dtype)


def _matmul_integer(
    node: Node, a: Array, b: Array, a_zero: Array | None = None, b_zero: Array | None = None
) -> Array:
    """(a - a_zero) @ (b - b_zero) of 8-bit integers, int32. Zero points: one, or one a row of a, a
    column of b."""
    left, right = a.astype(np.float64), b.astype(np.float64)
    if a_zero is not None:
        left = left - (a_zero if a_zero.ndim != 1 or a_zero.size == 1 else a_zero[:, None])
    if b_zero is not None:
        right = right - b_zero
    return exact(left, right).astype(np.int32)


def _gemm(node: Node, a: Array, b: Array, c: Array | None = None) -> Array:
    """alpha · A @ B + beta · C, with transA and transB; C [M, N] or what broadcasts to it."""
    a, b = a.T if node.get("transA", 0) else a, b.T if node.get("transB", 0) else b
    alpha, beta = (factor_of(node, name, a.dtype) for name in ("alpha", "beta"))
    made = wrapping_product(a, b) * alpha
    if c is not None:
        made = made + np.broadcast_to(c, made.shape) * beta
    return made.astype(a.dtype)


def _gemm_sizes(node: Node, a: Sizes, b: Sizes, c: Sizes | None = None) -> Sizes:
    if len(a) != 2 or len(b) != 2:
        raise ValueError(f"expected two matrices, got shapes {a} and {b}")
    left, right = a[::-1] if node.get("transA", 0) else a, b[::-1] if node.get("transB", 0) else b
    shape = product_shape(left, right)
    if c is not None and np.broadcast_shapes(c, shape) != shape:
        raise ValueError(f"C {c} does not broadcast to {shape}")
    return shape


def _linear(
    node: Node, x: Array, weight: Array, bias: Array | None = None, residual: Array | None = None
) -> Array:
    """x [..., K] @ weight [N, K] transposed + bias [N]; residual as the output.

    activations="dynamic": each row of x is rounded to 8 bits first, with a scale and a zero point
    of its own (numerics.quantize_rows); "symmetric": with a scale, and a fixed zero point;
    "grouped": with a scale for each `group_size` of K; "float": not at all, as without, but weights
    with groups stay in their panels. alpha: what the product is multiplied by before the bias is
    added, 1 if left out; of weights of floats.
    """
    made, alpha = wrapping_product(_rows(node, x), weight.T), node.get("alpha", 1.0)
    if alpha != 1:
        made = made * alpha
    if bias is not None:
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias {bias.shape} does not fit weight {weight.shape}")
        made += bias
    return finished(node, made, x.dtype, residual)


def _linear_sizes(
    node: Node, x: Sizes, weight: Sizes, bias: Sizes | None = None, residual: Sizes | None = None
) -> Sizes:
    if len(weight) != 2:
        raise ValueError(f"expected a weight [N, K], got {weight}")
    return product_shape(x, weight[::-1])


def _rows(node: Node, x: Array) -> Array:
    """x as it enters the product. ValueError: `activations` is unknown."""
    activations = node.get("activations")
    if activations in (None, "float"):
        return x
    if activations == "grouped":
        parts = x.reshape(-1, x.shape[-1]).astype(np.float64)
        starts = np.arange(0, x.shape[-1], node.get("group_size"))
        unit = np.maximum.reduceat(np.abs(parts), starts, axis=1) / 127
        unit = np.repeat(np.where(unit == 0, 1, unit), node.get("group_size"), 1)[:, : x.shape[-1]]
        return (np.rint(parts / unit) * unit).reshape(x.shape)
    if activations not in ("dynamic", "symmetric"):
        raise ValueError(
            "activations should be 'dynamic', 'symmetric', 'grouped', 'float' or left out, got "
            f"{activations!r}"
        )
    rows = x.reshape(-1, x.shape[-1]).astype(np.float32)
    q, scale, zero = quantize_rows(rows, symmetric=activations == "symmetric")
    return ((q.astype(np.float64) - zero[:, None]) * scale[:, None]).reshape(x.shape)


def _einsum(node: Node, *arrays: Array) -> Array:
    """Sums of products as Einstein wrote them; the equation names every axis, without "...\"."""
    read, made, _ = _labels(node, [one.shape for one in arrays])
    wide = arrays
    if arrays[0].dtype.kind not in "iu":
        wide = tuple(array.astype(np.float64) for array in arrays)
    value = np.einsum(f"{','.join(read)}->{made}", *wide, optimize=True)
    return value.astype(arrays[0].dtype)


def _einsum_sizes(node: Node, *shapes: Sizes) -> Sizes:
    _, made, sizes = _labels(node, shapes)
    return tuple(sizes[label] for label in made)


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


def _grouped(node: Node, x: Array, weight: Array, ends: Array) -> Array:
    """x [M, K], weight [G, K, N], ends [G]: the rows from ends[g - 1], or 0, to before ends[g] of
    x times weight[g], as an expert of a mixture has them. Rows behind the last end are 0."""
    made, first = np.zeros((len(x), weight.shape[2]), x.dtype), 0
    for matrix, end in zip(weight, ends.tolist(), strict=True):
        made[first:end] = exact(x[first:end], matrix)
        first = max(first, end)
    return made


def _grouped_sizes(node: Node, x: Sizes, weight: Sizes, ends: Sizes) -> Sizes:
    if len(x) != 2 or len(weight) != 3 or weight[1] != x[1] or ends != weight[:1]:
        raise ValueError(f"x {x}, weight {weight} and ends {ends} do not fit")
    return x[0], weight[2]


def _routed(node: Node, x: Array, weight: Array, ends: Array) -> Array:
    """GroupedMatMul with weights as Linear has them, [G · N, K], and `activations` as there; or
    with its own, [G, K, N]."""
    if weight.ndim == 3:
        return _grouped(node, x, weight, ends)
    matrices = weight.reshape(len(ends), -1, weight.shape[1]).swapaxes(1, 2)
    return _grouped(node, _rows(node, x), matrices, ends)


def _routed_sizes(node: Node, x: Sizes, weight: Sizes, ends: Sizes) -> Sizes:
    if len(weight) == 3:
        return _grouped_sizes(node, x, weight, ends)
    if len(x) != 2 or len(weight) != 2 or weight[1] != x[1] or weight[0] % ends[0]:
        raise ValueError(f"x {x}, weight {weight} and ends {ends} do not fit")
    return x[0], weight[0] // ends[0]


def _pack_linear(weight: QTensor) -> PackedMatrix:
    return pack(weight.T)


def _lower_linear(lowering: Lowering, node: Node) -> None:
    """x [..., K] times weight [N, K]."""
    weight = lowering.graph.constants.get(node.inputs[1])
    x = lowering.view(node.inputs[0])
    activations = node.get("activations")
    dynamic = activations is not None
    quantized = dynamic or x.tensor.scale is not None
    if isinstance(weight, PackedMatrix) and dynamic:
        packed = weight
    elif isinstance(weight, QTensor) and quantized and _in_panels(weight, dynamic):
        packed = lowering.packed(weight, _pack_linear)
    else:
        _float_linear(lowering, node)
        return
    panels = requests.panel_format(packed, lowering.isa.name)
    if dynamic:
        x = converted(lowering, x, Tensor("float32", x.shape))
    x = plain(lowering, x)
    m, k = math.prod(x.shape[:-1]), x.shape[-1]
    dtype = np.dtype(x.tensor.dtype)
    left = (m, k), (k * dtype.itemsize, dtype.itemsize), dtype
    isa, threads = lowering.isa.name, lowering.threads
    epilogue = Epilogue(lowering, node, None)
    rows: tuple[Place | None, Place | None] = None, None
    if dynamic:
        prepared, spec = requests.floats(left, panels, threads, isa, activations, 0, *epilogue.spec)
    else:
        shifted = x.tensor.zero_point != 0
        prepared, spec = requests.scaled(left, panels, threads, isa, shifted, True,
                                         moderate(x.tensor.scale), 0, *epilogue.spec)  # fmt: skip
        rows = row_parameters(lowering, x.tensor)
    bias = None if epilogue.bias is None else padded(epilogue.bias)
    epilogue.launch(prepared, packed, x, rows, bias, spec)


def _in_panels(weight: QTensor, dynamic: bool) -> bool:
    """Whether panels hold a weight [N, K], and products of such rows take them."""
    if weight.group_size is None:
        return weight.axis in (None, 0)
    along = weight.axis == 0 and weight.group_axis == 1
    short = weight.group_size < weight.shape[1]
    return dynamic and along and not (short and group_refusal(weight.group_size))


def _columns(constant: Constant) -> np.ndarray:
    """Of [N, K], as [K, N]: floats of 16 bits as they are, others as float32. What lies by columns
    is no copy, so that all that read the constant share it."""
    if isinstance(constant, np.ndarray) and is_short(constant.dtype.name, len(constant)):
        return np.ascontiguousarray(constant.T)
    return np.ascontiguousarray(floats(constant).T)


def _float_linear(lowering: Lowering, node: Node) -> None:
    """x [..., K] times weight [N, K], which may be of integers that stand for floats."""
    x = as_float32(lowering, lowering.view(node.inputs[0]))
    weight = lowering.packed(weight_of(lowering, node), _columns)
    m, (k, n) = math.prod(x.shape[:-1]), weight.shape
    rows = x.part((m, k), (k, 1))
    float_products(lowering, node, None, [(rows, weight, 0, n)], node.get("alpha", 1.0))


def _lower_matmul(lowering: Lowering, node: Node) -> None:
    """Matrices of float32 that are no weights, one after another."""
    a, b = (
        in_format(lowering, view, Tensor("float32", view.shape))
        for view in map(lowering.view, node.inputs)
    )
    tensor = lowering.graph.tensors[node.outputs[0]]
    out = lowering.output(node.outputs[0])
    target = out
    if tensor.dtype != "float32":
        target = lowering.fresh(replace(tensor, dtype="float32", scale=None, zero_point=0))
    whole = target
    if len(a.shape) == 1:
        a, target = _wider(a, 0), _wider(target, max(len(target.shape) - 1, 0))
    if len(b.shape) == 1:
        b, target = _wider(b, 1), _wider(target, len(target.shape))
    leading = target.shape[:-2]
    left = broadcast(a, (*leading, *a.shape[-2:]))
    right = broadcast(b, (*leading, *b.shape[-2:]))
    for index in product(*map(range, leading)):
        left_part, right_part, out_part = (
            one.part(one.shape[-2:], one.strides[-2:], sum(map(mul, index, steps)))
            for one, steps in ((a, left), (b, right), (target, target.strides))
        )
        gemm(lowering, left_part, right_part, out_part)
    if whole is not out:
        compute(lowering, out, [whole], (0,))


def _wider(view: View, axis: int) -> View:
    """With one more axis, of one element."""
    shape, strides = list(view.shape), list(view.strides)
    shape.insert(axis, 1)
    strides.insert(axis, 1)
    return view.part(shape, strides)


def _lower_grouped(lowering: Lowering, node: Node) -> None:
    x, weight, ends = (lowering.view(name) for name in node.inputs)
    x = as_float32(lowering, x)
    kind = SHORT.get(weight.tensor.dtype, "f32")
    if kind == "f32" or not is_dense(weight):
        kind, weight = "f32", as_float32(lowering, weight)
    ends = plain(lowering, ends)
    groups, depth, n = weight.shape
    out = lowering.fresh(Tensor("float32", (x.shape[0], n)))
    program = grouped_product.program(
        lowering.isa, indices=index_format(ends, "ends"), weight_kind=kind
    )
    lowering.add(program, {
        "out": out.place, "x": x.place, "weight": weight.place, "ends": ends.place,
        "rows": x.shape[0], "groups": groups, "k_size": depth, "n": n,
    })  # fmt: skip
    settled(lowering, node, out)


def _matrices(constant: Constant, groups: int) -> np.ndarray:
    """Of [G · N, K], as [G, K, N]."""
    weight = floats(constant)
    return np.ascontiguousarray(weight.reshape(groups, -1, weight.shape[1]).swapaxes(1, 2))


def _lower_routed(lowering: Lowering, node: Node) -> None:
    constant = weight_of(lowering, node)
    if isinstance(constant, np.ndarray) and constant.ndim == 3:
        _lower_grouped(lowering, node)
        return
    x, ends = (plain(lowering, lowering.view(node.inputs[i])) for i in (0, 2))
    x = converted(lowering, x, Tensor("float32", x.shape))
    weight, groups, (rows, depth) = weight_of(lowering, node), ends.shape[0], x.shape
    out = lowering.output(node.outputs[0])
    if not isinstance(weight, PackedMatrix) or not node.get("activations"):
        matrices = lowering.packed(weight, _matrices, groups=groups)
        program = grouped_product.program(lowering.isa, indices="s64", weight_kind="f32")
        lowering.add(program, {
            "out": out.place, "x": x.place, "weight": lowering.known(matrices),
            "ends": ends.place, "rows": rows, "groups": groups, "k_size": depth,
            "n": matrices.shape[2],
        })  # fmt: skip
        return
    panels = requests.panel_format(weight, lowering.isa.name)._replace(split=None)
    prepared = requests.routed(rows, panels, groups, lowering.threads, lowering.isa.name,
                               node.get("activations"))  # fmt: skip
    launch(lowering, prepared, {
        **prepared.weight(weight), "a": x.place, "ends": ends.place, "out": out.place
    })  # fmt: skip


def _gemm_in_parts(parts: Parts, node: Node) -> bool:
    a, b, c = (*node.inputs, "")[:3]
    a, b = (
        parts.transpose(name, (1, 0), like=parts.tensor(name)) if node.get(turned) else name
        for name, turned in ((a, "transA"), (b, "transB"))
    )
    tensor = parts.tensor(node.inputs[0])
    dtype = np.dtype(tensor.dtype if is_whole(tensor) else "float32")
    made = parts.matmul(a, b)
    if node.get("alpha", 1.0) != 1:
        made = parts.mul(made, parts.constant(factor_of(node, "alpha", dtype).astype(dtype)))
    if not c:
        return parts.end(made)
    if node.get("beta", 1.0) != 1:
        c = parts.mul(c, parts.constant(factor_of(node, "beta", dtype).astype(dtype)))
    return parts.end(parts.add(made, c))


def _einsum_in_parts(parts: Parts, node: Node) -> bool:
    """Of two operands with sums over what both have: a product of matrices."""
    left, _, made = node.get("equation").replace(" ", "").partition("->")
    read = left.split(",")
    if not made or len(read) != 2 or any(len(set(one)) < len(one) for one in (*read, made)):
        return False
    a, b = read
    batch = [x for x in made if x in a and x in b]
    summed = [x for x in a if x in b and x not in made]
    rows, columns = ([x for x in made if x in one and x not in batch] for one in (a, b))
    if (
        len(batch) + len(summed) + len(rows) != len(a)
        or len(columns) + len(batch) != len(made) - (len(rows))
        or len(batch) + len(summed) + len(columns) != len(b)
    ):
        return False
    sizes: dict[str, int] = {}
    matrices = []
    for name, labels, order, tail in (
        (node.inputs[0], a, [batch, rows, summed], (rows, summed)),
        (node.inputs[1], b, [batch, summed, columns], (summed, columns)),
    ):
        tensor = parts.tensor(name)
        sizes |= dict(zip(labels, tensor.sizes, strict=True))
        perm = tuple(labels.index(x) for group in order for x in group)
        moved = parts.transpose(name, perm, like=tensor)
        shape = [sizes[x] for x in batch]
        shape += [int(np.prod([sizes[x] for x in group])) for group in tail]
        matrices.append(parts.shaped(moved, shape, tensor))
    ordered = [*batch, *rows, *columns]
    shaped = parts.shaped(parts.matmul(*matrices), [sizes[x] for x in ordered])
    return parts.end(parts.transpose(shaped, [ordered.index(x) for x in made]))


def _mixes_last(node: Node, rank: int, count: int) -> bool:
    return rank > count


def _each_sum(node: Node, x: Sizes, *others: Sizes) -> int:
    return math.prod(others[-1]) * x[-1]


_TWO: dict[str, Any] = {"stays": "both of its operands are activations"}

operators.add("Linear", Operator(
    meaning=_linear, shape=_linear_sizes, lowering=_lower_linear,
    parts=integer_linear_in_parts, onnx=False, aten=("linear",),
    weight=Weight(0, -1, ("int8", "dynamic", "int4"), lambda node, x, weight: x),
    positions="kept", positions_if=_mixes_last, multiply_adds=_each_sum,
))  # fmt: skip
operators.add("MatMul", Operator(
    meaning=_matmul, shape=lambda node, a, b: product_shape(a, b), lowering=_lower_matmul,
    parts=integers_in_parts, aten=("matmul", "mm", "bmm", "mv", "dot"),
    positions="kept", positions_if=_mixes_last, multiply_adds=_each_sum, **_TWO,
))  # fmt: skip
operators.add("Gemm", Operator(
    meaning=_gemm, shape=_gemm_sizes, parts=_gemm_in_parts,
    multiply_adds=lambda node, a, *others: _each_sum(
        node, a[::-1] if node.get("transA", 0) else a, *others
    ), **_TWO,
))  # fmt: skip
operators.add("Einsum", Operator(
    meaning=_einsum, shape=_einsum_sizes, parts=_einsum_in_parts
))  # fmt: skip
operators.add("GroupedMatMul", Operator(
    meaning=_grouped, shape=_grouped_sizes, dtype="float32", lowering=_lower_grouped, onnx=False,
    aten=("transformers::grouped_mm_fallback",),  # of float32; PyTorch's is of bfloat16 there
    stays="products of groups of rows have kernels of float32 only",
))  # fmt: skip
operators.add("RoutedLinear", Operator(
    meaning=_routed, shape=_routed_sizes, dtype="float32", lowering=_lower_routed, onnx=False,
    stays="its weights are quantized where it is made",
))  # fmt: skip
# An importer makes a quantized Linear of it.
operators.add("MatMulInteger", Operator(
    meaning=_matmul_integer, shape=lambda node, a, b, *zeros: product_shape(a, b), dtype="int32"
))  # fmt: skip
