"""What products have in common: launches, post-operations and their operands.

`post_ops`, an attribute of products with weights, is what follows in the same node: a tuple of
steps, each a tuple of a name and numbers, done in order on the product with its bias: ("relu",),
("clamp", 0.0, 6.0), ("residual",), which adds the node's fourth input, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lowbit.graph.expression import POST_OPS
from lowbit.graph.graph import Constant, Node, Tensor, numbers
from lowbit.graph.lower import Lowering
from lowbit.graph.lowering.elementwise import compute, converted, plain
from lowbit.graph.operator import Array
from lowbit.graph.step import Place, View
from lowbit.kernels.cpu.shared.layout import FLIP
from lowbit.kernels.cpu.shared.post_op import WithNumbers
from lowbit.numerics.formats import dtype_of
from lowbit.product.output import OutputSpec
from lowbit.product.prepare import panel_bytes
from lowbit.product.prepared import Prepared
from lowbit.product.product import Layout
from lowbit.registry.locks import importing

_FLOAT32 = np.dtype(np.float32)


def finished(node: Node, value: Array, dtype: np.dtype[Any], residual: Array | None) -> Array:
    """A product with its bias, float64, rounded to `dtype`, after the node's post-operations.

    Each of these is computed in float64 and rounded to `dtype`, as nodes of their own would be.
    ValueError: a step is unknown, or its operand is missing or of another shape.
    """
    value = value.astype(dtype)
    for name, *parameters in node.get("post_ops", ()):
        if name == "residual":
            if residual is None or residual.shape != value.shape:
                shape = None if residual is None else residual.shape
                raise ValueError(f"expected a residual of shape {value.shape}, got {shape}")
            value = (value + residual).astype(dtype)
        elif name in POST_OPS:
            value = POST_OPS[name](value.astype(np.float64), *parameters).astype(dtype)
        else:
            raise ValueError(f"no post-operation is called {name!r}; known: {', '.join(POST_OPS)}")
    return value


@dataclass(frozen=True)
class _Numbered(WithNumbers):
    """A post-operation with its numbers."""

    name: str  # type: ignore[misc]
    given: tuple[float, ...]

    @property
    def numbers(self) -> tuple[float, ...]:
        return self.given


def launch(lowering: Lowering, prepared: Prepared, operands: Mapping[str, Any]) -> None:
    """Add the launches of what was prepared."""
    for program, words in prepared.steps(operands, lowering.scratch(prepared.scratch)):
        lowering.add(program, words)


class Epilogue:
    """What follows a product: the output's memory, post-operations, and their operands."""

    def __init__(self, lowering: Lowering, node: Node, order: tuple[int, ...] | None) -> None:
        self._lowering = lowering
        _, _, bias, residual = (*node.inputs, "", "")[:4]
        tensor = lowering.graph.tensors[node.outputs[0]]
        self.residual: Place | None = None
        steps: list[str | WithNumbers] = ["bias"] if bias else []
        for name, *parameters in node.get("post_ops", ()):
            if name == "residual":
                name, parameters = self._beside(lowering.view(residual), order)
            steps.append(_Numbered(name, tuple(parameters)) if parameters else name)
        self.spec = (bool(bias), bool(residual), tuple(steps), tensor.dtype, tensor.scale,
                     tensor.zero_point)  # fmt: skip
        self.bias = lowering.constant_bias(bias)
        self.out = lowering.output(node.outputs[0], order)

    def _beside(self, view: View, order: tuple[int, ...] | None) -> tuple[str, list[float]]:
        """The residual where the kernels can read it, and the step that adds it."""
        tensor = view.tensor
        if tensor.scale is None:
            view = converted(self._lowering, view, Tensor("float32", view.shape), order)
            self.residual = view.place
            return "residual", []
        self.residual = plain(self._lowering, view, order).place
        name = "residual_u8" if tensor.dtype == "uint8" else "residual_s8"
        return name, [tensor.scale, tensor.zero_point]

    def launch(
        self, prepared: Prepared, weight: Any, x: View, rows: tuple[Place | None, Place | None],
        bias: np.ndarray | None, spec: OutputSpec,
    ) -> None:  # fmt: skip
        """Add the launches of x by a packed weight. rows: of `row_parameters`, or Nones; bias: as
        the weight's kernels read it. What comes next is, for now, the same again."""
        lowering, numbers = self._lowering, spec.parameters
        scale, zero = rows
        launch(lowering, prepared, {
            **prepared.weight(weight), "a": x.place, "row_scale": scale, "row_zero": zero,
            "bias": None if bias is None else lowering.known(bias), "residual": self.residual,
            "parameters": None if numbers is None else lowering.known(numbers),
            "out": self.out.place, "next_bytes": panel_bytes(prepared.request.b),
        })  # fmt: skip


def row_parameters(lowering: Lowering, tensor: Tensor) -> tuple[Place, Place]:
    """Where the scale and the zero point of all rows are, as the kernels take them."""
    shift = FLIP if tensor.dtype == "int8" else 0
    scale = lowering.known(np.array([tensor.scale], np.float32))
    return scale, lowering.known(np.array([tensor.zero_point + shift], np.int32))


