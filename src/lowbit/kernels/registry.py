"""Where kernels make themselves known: a decorator, and no list to keep by hand."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache

from lowbit.kernels.micro_kernel import MicroKernel

_micro_kernels: list[MicroKernel] = []


def micro_kernel(
    *instruction_sets: str,
) -> Callable[[type[MicroKernel]], type[MicroKernel]]:
    """Register a MicroKernel class for the instruction sets that it is written for."""

    def register(cls: type[MicroKernel]) -> type[MicroKernel]:
        _micro_kernels.extend(cls(name) for name in instruction_sets)
        return cls

    return register


@cache
def micro_kernels() -> tuple[MicroKernel, ...]:
    """All micro-kernels, the preferred first, after importing every file of kernels/cpu."""
    from lowbit.kernels import cpu

    for module in pkgutil.iter_modules(cpu.__path__):
        importlib.import_module(f"{cpu.__name__}.{module.name}")
    return tuple(sorted(_micro_kernels, key=lambda kernel: -kernel.preference))
