"""nn.Embedding: a table whose rows are looked up."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lowbit.torch.functional.embedding import embedding
from lowbit.torch.kinds.kind import QuantizedModule, kinds


@kinds.register("Embedding")
class QuantizedEmbedding(QuantizedModule, nn.Embedding):
    """What `quantize_` turns an `nn.Embedding` into.

    Input of int32 or int64, any shape; output [..., embedding_dim], the rows as
    `weight.dequantize()` has them. The table is frozen.
    """

    multiplies = False

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        return type(module) is nn.Embedding and module.weight.numel() > 0

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        if module.max_norm is not None:
            return "max_norm changes the table in every call"
        return None

    def forward(self, input: Tensor) -> Tensor:
        parameters: Any = self._parameters
        return embedding(input, parameters["weight"])
