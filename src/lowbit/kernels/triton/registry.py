"""Where the teaching kernels make themselves known: a decorator, and no list to keep by hand."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from lowbit.spec import Operation

Grid = Callable[[dict[str, Any]], Sequence[int]]


@dataclass(frozen=True)
class TeachingKernel:
    """A kernel, its operation, and its grid: a function of the sizes and block sizes."""

    kernel: Any
    operation: Operation
    grid: Grid


_teaching_kernels: dict[str, TeachingKernel] = {}


def teaches(operation: Operation, grid: Grid) -> Callable[[Any], Any]:
    """Register a function under triton.jit as the teaching kernel of an operation."""

    def register(kernel: Any) -> Any:
        _teaching_kernels[operation.name] = TeachingKernel(kernel, operation, grid)
        return kernel

    return register


@cache
def teaching_kernels() -> dict[str, TeachingKernel]:
    """All teaching kernels by the name of their operation, in the order of the exercises.

    ModuleNotFoundError if Triton is not installed.
    """
    from lowbit.kernels import triton
    from lowbit.spec.exercises import exercises

    for module in pkgutil.iter_modules(triton.__path__):
        importlib.import_module(f"{triton.__name__}.{module.name}")
    return {n: _teaching_kernels[n] for n in exercises.names() if n in _teaching_kernels}
