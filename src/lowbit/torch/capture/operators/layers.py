"""Products, convolutions, pooling, norms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lowbit.graph.graph import Attribute
from lowbit.torch.capture.builder import Builder, Value, converter


def _spread(given: Any, axes: int) -> tuple[int, ...]:
    """A number, or one for each axis."""
    given = (given,) if isinstance(given, int) else tuple(given)
    return given * axes if len(given) == 1 else given


def _axes(b: Builder) -> int:
    """How many axes the windows of an operator have, by its name; 0: that says nothing."""
    return next((n for n in (1, 2, 3) if f"{n}d" in b.operator), 0)


def _windowed(b: Builder, op: str, x: Value, *inputs: Value | None, **how: Attribute) -> Value:
    """An operator over windows, which takes a batch, of an input that may have none."""
    given = [x, *filter(None, inputs)]
    windows = _axes(b) or len(b.shape(x)) - 2
    if len(b.shape(x)) == windows + 2:
        return b.op(op, *given, **how)
    given[0] = b.unsqueeze(x, [0])
    return b.squeeze(b.op(op, *given, **how), [0])


@converter("convolution")
def convolution(
    b: Builder, *, input: Value, weight: Value, bias: Value | None, stride: Any, padding: Any,
    dilation: Any, transposed: bool, output_padding: Any, groups: int,
) -> Value:  # fmt: skip
    axes = len(b.shape(weight)) - 2
    attributes: dict[str, Attribute] = {
        "strides": _spread(stride, axes),
        "pads": _spread(padding, axes) * 2,
        "dilations": _spread(dilation, axes),
        "group": groups,
    }
    if transposed:
        attributes["output_padding"] = _spread(output_padding, axes)
    op = "ConvTranspose" if transposed else "Conv"
    return _windowed(b, op, input, weight, bias, **attributes)


def _windows(axes: int, kernel_size: Any, stride: Any, padding: Any) -> dict[str, Attribute]:
    return {
        "kernel_shape": _spread(kernel_size, axes),
        "strides": _spread(stride or kernel_size, axes),
        "pads": _spread(padding, axes) * 2,
    }


@converter("max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices",
           "max_pool3d_with_indices")  # fmt: skip
def max_pool(
    b: Builder, *, x: Value, kernel_size: Any, stride: Any, padding: Any, dilation: Any,
    ceil_mode: bool,
) -> Any:  # fmt: skip
    dilations = _spread(dilation, _axes(b))
    made = _windowed(b, "MaxPool", x, dilations=dilations, ceil_mode=int(ceil_mode),
                     **_windows(_axes(b), kernel_size, stride, padding))  # fmt: skip
    return (made,) if b.operator.endswith("indices") else made


@converter("avg_pool1d", "avg_pool2d", "avg_pool3d")
def avg_pool(
    b: Builder, *, x: Value, kernel_size: Any, stride: Any, padding: Any, ceil_mode: bool,
    count_include_pad: bool, divisor_override: int | None = None,
) -> Value:  # fmt: skip
    if divisor_override is not None and ceil_mode:
        raise NotImplementedError("avg_pool with divisor_override and ceil_mode is not translated")
    axes, padded = _axes(b), int(count_include_pad or divisor_override is not None)
    made = _windowed(b, "AveragePool", x, ceil_mode=int(ceil_mode), count_include_pad=padded,
                     **_windows(axes, kernel_size, stride, padding))  # fmt: skip
    if divisor_override is None:
        return made
    ratio = math.prod(_spread(kernel_size, axes)) / divisor_override
    return b.mul(made, b.number(ratio, b.out.dtype))


@converter("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
           "_adaptive_avg_pool2d", "_adaptive_avg_pool3d")  # fmt: skip
def adaptive_avg_pool(b: Builder, *, x: Value, output_size: Sequence[int]) -> Value:
    return _adaptive(b, x, output_size, "AveragePool", "GlobalAveragePool")


@converter("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(b: Builder, *, x: Value, output_size: Sequence[int]) -> tuple[Value, ...]:
    return (_adaptive(b, x, output_size, "MaxPool", "GlobalMaxPool"),)


def _adaptive(b: Builder, x: Value, output_size: Sequence[int], op: str, whole: str) -> Value:
    axes = int(b.operator[-2])
    if all(size == 1 for size in output_size):
        return _windowed(b, whole, x)
    sizes = b.shape(x)[-axes:]
    wanted = [n if m is None else m for n, m in zip(sizes, output_size, strict=True)]
    if any(isinstance(n, torch.SymInt) for n in wanted):
        raise NotImplementedError(f"{b.operator} to a size that is not fixed is not translated")
    if any(isinstance(n, torch.SymInt) or n % m for n, m in zip(sizes, wanted, strict=True)):
        return _windowed(b, op, x, output_size=tuple(wanted))
    window = tuple(int(n) // m for n, m in zip(sizes, wanted, strict=True))
    return _windowed(b, op, x, kernel_shape=window, strides=window)


@converter("_native_batch_norm_legit_no_training")
def batch_norm(
    b: Builder, *, input: Value, weight: Value | None, bias: Value | None,
    running_mean: Value | None, running_var: Value | None, eps: float, **_: Any,
) -> Any:  # fmt: skip
    if running_mean is None or running_var is None:
        raise NotImplementedError(
            "a batch norm without running statistics computes with those of its data, which is "
            "not translated"
        )
    ones = _affine(b, int(b.shape(running_mean)[0]), weight, bias)
    made = b.op("BatchNormalization", input, *ones, running_mean, running_var, epsilon=eps)
    return (made,)


def _affine(b: Builder, channels: int, weight: Value | None, bias: Value | None) -> list[Value]:
    """The factors and summands of a norm, which are 1 and 0 where it has none."""
    return [
        weight or b.constant(np.ones(channels, np.float32)),
        bias or b.constant(np.zeros(channels, np.float32)),
    ]


@converter("native_layer_norm")
def layer_norm(
    b: Builder, *, input: Value, normalized_shape: Sequence[int], weight: Value | None,
    bias: Value | None, eps: float, **_: Any,
) -> Any:  # fmt: skip
    sizes = tuple(int(size) for size in normalized_shape)
    inputs = [weight or b.constant(np.ones(sizes, np.float32)), *([bias] if bias else [])]
    made = b.op("LayerNormalization", input, *inputs, axis=-len(sizes), epsilon=eps)
    return (made,)


@converter("native_group_norm")
def group_norm(
    b: Builder, *, input: Value, weight: Value | None, bias: Value | None, group: int, eps: float,
    **_: Any,
) -> tuple[Value]:  # fmt: skip
    """As an instance norm of groups, which ONNX has in every version."""
    sizes = b.shape(input)
    fixed = all(isinstance(size, int) for size in sizes[1:])  # -1 says nothing of empty batches
    last = math.prod(sizes[1:]) // group if fixed else -1
    cut = b.reshape(input, [0, group, last])
    plain = _affine(b, group, None, None)
    made = b.op("InstanceNormalization", cut, *plain, epsilon=eps)
    made = b.in_shape(made, sizes[:1], sizes)
    each = (int(sizes[1]), *[1] * (len(sizes) - 2))
    for op, one in ((b.mul, weight), (b.add, bias)):
        made = op(made, b.in_shape(one, (), each)) if one else made
    return (made,)


@converter("instance_norm")
def instance_norm(
    b: Builder, *, input: Value, weight: Value | None, bias: Value | None, eps: float,
    use_input_stats: bool, **_: Any,
) -> Value:  # fmt: skip
    if not use_input_stats:
        raise NotImplementedError("instance_norm with running statistics is not translated")
    ones = _affine(b, int(b.shape(input)[1]), weight, bias)
    return b.op("InstanceNormalization", input, *ones, epsilon=eps)


@converter("rms_norm")
def rms_norm(
    b: Builder, *, input: Value, normalized_shape: Sequence[int], weight: Value | None,
    eps: float | None,
) -> Value:  # fmt: skip
    sizes = tuple(int(size) for size in normalized_shape)
    scale = weight or b.constant(np.ones(sizes, np.float32))
    epsilon = torch.finfo(torch.float32).eps if eps is None else eps
    return b.op("RMSNormalization", input, scale, axis=-len(sizes), epsilon=epsilon)


@converter("scaled_dot_product_attention")
def attention(
    b: Builder, *, query: Value, key: Value, value: Value, attn_mask: Value | None,
    dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool,
) -> Value:  # fmt: skip
    if dropout_p:
        raise NotImplementedError("attention with dropout in eval mode is not translated")
    attributes: dict[str, Attribute] = {"is_causal": 1, "diagonal": 0} if is_causal else {}
    if scale is not None:
        attributes["scale"] = scale * 1.0  # float() would make a number of what sizes say
    return b.op("Attention", query, key, value, *([attn_mask] if attn_mask else []), **attributes)
