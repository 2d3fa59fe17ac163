"""`QuantizedLinear`: a linear layer whose weight is of integers, run by lowbit's kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lowbit.torch.functional.linear import linear
from lowbit.torch.kinds.kind import QuantizedModule, kinds


@kinds.register("Linear")
class QuantizedLinear(QuantizedModule, nn.Linear):  # pyright: ignore[reportIncompatibleMethodOverride]
    """What `quantize_` turns an `nn.Linear` into. It is not constructed directly.

    Input [..., in_features] of float32, bfloat16 or float16, any strides; output
    [..., out_features] of the same dtype, under autocast of autocast's. What becomes of the input
    on the way is what `config` says; the arithmetic is that of `lowbit.linear_dynamic` or
    `lowbit.linear_weight_only`.

    The weight is frozen. Gradients pass to the input and to the bias as if the layer were
    `linear(x, weight.dequantize(), bias)` (the straight-through estimator: Bengio, Léonard,
    Courville 2013, arXiv:1308.3432).
    """

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        # The second is what nn.MultiheadAttention ends with.
        known = type(module) in (nn.Linear, NonDynamicallyQuantizableLinear)
        return known and module.in_features > 0 and module.out_features > 0  # type: ignore[operator]

    def forward(self, input: Tensor) -> Tensor:
        # Straight to the dictionary: nn.Module's attribute look-up costs a microsecond here.
        parameters: Any = self._parameters
        return linear(input, parameters["weight"], parameters["bias"], self.activations)
