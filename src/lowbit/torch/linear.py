"""`QuantizedLinear`: a linear layer whose weight is of integers, run by lowbit's kernels."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor, nn

from lowbit.torch.config import QuantizeConfig
from lowbit.torch.functional.linear import linear
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
        parameters: Any = self._parameters
        return linear(input, parameters["weight"], parameters["bias"], self.activations)

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
