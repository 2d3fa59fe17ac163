"""nn.MultiheadAttention without the moves of its own way.

PyTorch's own forward puts the sequence before the batch and cuts queries, keys and values out of
one array; in a graph, that is some twenty nodes that copy. The same in the order in which the data
lies is a projection, three views, the attention and another projection.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowbit.torch.kinds import QuantizedMultiheadAttention

_PARTS = "q_proj_weight", "k_proj_weight", "v_proj_weight"


@contextmanager
def plain_attention(model: nn.Module) -> Iterator[None]:
    """Within, the model's nn.MultiheadAttention modules compute as `attend` does, where it can."""
    changed = [
        module
        for module in model.modules()
        if type(module) in (nn.MultiheadAttention, QuantizedMultiheadAttention)
        and "forward" not in vars(module)
    ]
    cut = [
        module
        for module in changed
        if isinstance(module, QuantizedMultiheadAttention) and module.in_proj_weight is not None
    ]
    for module in cut:  # a trace has no parts of a quantized weight
        for name, part in zip(_PARTS, module.in_proj_weight.detach().chunk(3), strict=True):
            module.register_parameter(name, nn.Parameter(part, requires_grad=False))
    for module in changed:
        module.forward = partial(attend, cast(nn.MultiheadAttention, module))
    try:
        yield
    finally:
        for module in changed:
            del module.forward
        for module in cut:
            for name in _PARTS:
                module.register_parameter(name, None)


def attend(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, *args: Any, **how: Any
) -> tuple[Tensor, Tensor | None]:
    """What `module.forward` gives of the same arguments."""
    names = "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal"
    given = dict(zip(names, args, strict=False)) | how
    masks = given.get("key_padding_mask"), given.get("attn_mask")
    odd = module.bias_k is not None or module.add_zero_attn or not module.batch_first
    odd = odd or all(one is not None for one in masks)
    if odd or given.get("need_weights", True) or query.dim() != 3:
        packed = module._qkv_same_embed_dim
        module._qkv_same_embed_dim = packed and _together(module, query, key, value)
        try:
            return nn.MultiheadAttention.forward(module, query, key, value, *args, **how)
        finally:
            module._qkv_same_embed_dim = packed
    batch, length, width = query.shape
    heads, size = module.num_heads, module.head_dim

    def by_head(x: Tensor) -> Tensor:
        return x.reshape(batch, x.shape[1], heads, size).transpose(1, 2)

    q, k, v = (by_head(one) for one in _projected(module, query, key, value))
    made = F.scaled_dot_product_attention(q, k, v, _mask(masks, batch, heads))
    made = made.transpose(1, 2).reshape(batch, length, width)
    return F.linear(made, module.out_proj.weight, module.out_proj.bias), None


def _mask(masks: tuple[Tensor | None, Tensor | None], batch: int, heads: int) -> Tensor | None:
    """A mask as scaled_dot_product_attention takes it, where true is what takes part."""
    padding, mask = masks
    if padding is not None:
        mask = padding[:, None, None, :]
    elif mask is not None and mask.dim() == 3:
        mask = mask.reshape(batch, heads, *mask.shape[1:])
    return ~mask if mask is not None and mask.dtype is torch.bool else mask


def _together(module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the weight of all projections is used: where they have one input, or where there are
    no parts of it."""
    return (query is key and key is value) or module.q_proj_weight is None


def _projected(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, ...]:
    weight, bias = module.in_proj_weight, module.in_proj_bias
    if query is key and key is value and weight is not None:
        return F.linear(query, weight, bias).chunk(3, -1)
    together = _together(module, query, key, value)
    weights = weight.chunk(3) if together else (getattr(module, name) for name in _PARTS)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    each = zip((query, key, value), weights, biases, strict=True)
    return tuple(F.linear(x, w, b) for x, w, b in each)
