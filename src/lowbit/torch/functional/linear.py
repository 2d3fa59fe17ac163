"""The operators that PyTorch sees: `torch.ops.lowbit.*`, with fakes for tracing.

They are registered with `torch.library.Library` and not with the `custom_op` decorator: a
call then costs about 3 µs instead of 81, and one sentence makes dozens of calls. Neither
operator has a derivative of its own; `lowbit.torch.linear` adds that around the call.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from lowbit.kernels.cpu.shared.panel_format import UNPROVEN, PanelFormat
from lowbit.product import requests
from lowbit.product.dispatch import threads_key, wants_proof
from lowbit.product.prepare import KEPT, PreparedProduct
from lowbit.torch.registration import register
from lowbit.weights.format import INT8, WeightFormat
from lowbit.weights.panels import NIBBLE_MASK, Panels, largest_pair_of

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


@lru_cache(maxsize=KEPT)
def _prepared(
    rows: int,
    stride: int,
    in_features: int,
    out_features: int,
    activations: str,
    bfloat16: bool,
    group_size: int,
    zero_points: bool,
    largest_pair: int,
    biased: bool,
    threads: int,
) -> PreparedProduct:
    """The product that such a layer is; `stride` is from row to row."""
    dtype = np.dtype(ml_dtypes.bfloat16 if bfloat16 else np.float32)
    b = PanelFormat(
        k=in_features,
        n=out_features,
        dtype="int4" if group_size else "int8",
        scaled=True,
        zero_points="s8" if zero_points else "",
        group_size=group_size,
        largest_pair=2 * NIBBLE_MASK if group_size else largest_pair,
    )
    strides = stride * dtype.itemsize, dtype.itemsize
    out_dtype = "bfloat16" if bfloat16 else "float32"
    return requests.floats(
        (rows, in_features), strides, dtype, b, threads, None, activations, biased, False, None,
        out_dtype,
    ).prepared  # fmt: skip


def _largest_pair(panels: Tensor) -> int:
    """What is proven about weights of 8 bits, kept with their tensor until that changes."""
    if panels.is_inference():  # which do not say when they change
        return UNPROVEN
    state = panels._version, panels.data_ptr()
    known: tuple[tuple[int, int], int] | None = getattr(panels, "_lowbit_largest_pair", None)
    if known is None or known[0] != state:
        # What other processes may change is proven for no time.
        known = state, UNPROVEN if panels.is_shared() else largest_pair_of(panels.numpy())
        panels._lowbit_largest_pair = known  # type: ignore[attr-defined]
    return known[1]


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
    largest_pair = _largest_pair(panels) if not group_size and wants_proof(None) else UNPROVEN
    if panels.data_ptr() % _ALIGNMENT:
        # PyTorch's CPU allocator aligns to 64 bytes, so this is memory of foreign origin.
        panels = panels.clone()
    out = x.new_empty(*shape[:-1], out_features)
    rows = x.numel() // in_features
    if rows:
        prepared = _prepared(
            rows,
            stride,
            in_features,
            out_features,
            activations,
            bfloat16,
            group_size,
            zero_points is not None,
            largest_pair,
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
        prepared.run(x.data_ptr(), right, out.data_ptr(), out_features, bias=added)
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
