"""Numbers to integers of 8 bits and back, and products of such integers.

Quotients are rounded as numerics.quantize_affine does, in float64. Others divide in float32, which
where a quotient is next to a half can give the next integer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lowbit.graph.graph import Node, Tensor
from lowbit.graph.lower import Lowering, order_of
from lowbit.graph.lowering.elementwise import compute
from lowbit.graph.operator import Array, Operator, Sizes, finite, operators
from lowbit.graph.operators.convolution import convolution_sizes, convolved
from lowbit.graph.operators.products import exact, product_shape
from lowbit.graph.operators.windows import convolution_windows
from lowbit.graph.step import View
from lowbit.numerics import dequantize_affine, int_format, quantize_affine

_INTEGERS = ("uint8", "int8")


def along(vector: Array, axis: int, rank: int) -> Array:
    """A scale or zero point so that it broadcasts: one number, or one an index of `axis`."""
    if vector.size == 1:
        return vector.reshape(())
    if vector.ndim != 1:
        raise ValueError(f"scales in blocks, of shape {vector.shape}, are not supported")
    return vector.reshape([-1 if i == axis % rank else 1 for i in range(rank)])


def quantized(x: Array, scale: Array, zero: Array | None, dtype: str = "uint8") -> Array:
    """Integers of the dtype of `zero`, or of `dtype`; of infinities the greatest and the least, of
    NaN the least. ValueError: the dtype is neither int8 nor uint8."""
    dtype = dtype if zero is None else zero.dtype.name
    if dtype not in _INTEGERS:
        raise ValueError(f"expected int8 or uint8, got {dtype}: others are not supported")
    zero = np.zeros((), np.int32) if zero is None else zero
    return quantize_affine(
        finite(x), scale.astype(np.float32), zero.astype(np.int32), int_format(dtype)
    )


def dequantized(q: Array, scale: Array, zero: Array | None) -> Array:
    """What integers stand for, in the dtype of `scale`."""
    zero = np.zeros((), np.int32) if zero is None else zero.astype(np.int32)
    if q.dtype.name in _INTEGERS:
        return dequantize_affine(q, scale.astype(np.float32), zero).astype(scale.dtype)
    if q.dtype != np.int32:
        raise ValueError(f"expected int8, uint8 or int32, got {q.dtype}: others are not supported")
    return ((q - zero).astype(np.float32) * scale.astype(np.float32)).astype(scale.dtype)


def _quantize(node: Node, x: Array, scale: Array, zero: Array | None = None) -> Array:
    """clamp(round(x / scale) + zero_point), per tensor or along `axis`."""
    axis = node.get("axis", 1)
    scale = along(scale, axis, x.ndim)
    zero = None if zero is None else along(zero, axis, x.ndim)
    return quantized(x, scale, zero, node.get("output_dtype", "uint8"))


def _dequantize(node: Node, x: Array, scale: Array, zero: Array | None = None) -> Array:
    """scale · (x - zero_point), per tensor or along `axis`."""
    axis = node.get("axis", 1)
    zero = None if zero is None else along(zero, axis, x.ndim)
    return dequantized(x, along(scale, axis, x.ndim), zero)


def _dynamically(node: Node, x: Array) -> tuple[Array, ...]:
    """uint8 with the scale and zero point that the least and greatest element give."""
    low, high = (np.float32(find(x, initial=0)) for find in (np.min, np.max))
    scale = np.asarray((high - low) / np.float32(255)) if high > low else np.float32(1)
    zero = np.clip(np.rint(-low / scale), 0, 255).astype(np.uint8)
    return quantized(x, np.asarray(scale), zero), np.asarray(scale), np.asarray(zero)


def _convolve(
    node: Node, x: Array, weight: Array, x_zero: Array | None = None, zeros: Array | None = None
) -> Array:
    """The convolution of x - x_zero with weight - zeros, int32."""
    windows, groups = convolution_windows(node, x.shape, weight.shape)
    left, right = x.astype(np.float64), weight.astype(np.float64)
    left = left if x_zero is None else left - x_zero
    if zeros is not None:
        right = right - along(zeros, 0, weight.ndim)
    return convolved(left, right, windows, groups).astype(np.int32)


def _quantized_convolution(
    node: Node, x: Array, x_scale: Array, x_zero: Array, weight: Array, w_scale: Array,
    w_zero: Array, y_scale: Array, y_zero: Array, bias: Array | None = None,
) -> Array:  # fmt: skip
    """Of x, weight and an int32 bias."""
    left = _values(x, x_scale, x_zero)
    w_scale, w_zero = (along(one, 0, weight.ndim) for one in (w_scale, w_zero))
    windows, groups = convolution_windows(node, left.shape, weight.shape)
    made = convolved(left, _values(weight, w_scale, w_zero), windows, groups)
    if bias is not None:
        scaled = bias.astype(np.float64) * x_scale * w_scale.reshape(-1)
        made += scaled.reshape(-1, *(1,) * (made.ndim - 2))
    return quantized(made, y_scale, y_zero)


def _quantized_product(
    node: Node, a: Array, a_scale: Array, a_zero: Array, b: Array, b_scale: Array, b_zero: Array,
    y_scale: Array, y_zero: Array,
) -> Array:  # fmt: skip
    left, right = _values(a, a_scale, a_zero), _values(b, b_scale, b_zero)
    return quantized(exact(left, right), y_scale, y_zero)


def _values(q: Array, scale: Array, zero: Array) -> Array:
    """What integers stand for, float64."""
    wide: Any = q.astype(np.float64)
    return (wide - zero) * scale.astype(np.float64)


def _scaled(lowering: Lowering, node: Node, view: View) -> View:
    """A view of stored integers as what they stand for. NotImplementedError: by channel."""
    scale, zero = ([lowering.graph.constants.get(name) for name in node.inputs[1:]] + [None])[:2]
    if not isinstance(scale, np.ndarray) or scale.size != 1 or np.size(zero) != 1:  # type: ignore[arg-type]
        raise NotImplementedError(f"{node.op} is served with one scale that is a constant")
    number = 0 if zero is None else int(np.asarray(zero).item())
    tensor = Tensor(view.tensor.dtype, view.shape, float(scale.item()), number)
    return View(tensor, view.place, view.strides)


def _lower_quantize(lowering: Lowering, node: Node) -> None:
    x = lowering.view(node.inputs[0])
    out = lowering.output(node.outputs[0], order_of(x))
    compute(lowering, _scaled(lowering, node, out), [x], (0,))


def _lower_dequantize(lowering: Lowering, node: Node) -> None:
    x = _scaled(lowering, node, lowering.view(node.inputs[0]))
    compute(lowering, lowering.output(node.outputs[0], order_of(x)), [x], (0,))


def _first(node: Node, x: Sizes, *others: Sizes | None) -> Sizes:
    return x


def _quantized_dtype(node: Node, tensors: Sequence[Tensor | None]) -> str:
    zero = (*tensors, None, None)[2]
    return node.get("output_dtype", "uint8") if zero is None else zero.dtype


def _dtype_of(index: int) -> Callable[[Node, Sequence[Tensor | None]], str]:
    """That of an input: of a scale, or of a zero point of the output."""

    def dtype(node: Node, tensors: Sequence[Tensor | None]) -> str:
        tensor = tensors[index]
        assert tensor is not None
        return tensor.dtype

    return dtype


operators.add("QuantizeLinear", Operator(
    meaning=_quantize, shape=_first, dtype=_quantized_dtype, lowering=_lower_quantize,
))  # fmt: skip
operators.add("DequantizeLinear", Operator(
    meaning=_dequantize, shape=_first, dtype=_dtype_of(1), lowering=_lower_dequantize,
))  # fmt: skip
# Importers make others of these.
operators.add("DynamicQuantizeLinear", Operator(
    meaning=_dynamically, shape=_first, dtype="uint8",
    further=lambda *_: (Tensor("float32", ()), Tensor("uint8", ())),
))  # fmt: skip
operators.add("ConvInteger", Operator(
    meaning=_convolve, dtype="int32",
    shape=lambda node, x, weight, *zeros: convolution_sizes(node, x, weight),
))  # fmt: skip
# Of two operands, each with scale and zero point, and then those of the output.
operators.add("QLinearConv", Operator(
    meaning=_quantized_convolution, dtype=_dtype_of(7),
    shape=lambda node, x, _, __, weight, *others: convolution_sizes(node, x, weight),
))  # fmt: skip
operators.add("QLinearMatMul", Operator(
    meaning=_quantized_product, dtype=_dtype_of(7),
    shape=lambda node, a, _, __, b, *others: product_shape(a, b),
))  # fmt: skip
