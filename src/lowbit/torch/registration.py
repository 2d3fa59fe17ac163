"""How an operator of `torch.ops.lowbit` is made of a kernel and of what serves CPU tensors.

Through `torch.library.Library` and not the `custom_op` decorator, whose calls cost some thirty
times as much.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache, partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lowbit.jit import verbose
from lowbit.kernels.triton import require_triton
from lowbit.kernels.triton.fast import launch
from lowbit.registry import Registry

specified_functions: Registry[partial[Tensor]] = Registry(
    "specified function", "lowbit.torch.functional"
)
"""Functions of tensors and the other arguments that they are given, by the name of the operation in
`lowbit.spec.operations`; `lowbit check gpu` checks them all."""

_library = torch.library.Library("lowbit", "FRAGMENT")


@cache
def _kernel(path: str) -> Callable[..., Any]:
    """A function of lowbit.kernels.triton.fast, "module.function"."""
    require_triton()
    module, _, name = path.partition(".")
    return getattr(importlib.import_module(f"lowbit.kernels.triton.fast.{module}"), name)


def _telling(run: Callable[..., Any], name: str, kernel: str) -> Callable[..., Any]:
    """A call that is told of. It is timed until the device has nothing left to do, since to call is
    only to start; not while a graph is captured, which cannot wait."""
    from lowbit.spec import DTYPES

    def told(*arguments: Any, **named: Any) -> Any:
        tensors = [one for one in (*arguments, *named.values()) if isinstance(one, Tensor)]
        device = tensors[0].device
        waits = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
        if waits:
            torch.cuda.synchronize(device)
        begin = perf_counter()
        result = run(*arguments, **named)
        if waits:
            torch.cuda.synchronize(device)
        seconds = perf_counter() - begin
        kinds = [str(one.dtype).removeprefix("torch.") for one in tensors]
        codes = ":".join(DTYPES[kind].code if kind in DTYPES else kind for kind in kinds)
        shapes = ":".join("x".join(map(str, one.shape)) for one in tensors)
        on = str(launch.gpu_of(device)).partition(" with ")[0]
        verbose.executed(verbose.line(name, codes, shapes, kernel.partition(".")[0], on), seconds)
        return result

    return told


def register(
    schema: str,
    *,
    cpu: Callable[..., Any],
    kernel: str | None = None,
    anywhere: bool = False,
    fake: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
    keep: Callable[..., None] | None = None,
) -> Any:
    """Define `lowbit::<schema>` and return the operator, to be called like a function.

    cpu: what serves CPU tensors. kernel: what serves CUDA tensors, as "module.function" of
    lowbit.kernels.triton.fast, imported at the first call; within `lowbit_lab.interpreter()` it
    serves CPU tensors too. Without one, CUDA tensors are refused, or, with `anywhere`, served by
    `cpu`, which computes by PyTorch alone. fake: empty tensors of the result's shape, dtype and
    strides; `cpu` on fake tensors, if not given. backward and keep: the derivative and what it
    needs, as torch.library.register_autograd takes them.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))

    def on_gpu(*arguments: Any, **named: Any) -> Any:
        if anywhere:
            return cpu(*arguments, **named)
        if kernel is None:
            raise NotImplementedError(
                f"lowbit::{name} has no kernel for CUDA; move the tensors with .cpu()"
            )
        return _kernel(kernel)(*arguments, **named)

    if verbose.LEVEL and kernel is not None:
        on_gpu = _telling(on_gpu, name, kernel)

    def on_cpu(*arguments: Any, **named: Any) -> Any:
        return (on_gpu if launch.interpreted() else cpu)(*arguments, **named)

    _library.impl(name, on_gpu, "CUDA")
    _library.impl(name, cpu if kernel is None else on_cpu, "CPU")
    torch.library.register_fake(f"lowbit::{name}", fake or cpu, lib=_library)
    if backward is not None:
        torch.library.register_autograd(
            f"lowbit::{name}", backward, setup_context=keep, lib=_library
        )
    return getattr(torch.ops.lowbit, name).default


def specified(operation: str, **given: Any) -> Callable[[Any], Any]:
    """Say that a function computes an operation of `lowbit.spec.operations`, with these arguments.

    Its parameters are named as the operation's inputs; the rest are `given`, or have defaults.
    """

    def register(function: Any) -> Any:
        specified_functions.add(operation, partial(function, **given))
        return function

    return register


def specified_gradients(operation: str, function: Callable[..., Tensor], *wanted: str) -> None:
    """Say that the gradients of a function are the operations OPERATION_dNAME, for these inputs;
    that of its result is an input `dz`."""

    def gradient(*, wanted: str, dz: Tensor, **inputs: Tensor) -> Tensor:
        leaf = inputs[wanted].detach().requires_grad_()
        return torch.autograd.grad(function(**{**inputs, wanted: leaf}), leaf, dz)[0]

    named = inspect.signature(gradient).parameters
    own = inspect.signature(function).parameters.values()
    listed = [*own, named["dz"], named["wanted"]]
    keywords = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in listed]
    gradient.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    gradient.__name__ = f"{function.__name__}_gradient"
    for name in wanted:
        specified(f"{operation}_d{name}", wanted=name)(gradient)
