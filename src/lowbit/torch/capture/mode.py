"""The modes that a model is captured in: eval, without gradients, outside of inference mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def ordinary(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of one that was made in inference mode, which export refuses."""
    return tensor.clone() if tensor.is_inference() else tensor


@contextmanager
def without_inference_tensors(model: nn.Module) -> Iterator[None]:
    """The model with copies of parameters and buffers made in inference mode; afterwards as it
    was."""
    copies: dict[int, Tensor] = {}
    before: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_inference():
                    before.append((tensors, name, tensor))
    for tensors, name, tensor in before:
        if id(tensor) not in copies:
            copy = tensor.clone()
            is_parameter = isinstance(tensor, nn.Parameter)
            copies[id(tensor)] = nn.Parameter(copy, False) if is_parameter else copy
        tensors[name] = copies[id(tensor)]
    try:
        yield
    finally:
        for tensors, name, tensor in before:
            tensors[name] = tensor


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, without gradients; afterwards as it was."""
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:  # without .eval(), which exported modules refuse
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
