"""Values that are quantized already: by PyTorch's PT2E flow, or in lowbit's own layers."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from lowbit.graph.graph import Attribute
from lowbit.torch.capture.builder import Builder, Value, converter, numpy_name
from lowbit.torch.weight import PACKINGS
from lowbit.weights.format import WeightFormat

_log = logging.getLogger(__name__)
_NAMESPACE = "quantized_decomposed::"


@converter(f"{_NAMESPACE}quantize_per_tensor")
def quantize_per_tensor(
    b: Builder, *, input: Value, scale: Any, zero_point: Any, quant_min: Any, quant_max: Any,
    dtype: torch.dtype, **_: Any,
) -> Value:  # fmt: skip
    factor, zero = _number(b, scale), int(_number(b, zero_point))
    limits = torch.iinfo(dtype)
    if (quant_min, quant_max) != (limits.min, limits.max):  # fewer integers than the dtype has
        ends = [b.number(factor * (end - zero), torch.float32) for end in (quant_min, quant_max)]
        input = b.clip(input, *ends)
    return b.quantize(input, *_parameters(b, factor, zero, dtype))


@converter(f"{_NAMESPACE}dequantize_per_tensor")
def dequantize_per_tensor(
    b: Builder, *, input: Value, scale: Any, zero_point: Any, dtype: torch.dtype, **_: Any
) -> Value:
    factor, zero = _number(b, scale), int(_number(b, zero_point))
    return b.dequantize(input, *_parameters(b, factor, zero, dtype))


@converter(f"{_NAMESPACE}quantize_per_channel", f"{_NAMESPACE}dequantize_per_channel")
def per_channel(
    b: Builder, *, input: Value, scales: Value, zero_points: Value | None, axis: int,
    dtype: torch.dtype, **_: Any,
) -> Value:  # fmt: skip
    """Scales in float32, and zero points in the integers' dtype."""
    scale = np.asarray(b.constants[scales], np.float32)
    zeros = np.zeros(scale.shape) if zero_points is None else np.asarray(b.constants[zero_points])
    given = b.constant(scale), b.constant(zeros.astype(numpy_name(dtype)))
    return (b.quantize if b.operator[0] == "q" else b.dequantize)(input, *given, axis=axis)


def _number(b: Builder, given: Any) -> float:
    """A scale or zero point, which is a number or the constant of one."""
    if not isinstance(given, str):
        return given
    if given not in b.constants:
        raise NotImplementedError("a scale that is computed at run time is not translated")
    return np.asarray(b.constants[given]).item()


def _parameters(b: Builder, scale: float, zero: int, dtype: torch.dtype) -> tuple[Value, Value]:
    zero_point = np.array(zero, numpy_name(dtype))
    return b.number(scale, torch.float32), b.constant(zero_point)


@converter("lowbit::linear")
def lowbit_linear(
    b: Builder, *, x: Value, panels: Value, column_sums: Value, scale: Value,
    zero_points: Value | None, bias: Value | None, in_features: int, out_features: int,
    group_size: int, activations: str,
) -> Value:  # fmt: skip
    dtype = "int8" if not group_size else "uint4" if zero_points else "int4"
    parts = {
        "panels": panels, "column_sums": column_sums, "scale": scale, "zero_points": zero_points,
    }  # fmt: skip
    arrays = {name: np.asarray(b.constants[one]) for name, one in parts.items() if one}
    format = WeightFormat(dtype, group_size or None)
    weight = PACKINGS["panels"].unpack(arrays, format, (out_features, in_features))
    if weight.zero_point is not None:  # which the graph's weights cannot have: float, then
        _log.warning(
            "%s: zero points that are no integers, as HQQ finds them, make this a product of "
            "float32 in a graph", b.node.name,
        )  # fmt: skip
        inputs = [b.constant(weight.dequantize()), *([bias] if bias else [])]
        return b.linear(x, *inputs)
    inputs = [b.constant(weight.weight), *([bias] if bias else [])]
    how: dict[str, Attribute] = {} if activations == "float" else {"activations": activations}
    return b.linear(x, *inputs, **how)


@converter("lowbit::embedding")
def lowbit_embedding(
    b: Builder, *, indices: Value, parts: tuple[Value, ...], packing: str, dtype: str,
    group_size: int | None, out_features: int, in_features: int, **_: Any,
) -> Value:  # fmt: skip
    """Rows of the table, which is kept in float: a graph looks nothing up in integers."""
    arrays = [np.asarray(b.constants[one]) for one in parts]
    named = dict(zip(PACKINGS[packing].parts, arrays, strict=False))
    format = WeightFormat(dtype, group_size)
    weight = PACKINGS[packing].unpack(named, format, (out_features, in_features))
    return b.gather(b.constant(weight.dequantize()), indices)
