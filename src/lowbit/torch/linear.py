"""`QuantizedLinear`: a linear layer whose weight is of integers, run by lowbit's kernels."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lowbit.torch.config import QuantizeConfig
from lowbit.torch.functional.int4 import Int4Weight, int4_matmul
from lowbit.torch.functional.linear import check_activation, dequantize_weight, linear
from lowbit.torch.weight import QuantizedWeight


class QuantizedLinear(nn.Linear):
    """What `quantize_` turns an `nn.Linear` into. It is not constructed directly.

    Input [..., in_features] of float32, bfloat16 or float16, any strides; output
    [..., out_features] of the same dtype. What becomes of the input on the way is what `config`
    says; the arithmetic is that of `lowbit.linear_dynamic` or `lowbit.linear_weight_only`.

    The weight is frozen. Gradients pass to the input and to the bias as if the layer were
    `linear(x, weight.dequantize(), bias)` (the straight-through estimator: Bengio, Léonard,
    Courville 2013, arXiv:1308.3432).
    """

    config: QuantizeConfig
    activations: str

    def __init__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            "QuantizedLinear is made from an nn.Linear: call lowbit.torch.quantize_(model, config)"
        )

    def forward(self, input: Tensor) -> Tensor:
        # Straight to the dictionary: nn.Module's attribute look-up costs a microsecond here.
        weight: Any = self._parameters["weight"]
        bias = self._parameters["bias"]
        if weight.packing == "tiles":
            return _on_tiles(input, weight, bias, self.config)
        if torch.is_grad_enabled() and (
            input.requires_grad or (bias is not None and bias.requires_grad)
        ):
            call: Any = _StraightThrough.apply
        else:
            call = linear
        return call(
            input,
            weight.panels,
            weight.column_sums,
            weight.scale,
            weight.zero_points,
            bias,
            self.in_features,
            self.out_features,
            weight.group_size,
            self.activations,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            if not isinstance(value, QuantizedWeight):
                raise TypeError(
                    f"the weight of a QuantizedLinear must be a QuantizedWeight, got "
                    f"{type(value).__name__}; weight.copy_(value) quantizes a float tensor into it"
                )
            if value.format.layout != self.config.weight_format.layout:
                raise ValueError(
                    f"a layer with {self.config} takes a weight of "
                    f"{self.config.weight_format}, got one of {value.format}; "
                    f"weight.copy_(value) converts it"
                )
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.config}"


def become_quantized(layer: nn.Linear, weight: nn.Parameter, config: QuantizeConfig) -> None:
    """Turn `layer` into a QuantizedLinear with `weight`, a Parameter that is a QuantizedWeight.

    The object stays the same, and with it hooks, training flag and every reference to it.
    """
    layer.__class__ = QuantizedLinear
    assert isinstance(layer, QuantizedLinear)
    layer.config = config
    layer.activations = config.activations
    layer.weight = weight


def _on_tiles(x: Tensor, weight: Any, bias: Tensor | None, config: QuantizeConfig) -> Tensor:
    """What the layer computes with a weight that is packed for GPUs."""
    check_activation(x, weight.shape[1])
    if config.activations != "float":
        raise NotImplementedError(
            f"{config} has no kernel on {str(weight.device)!r} yet; move the layer with .cpu(), or "
            "quantize it with Int4WeightOnlyConfig"
        )
    out_features, in_features = weight.shape
    packed = Int4Weight(
        tiles=weight.tiles,
        scale=weight.scale,
        row_scale=weight.row_scale,
        zero=weight.zero,
        row_zero=weight.row_zero,
        N=out_features,
        K=in_features,
        group_size=weight.group_size,
    )
    out = int4_matmul(x, packed)
    return out if bias is None else out + bias.to(out.dtype)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
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
        return linear(
            x,
            panels,
            column_sums,
            scale,
            zero_points,
            bias,
            in_features,
            out_features,
            group_size,
            activations,
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, *weight, bias, in_features, out_features, group_size, _ = inputs
        ctx.sizes = in_features, out_features, group_size
        ctx.save_for_backward(*weight)
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        for_x = for_bias = None
        if ctx.needs_input_grad[0]:
            weight = dequantize_weight(*ctx.saved_tensors, *ctx.sizes)
            for_x = (gradient.to(torch.float32) @ weight).to(gradient.dtype)
        if ctx.needs_input_grad[5]:
            rows = gradient.reshape(-1, gradient.shape[-1])
            for_bias = rows.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return for_x, None, None, None, None, for_bias, None, None, None, None
