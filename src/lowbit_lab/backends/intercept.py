"""Launches of Triton that a program makes, given to somebody else."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from lowbit.kernels.triton.fast import launch
from lowbit_lab.languages.triton import TritonKernel

OnGpu = Callable[[Callable[[], Any], Any, Sequence[int], Mapping[str, Any]], Any]
"""Is given what makes a launch on a GPU, the kernel, the grid, and all arguments by name."""


@contextlib.contextmanager
def launches(run: launch.Runner, on_gpu: OnGpu | None = None) -> Iterator[None]:
    """Within it, a launch of Triton with CPU tensors goes to `run`, an autotuned one in its first
    configuration; who asks for a compiled kernel gets a stand-in. One with a GPU's goes to `on_gpu`
    if there is one, but not those that look for the best configuration."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    tuning = list[Any]()

    def replaced(method: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
        def start(self: Any, *args: Any, **named: Any) -> Any:
            tensors = (getattr(one, "base", one) for one in tree_iter((args, named)))
            with torch._C.DisableTorchFunction():  # modes may say what is not so
                cuda = any(isinstance(one, Tensor) and one.is_cuda for one in tensors)
            if not cuda:
                return instead(self, *args, **named)
            launched = partial(method, self, *args, **named)
            if on_gpu is None or tuning or instead is not start_on_cpu or named["warmup"]:
                return launched()
            arguments, grid = arguments_of_launch(self, args, named), named["grid"]
            dims: Any = grid(arguments) if callable(grid) else grid
            return on_gpu(launched, self, dims, arguments)

        return start

    def tried(method: Callable[..., Any]) -> Callable[..., Any]:
        def bench(self: Any, *args: Any, **named: Any) -> Any:
            tuning.append(self)
            try:
                return method(self, *args, **named)
            finally:
                tuning.pop()

        return bench

    def start_on_cpu(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        if not warmup:
            arguments = arguments_of_launch(self, args, named)
            dims: Any = grid(arguments) if callable(grid) else grid
            if 0 not in dims:
                run(self, dims, arguments)
        return StandIn(self)

    with contextlib.ExitStack() as stack:
        for kind, instead in (
            (JITFunction, start_on_cpu),
            (InterpretedFunction, start_on_cpu),
            (Autotuner, _first_configuration),
        ):
            stack.enter_context(patch.object(kind, "run", replaced(kind.run, instead)))
        stack.enter_context(patch.object(Autotuner, "_bench", tried(Autotuner._bench)))
        yield


def _first_configuration(self: Any, *args: Any, **named: Any) -> Any:
    """Instead of Autotuner.run: the first configuration that it would try."""
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    configs = self.prune_configs(named) if len(self.configs) > 1 else self.configs
    self.best_config = config = configs[0]
    if config.pre_hook is not None:
        config.pre_hook({**self.nargs, **named, **config.all_kwargs()})
    return self.fn.run(*args, **named, **config.all_kwargs())


class StandIn:
    """What a launch returns instead of a compiled kernel. Its figures are nobody's: they only let
    a host go on that computes an occupancy from them."""

    n_regs, n_spills = 64, 0
    metadata = SimpleNamespace(shared=1 << 14, num_warps=4)

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def _init_handles(self) -> None:
        pass

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return self._kernel[grid]


def arguments_of_launch(
    kernel: Any, args: Sequence[Any], named: Mapping[str, Any]
) -> dict[str, Any]:
    """All parameters by name: given, of the first configuration, or by default; without what is
    for the compiler. TypeError if one is missing."""
    launched = TritonKernel.of(kernel)
    signature = inspect.signature(launched.text)
    known = {name: value for name, value in named.items() if name in signature.parameters}
    bound = signature.bind_partial(*args, **{**launched.constants, **known})
    bound.apply_defaults()
    given = launched.decided(bound.arguments)
    missing = [name for name in signature.parameters if name not in given]
    if missing:
        raise TypeError(f"{launched.name} is launched without {', '.join(missing)}")
    return {name: given[name] for name in signature.parameters}
