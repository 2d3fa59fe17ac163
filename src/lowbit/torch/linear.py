"""`QuantizedLinear`: a linear layer whose weight is int8, run by lowbit's kernels."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lowbit.torch.config import Int8DynamicConfig
from lowbit.torch.custom_ops import dequantize_weight, linear_dynamic
from lowbit.torch.weight import QuantizedWeight


class QuantizedLinear(nn.Linear):
    """What `quantize_` turns an `nn.Linear` into. It is not constructed directly.

    Input [..., in_features] of float32, bfloat16 or float16, any strides; output
    [..., out_features] of the same dtype. Each row of the input is quantized to 8 bits, the
    integer product is exact, and the result is float32 before it is cast back.

    The weight is frozen. Gradients pass to the input and to the bias as if the layer were
    `linear(x, weight.dequantize(), bias)` (the straight-through estimator: Bengio, Léonard,
    Courville 2013, arXiv:1308.3432).
    """

    config: Int8DynamicConfig

    def __init__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            "QuantizedLinear is made from an nn.Linear: call lowbit.torch.quantize_(model, config)"
        )

    def forward(self, input: Tensor) -> Tensor:
        # Straight to the dictionary: nn.Module's attribute look-up costs a microsecond here.
        weight: Any = self._parameters["weight"]
        bias = self._parameters["bias"]
        if torch.is_grad_enabled() and (
            input.requires_grad or (bias is not None and bias.requires_grad)
        ):
            call: Any = _StraightThrough.apply
        else:
            call = linear_dynamic
        return call(
            input,
            weight.panels,
            weight.column_sums,
            weight.scale,
            bias,
            self.in_features,
            self.out_features,
            self.config.symmetric,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and not isinstance(value, QuantizedWeight):
            raise TypeError(
                f"the weight of a QuantizedLinear must be a QuantizedWeight, got "
                f"{type(value).__name__}; weight.copy_(value) quantizes a float tensor into it"
            )
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, weight=int8 per channel, {self.config}"


def become_quantized(layer: nn.Linear, weight: nn.Parameter, config: Int8DynamicConfig) -> None:
    """Turn `layer` into a QuantizedLinear with `weight`, a Parameter that is a QuantizedWeight.

    The object stays the same, and with it hooks, training flag and every reference to it.
    """
    layer.__class__ = QuantizedLinear
    assert isinstance(layer, QuantizedLinear)
    layer.config = config
    layer.weight = weight


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        x: Tensor,
        panels: Tensor,
        column_sums: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        in_features: int,
        out_features: int,
        symmetric: bool,
    ) -> Tensor:
        return linear_dynamic(
            x, panels, column_sums, scale, bias, in_features, out_features, symmetric
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, panels, _, scale, bias, ctx.in_features, ctx.out_features, _ = inputs
        ctx.save_for_backward(panels, scale)
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        panels, scale = ctx.saved_tensors
        for_x = for_bias = None
        if ctx.needs_input_grad[0]:
            weight = dequantize_weight(panels, scale, ctx.in_features, ctx.out_features)
            for_x = (gradient.to(torch.float32) @ weight).to(gradient.dtype)
        if ctx.needs_input_grad[4]:
            rows = gradient.reshape(-1, ctx.out_features)
            for_bias = rows.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return for_x, None, None, None, for_bias, None, None, None
