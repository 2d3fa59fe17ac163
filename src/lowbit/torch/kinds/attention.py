"""nn.MultiheadAttention, which holds the weights of three projections in one."""

from __future__ import annotations

from torch import nn

from lowbit.torch.kinds.kind import QuantizedModule, kinds

_NAMES = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


@kinds.register("MultiheadAttention")
class QuantizedMultiheadAttention(QuantizedModule, nn.MultiheadAttention):
    """What `quantize_` turns an `nn.MultiheadAttention` into. Its forward is PyTorch's own.

    The projections of queries, keys and values are quantized; the one at the end is a linear layer
    of its own, `out_proj`. The products of attention itself stay in float.
    """

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        return type(module) is nn.MultiheadAttention

    @classmethod
    def weight_names(cls, module: nn.Module) -> tuple[str, ...]:
        return tuple(name for name in _NAMES if module._parameters.get(name) is not None)
