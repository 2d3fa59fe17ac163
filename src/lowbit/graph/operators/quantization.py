"""Numbers to integers of 8 bits and back, and products of such integers.

Quotients are rounded as numerics.quantize_affine does, in float64. Others divide in float32, which
where a quotient is next to a half can give the next integer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lowbit.graph.graph import Node, Tensor
from lowbit.graph.operator import Array, Operator, finite, given, operators
from lowbit.graph.operators.convolution import convolution_windows, convolved
from lowbit.graph.operators.products import exact, product_shape
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


class QuantizeLinear(Operator):
    """clamp(round(x / scale) + zero_point), per tensor or along `axis`."""

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        x, scale = given(inputs, 2)
        (zero,) = (*inputs, None)[2:3]
        axis = node.get("axis", 1)
        scale = along(scale, axis, x.ndim)
        zero = None if zero is None else along(zero, axis, x.ndim)
        return (quantized(x, scale, zero, node.get("output_dtype", "uint8")),)

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        (x,) = given(tensors)
        _, zero = (*tensors, None, None)[1:3]
        dtype = node.get("output_dtype", "uint8") if zero is None else zero.dtype
        return (Tensor(dtype, x.sizes),)


class DequantizeLinear(Operator):
    """scale · (x - zero_point), per tensor or along `axis`."""

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        x, scale = given(inputs, 2)
        (zero,) = (*inputs, None)[2:3]
        axis = node.get("axis", 1)
        zero = None if zero is None else along(zero, axis, x.ndim)
        return (dequantized(x, along(scale, axis, x.ndim), zero),)

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        x, scale = given(tensors, 2)
        return (Tensor(scale.dtype, x.sizes),)


class DynamicQuantizeLinear(Operator):
    """uint8 with the scale and zero point that the least and greatest element give."""

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        (x,) = given(inputs)
        low, high = (np.float32(find(x, initial=0)) for find in (np.min, np.max))
        scale = np.asarray((high - low) / np.float32(255)) if high > low else np.float32(1)
        zero = np.clip(np.rint(-low / scale), 0, 255).astype(np.uint8)
        return quantized(x, np.asarray(scale), zero), np.asarray(scale), np.asarray(zero)

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        (x,) = given(tensors)
        return Tensor("uint8", x.sizes), Tensor("float32", ()), Tensor("uint8", ())


class ConvInteger(Operator):
    """The convolution of x - x_zero with weight - weight_zero, int32."""

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        x, weight = given(inputs, 2)
        x_zero, weight_zero = (*inputs, None, None)[2:4]
        windows, groups = convolution_windows(node, x.shape, weight.shape)
        left, right = x.astype(np.float64), weight.astype(np.float64)
        left = left if x_zero is None else left - x_zero
        if weight_zero is not None:
            right = right - along(weight_zero, 0, weight.ndim)
        return (convolved(left, right, windows, groups).astype(np.int32),)

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        x, weight = given(tensors, 2)
        return (_convolution(node, x, weight, "int32"),)


def _convolution(node: Node, x: Tensor, weight: Tensor, dtype: str) -> Tensor:
    windows, _ = convolution_windows(node, x.sizes, weight.sizes)
    return Tensor(dtype, (x.sizes[0], weight.sizes[0], *windows.output))


class QLinearConv(Operator):
    """Conv of x, weight and an int32 bias (each with scale, zero point), quantized."""

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        x, x_scale, x_zero, weight, w_scale, w_zero, y_scale, y_zero = given(inputs, 8)
        (bias,) = (*inputs, None)[8:9]
        left = _values(x, x_scale, x_zero)
        w_scale, w_zero = (along(one, 0, weight.ndim) for one in (w_scale, w_zero))
        windows, groups = convolution_windows(node, left.shape, weight.shape)
        made = convolved(left, _values(weight, w_scale, w_zero), windows, groups)
        if bias is not None:
            scaled = bias.astype(np.float64) * x_scale * w_scale.reshape(-1)
            made += scaled.reshape(-1, *(1,) * (made.ndim - 2))
        return (quantized(made, y_scale, y_zero),)

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        x, _, _, weight, _, _, _, y_zero = given(tensors, 8)
        return (_convolution(node, x, weight, y_zero.dtype),)


def _values(q: Array, scale: Array, zero: Array) -> Array:
    """What integers stand for, float64."""
    wide: Any = q.astype(np.float64)
    return (wide - zero) * scale.astype(np.float64)


class QLinearMatMul(Operator):
    """a @ b of 8-bit integers with scales, quantized."""

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = given(inputs, 8)
        left, right = _values(a, a_scale, a_zero), _values(b, b_scale, b_zero)
        return (quantized(exact(left, right), y_scale, y_zero),)

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        a, _, _, b, _, _, _, y_zero = given(tensors, 8)
        return (Tensor(y_zero.dtype, product_shape(a.sizes, b.sizes)),)


operators.add("QuantizeLinear", QuantizeLinear())
operators.add("DequantizeLinear", DequantizeLinear())
operators.add("DynamicQuantizeLinear", DynamicQuantizeLinear())
operators.add("ConvInteger", ConvInteger())
operators.add("QLinearConv", QLinearConv())
operators.add("QLinearMatMul", QLinearMatMul())
