"""The Conv1D of transformers, which GPT-2 has: a linear layer whose weight is [in, out]."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lowbit.torch.functional.linear import linear
from lowbit.torch.kinds.kind import QuantizedModule, kinds


@kinds.register("Conv1D")
class QuantizedConv1D(QuantizedModule):
    """What `quantize_` turns a `transformers.pytorch_utils.Conv1D` into: y = x · weight + bias.

    Input [..., nx], output [..., nf]; all else is as for QuantizedLinear.
    """

    transposed = True

    nf: int
    nx: int

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        # By name, since transformers may not be there.
        known = type(module).__module__, type(module).__qualname__
        return known == ("transformers.pytorch_utils", "Conv1D")

    def forward(self, x: Tensor) -> Tensor:
        parameters: Any = self._parameters
        return linear(x, parameters["weight"], parameters["bias"], self.activations)

    def extra_repr(self) -> str:
        return f"nf={self.nf}, nx={self.nx}, {self.config}"
