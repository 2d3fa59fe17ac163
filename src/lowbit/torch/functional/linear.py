"""The operators that PyTorch sees: `torch.ops.lowbit.*`, with fakes for tracing.

They are registered with `torch.library.Library` and not with the `custom_op` decorator: a
call then costs about 3 µs instead of 81, and one sentence makes dozens of calls. Neither
operator has a derivative of its own; `lowbit.torch.linear` adds that around the call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.forms import threads_key
from lowbit.ops import linear_plan
from lowbit.torch.registration import register
from lowbit.weights.format import INT8, WeightFormat
from lowbit.weights.panels import Panels

ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Panels are 16 columns wide and the kernels read scale and bias in whole panels.
PANEL_COLUMNS = 16

_ALIGNMENT = 64


def check_activation(x: Tensor, in_features: int) -> None:
    if x.dim() == 0 or x.shape[-1] != in_features:
        raise ValueError(
            f"this layer takes input of shape [..., {in_features}], got {list(x.shape)}"
        )
    if x.dtype not in ACTIVATION_DTYPES:
        raise TypeError(
            f"a quantized linear layer takes float32, bfloat16 or float16 input, got {x.dtype}; "
            f"convert it with .float()"
        )


def _padded_bias(bias: Tensor, out_features: int) -> Tensor:
    padded = bias.new_zeros(out_features + -out_features % PANEL_COLUMNS, dtype=torch.float32)
    padded[:out_features] = bias
    return padded


def _linear_cpu(
    x: Tensor,
    panels: Tensor,
    column_sums: Tensor,
    scale: Tensor,
    zero_points: Tensor | None,
    bias: Tensor | None,
    in_features: int,
    out_features: int,
    group_size: int,
    activations: str,
) -> Tensor:
    dtype = x.dtype
    shape = x.shape
    bfloat16 = False
    if dtype is not torch.float32 or len(shape) == 0 or shape[-1] != in_features:
        check_activation(x, in_features)
        bfloat16 = dtype is torch.bfloat16 and activations == "float"
        if not bfloat16:
            x = x.to(torch.float32)
    if x.is_contiguous():
        stride = in_features
    elif len(shape) == 2 and x.stride(1) == 1:
        stride = x.stride(0)
    else:
        x = x.contiguous()
        stride = in_features
    if bias is not None and (
        out_features % PANEL_COLUMNS or bias.dtype is not torch.float32 or not bias.is_contiguous()
    ):
        bias = _padded_bias(bias, out_features)
    if panels.data_ptr() % _ALIGNMENT:
        # PyTorch's CPU allocator aligns to 64 bytes, so this is memory of foreign origin.
        panels = panels.clone()
    out = x.new_empty(*shape[:-1], out_features)
    rows = x.numel() // in_features
    if rows:
        plan = linear_plan(
            rows,
            in_features,
            out_features,
            activations,
            bfloat16,
            group_size,
            zero_points is not None,
            bias is not None,
            threads_key(None),
        )
        right = (
            panels.data_ptr(),
            column_sums.data_ptr(),
            0 if zero_points is None else zero_points.data_ptr(),
            scale.data_ptr(),
        )
        added = 0 if bias is None else bias.data_ptr()
        plan.run(x.data_ptr(), (stride, 1), right, out.data_ptr(), out_features, bias=added)
    return out if out.dtype is dtype else out.to(dtype)


def _dequantize_weight_cpu(
    panels: Tensor,
    column_sums: Tensor,
    scale: Tensor,
    zero_points: Tensor | None,
    in_features: int,
    out_features: int,
    group_size: int,
) -> Tensor:
    arrays = {"panels": panels.numpy(), "column_sums": column_sums.numpy(), "scale": scale.numpy()}
    if zero_points is not None:
        arrays["zero_points"] = zero_points.numpy()
    # The zero points of uint4 are relative to its middle, as those of int4 are.
    format = WeightFormat("int4", group_size) if group_size else INT8
    quantized = Panels().unpack(arrays, format, (out_features, in_features))
    return torch.from_numpy(quantized.dequantize()).contiguous()


def _linear_fake(
    x: Tensor,
    panels: Tensor,
    column_sums: Tensor,
    scale: Tensor,
    zero_points: Tensor | None,
    bias: Tensor | None,
    in_features: int,
    out_features: int,
    *_: Any,
) -> Tensor:
    check_activation(x, in_features)
    return x.new_empty((*x.shape[:-1], out_features))


def _dequantize_weight_fake(
    panels: Tensor,
    column_sums: Tensor,
    scale: Tensor,
    zero_points: Any,
    in_features: int,
    out_features: int,
    _: int,
) -> Tensor:
    return scale.new_empty((out_features, in_features))


linear = register(
    "linear(Tensor x, Tensor panels, Tensor column_sums, Tensor scale, Tensor? zero_points, "
    "Tensor? bias, int in_features, int out_features, int group_size, str activations) -> Tensor",
    cpu=_linear_cpu,
    fake=_linear_fake,
)
dequantize_weight = register(
    "dequantize_weight(Tensor panels, Tensor column_sums, Tensor scale, Tensor? zero_points, "
    "int in_features, int out_features, int group_size) -> Tensor",
    cpu=_dequantize_weight_cpu,
    fake=_dequantize_weight_fake,
)
