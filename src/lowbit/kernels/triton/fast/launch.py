"""How a kernel is started: on the GPU, or in an interpreter that somebody above has put in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

Grid = tuple[int, ...]
Runner = Callable[[Any, Grid, Mapping[str, Any]], None]

_runner: ContextVar[Runner | None] = ContextVar("runner", default=None)

# What the host's compiler does with a·b + c, said aloud: Triton's default changes in 3.10.
_ALWAYS = {"enable_fp_fusion": True}


@contextmanager
def running(runner: Runner) -> Iterator[None]:
    """Within it, kernels on CPU tensors are handed to `runner(kernel, grid, arguments)`."""
    token = _runner.set(runner)
    try:
        yield
    finally:
        _runner.reset(token)


def interpreted() -> bool:
    """Whether kernels on CPU tensors can be run here."""
    return _runner.get() is not None


def launch(kernel: Any, grid: Grid, arguments: Mapping[str, Any], **options: Any) -> None:
    """Start a function under triton.jit.

    arguments: every parameter by name, tensors as torch tensors, constexprs too. options: what
    the compiler is told (num_warps, num_stages, ...). An empty grid starts nothing. RuntimeError
    for tensors that are not on a GPU, outside of `running`.
    """
    if 0 in grid:
        return
    # A tuple begins with its tensor, a descriptor (triton.tools.tensor_descriptor) has a `base`.
    firsts = (one[0] if isinstance(one, tuple) else one for one in arguments.values())
    tensors = (getattr(one, "base", one) for one in firsts)
    device = next(one.device for one in tensors if isinstance(one, Tensor))
    if device.type == "cuda":
        other = device.index != torch.cuda.current_device()
        with torch.cuda.device(device) if other else nullcontext():
            kernel[grid](**arguments, **_ALWAYS, **options)
        return
    runner = _runner.get()
    if runner is None:
        raise RuntimeError(
            f"this kernel needs tensors on a GPU, got one on {device}; move them with .cuda(), or "
            "run it in the interpreter: with lowbit.lab.interpreter(): ..."
        )
    runner(kernel, grid, arguments)


@dataclass(frozen=True)
class Gpu:
    """What of a GPU decides which kernel serves a call and how it is cut: the compute capability
    as one number, 90 for 9.0, and how many multiprocessors there are."""

    capability: int
    multiprocessors: int

    @property
    def assembly(self) -> bool:
        """Whether PTX can be written into kernels: not where they are interpreted."""
        return self.capability >= 80

    def __str__(self) -> str:
        if self == INTERPRETER:
            return "the interpreter"
        return f"sm_{self.capability} with {self.multiprocessors} multiprocessors"


INTERPRETER = Gpu(0, 1)
"""A CPU, where programs run one by one."""


@cache
def _by_index(index: int) -> Gpu:
    found = torch.cuda.get_device_properties(index)
    return Gpu(10 * found.major + found.minor, found.multi_processor_count)


def gpu_of(device: torch.device) -> Gpu:
    """What is known of a device."""
    if device.type != "cuda":
        return INTERPRETER
    return _by_index(torch.cuda.current_device() if device.index is None else device.index)