def gemm(
    lowering: Lowering, a: View, b: View, out: View, bias: Place | None = None, alpha: float = 1.0
) -> None:
    """Add the launches of out = alpha · (a @ b) + bias, of float32; bias [N] is added to each row.
    b may be of floats of 16 bits, where it has 16 columns or more."""
    with importing():  # not for 8 bits alone
        from lowbit.product.gemm import CopyFirst, factors, prepare_fitting

    added = None if bias is None else Layout(_FLOAT32, out.shape, (0, 4))
    prepared = prepare_fitting(
        _layout(a), _layout(b), added, _layout(out), lowering.threads, lowering.isa.name
    )
    if isinstance(prepared.plan, CopyFirst):
        _gemm_by_copies(lowering, a, b, out, bias, alpha, prepared.plan.by_columns)
        return
    if not prepared.launches:  # nothing is multiplied
        if math.prod(out.shape):
            zero = lowering.known_view(np.zeros(1, np.float32))
            compute(lowering, out, [zero if bias is None else _row(out, bias)], (0,))
        return
    operands = {"a": a.place, "b": b.place, "c": bias, "out": out.place}
    operands |= factors(alpha, float(bias is not None))
    launch(lowering, prepared, operands)


def _gemm_by_copies(
    lowering: Lowering, a: View, b: View, out: View, bias: Place | None, alpha: float,
    by_columns: bool,
) -> None:  # fmt: skip
    """As `gemm`, where the kernels cannot take operands as they lie, or would be slow."""
    target = lowering.fresh(out.tensor, (1, 0) if by_columns else None)
    gemm(lowering, plain(lowering, a), plain(lowering, b, (1, 0)), target, alpha=alpha)
    if bias is None:
        compute(lowering, out, [target], (0,))
        return
    compute(lowering, out, [target, _row(out, bias)], (0, 1, "add"))


def _row(out: View, bias: Place) -> View:
    return View(replace(out.tensor, shape=out.shape[1:]), bias, (1,))


def _layout(view: View) -> Layout:
    dtype = dtype_of(view.tensor.dtype)
    return Layout(dtype, view.shape, tuple(dtype.itemsize * stride for stride in view.strides))


SHORT = {"bfloat16": "bf16", "float16": "f16"}
"""What kernels call the dtypes of 16 bits that they widen when they read a weight."""
_LEAST_SHORT = 16  # columns from which products take it as it lies


def is_short(dtype: str, columns: int) -> bool:
    """Whether products read a weight with so many columns in its 16 bits."""
    return dtype in SHORT and columns >= _LEAST_SHORT


def as_float32(lowering: Lowering, view: View, order: Sequence[int] | None = None) -> View:
    return converted(lowering, view, Tensor("float32", view.shape), order)


def weight_of(lowering: Lowering, node: Node) -> Constant:
    """The weight of a product. NotImplementedError: it is no constant."""
    constant = lowering.graph.constants.get(node.inputs[1])
    if constant is None:
        raise NotImplementedError("weights are served where they are constants")
    return constant


def float_weight(lowering: Lowering, node: Node) -> np.ndarray:
    return lowering.packed(weight_of(lowering, node), floats)


def floats(constant: Constant) -> np.ndarray:
    return np.asarray(numbers(constant), np.float32)


def float_products(
    lowering: Lowering,
    node: Node,
    order: Sequence[int] | None,
    parts: Sequence[tuple[View, np.ndarray, int, int]],
    alpha: float = 1.0,
) -> None:
    """Add products, each of rows, a weight [K, N], the first column it makes and the row stride of
    the output, multiplied by alpha; then what follows them."""
    bias = (*node.inputs, "")[2]
    values = lowering.constant_bias(bias)
    steps = node.get("post_ops", ())
    out = lowering.output(node.outputs[0], order)
    target = out
    if steps or out.tensor.dtype != "float32":
        target = View(replace(out.tensor, dtype="float32", scale=None, zero_point=0),
                      lowering.scratch(4 * math.prod(out.shape)), out.strides)  # fmt: skip
    for rows, weight, column, stride in parts:
        m, n = rows.shape[0], weight.shape[1]
        right = lowering.known_view(weight)
        place = None if values is None else lowering.known(values[column : column + n].copy())
        gemm(lowering, rows, right, target.part((m, n), (stride, 1), column), place, alpha)
    if target is not out:
        ended(lowering, node, target, out)


def ended(lowering: Lowering, node: Node, target: View, out: View, bias_left: bool = False) -> None:
    """Add what follows a product, element by element, and with it the bias if that is left."""
    _, _, bias, residual = (*node.inputs, "", "")[:4]
    expression: list[int | str] = [0]
    inputs, given = [target], list[float]()
    values = lowering.constant_bias(bias) if bias_left else None
    if values is not None:
        inputs.append(lowering.known_view(values.reshape(-1, *(1,) * (len(out.shape) - 2))))
        expression += [1, "add"]
    for name, *numbers_of in node.get("post_ops", ()):
        if name == "residual":
            inputs.append(lowering.view(residual))
            expression += [len(inputs) - 1, "add"]
        else:
            expression.append(name)
            given += numbers_of
    compute(lowering, out, inputs, expression, given)
