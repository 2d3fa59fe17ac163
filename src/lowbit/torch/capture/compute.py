"""Operators of a graph computed by PyTorch in float32: for calibration, which asks for no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.graph.evaluate import Compute
from lowbit.graph.graph import Node
from lowbit.graph.operator import Array, operators
from lowbit.graph.operators.attention import diagonal_of

_STEPS: dict[str, Callable[..., Tensor]] = {
    "relu": F.relu,
    "clamp": torch.clamp,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "hardswish": F.hardswish,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def _product(function: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """A product, followed by the post-operations of its node."""

    def computed(
        node: Node, x: Tensor, weight: Tensor, bias: Any = None, residual: Any = None
    ) -> Tensor | None:
        made = function(node, x, weight, bias)
        for name, *numbers in node.get("post_ops", ()) if made is not None else ():
            made = made + residual if name == "residual" else _STEPS[name](made, *numbers)
        return made

    return computed


def _conv(node: Node, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    rank = x.dim() - 2
    pads = tuple(node.get("pads", (0,) * 2 * rank))
    if node.get("auto_pad", "NOTSET") != "NOTSET" or rank not in _CONVOLUTIONS:
        return None
    if pads[:rank] != pads[rank:]:
        ends = zip(pads[:rank][::-1], pads[rank:][::-1], strict=True)
        x, pads = F.pad(x, [end for pair in ends for end in pair]), (0,) * rank
    ones = (1,) * rank
    strides, dilations = node.get("strides", ones), node.get("dilations", ones)
    groups = node.get("group", 1)
    return _CONVOLUTIONS[rank](x, weight, bias, strides, pads[:rank], dilations, groups)


def _linear(node: Node, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    return F.linear(x, weight, bias) if node.get("activations") is None else None


def _attention(node: Node, q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor | None:
    diagonal = diagonal_of(node, q.shape[-2], k.shape[-2])  # PyTorch's is always 0
    if mask is not None or diagonal:  # rows that see nothing are another thing in PyTorch
        return None
    how = {"is_causal": diagonal is not None, "scale": node.get("scale")}
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **how)


def _gelu(node: Node, x: Tensor) -> Tensor:
    return F.gelu(x, approximate=node.get("approximate", "none"))


def _layer_norm(node: Node, x: Tensor, scale: Tensor, bias: Any = None) -> Tensor | None:
    if node.get("axis", -1) % x.dim() != x.dim() - scale.dim():
        return None
    return F.layer_norm(x, scale.shape, scale, bias, node.get("epsilon", 1e-5))


_TABLE: dict[str, Callable[..., Tensor | None]] = {
    "Attention": _attention,
    "Conv": _product(_conv),
    "Gelu": _gelu,
    "LayerNormalization": _layer_norm,
    "Linear": _product(_linear),
    "MatMul": lambda node, a, b: torch.matmul(a, b),
    "Silu": lambda node, x: F.silu(x),
    "Softmax": lambda node, x: torch.softmax(x, node.get("axis", -1)),
}


def _faster(op: str, function: Callable[..., Tensor | None]) -> Compute:
    def compute(node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        if all(one is None or one.dtype in (np.float32, bool) for one in inputs):
            tensors = [None if one is None else _tensor(one) for one in inputs]
            made = function(node, *tensors)
            if made is not None:
                return (made.numpy(),)
        return operators.get(op).compute(node, *inputs)

    return compute


def _tensor(array: Array) -> Tensor:
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


COMPUTE: dict[str, Compute] = {op: _faster(op, function) for op, function in _TABLE.items()}
"""For `evaluate(compute=...)`. Where PyTorch has no such function, the operator's own serves."""
