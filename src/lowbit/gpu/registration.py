"""How an operator of `torch.ops.lowbit` is made of a kernel, a reference and a fake.

Through `torch.library.Library` and not the `custom_op` decorator, whose calls cost some thirty
times as much.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lowbit.kernels.triton.fast import launch


@dataclass(frozen=True)
class Specified:
    """A function of tensors that has a specification, and its other arguments."""

    function: Callable[..., torch.Tensor]
    given: Mapping[str, Any]


specified_functions: dict[str, Specified] = {}
"""By the name of the operation in `lowbit.spec.gpu`; `lowbit check gpu` checks them all."""

_library = torch.library.Library("lowbit", "FRAGMENT")


def register(
    schema: str,
    *,
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    fake: Callable[..., Any],
) -> Any:
    """Define `lowbit::<schema>` and return the operator, to be called like a function.

    kernel serves CUDA tensors; CPU tensors are served by `reference`, in plain PyTorch, or by
    `kernel` too within `lowbit.lab.interpreter()`. fake returns empty tensors of the result's
    shape, dtype and strides.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))

    def on_cpu(*arguments: Any, **named: Any) -> Any:
        served = kernel if launch.interpreted() else reference
        return served(*arguments, **named)

    _library.impl(name, kernel, "CUDA")
    _library.impl(name, on_cpu, "CPU")
    torch.library.register_fake(f"lowbit::{name}", fake, lib=_library)
    return getattr(torch.ops.lowbit, name).default


def differentiate(
    op: Any,
    backward: Callable[..., Any],
    setup_context: Callable[..., None],
) -> None:
    """Give an operator its derivative, as torch.library.register_autograd does."""
    torch.library.register_autograd(
        op._schema.name, backward, setup_context=setup_context, lib=_library
    )


def specified(operation: str, **given: Any) -> Callable[[Any], Any]:
    """Say that a function computes an operation of `lowbit.spec.gpu`, with these arguments.

    Its parameters are named as the operation's inputs; the rest are `given`, or have defaults.
    """

    def register(function: Any) -> Any:
        specified_functions[operation] = Specified(function, given)
        return function

    return register


def gradient(
    function: Callable[..., torch.Tensor], wanted: str, dz: torch.Tensor, **inputs: torch.Tensor
) -> torch.Tensor:
    """The gradient of one input of a function, given that of its result."""
    leaf = inputs[wanted].detach().requires_grad_()
    return torch.autograd.grad(function(**{**inputs, wanted: leaf}), leaf, dz)[0]
