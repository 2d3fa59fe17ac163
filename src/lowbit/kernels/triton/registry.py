"""Where the teaching kernels make themselves known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lowbit.registry import Registry
from lowbit.spec import Operation

Grid = Callable[[dict[str, Any]], Sequence[int]]


@dataclass(frozen=True)
class TeachingKernel:
    """A kernel, its operation, and its grid: a function of the sizes and block sizes."""

    kernel: Any
    operation: Operation
    grid: Grid


_kernels: Registry[TeachingKernel] = Registry("teaching kernel", "lowbit.kernels.triton.exercises")


def teaches(operation: Operation, grid: Grid) -> Callable[[Any], Any]:
    """Register a function under triton.jit as the teaching kernel of an operation."""

    def register(kernel: Any) -> Any:
        _kernels.add(operation.name, TeachingKernel(kernel, operation, grid))
        return kernel

    return register


def teaching_kernels() -> dict[str, TeachingKernel]:
    """All teaching kernels by the name of their operation, in the order of the exercises.

    ModuleNotFoundError if Triton is not installed.
    """
    from lowbit.spec.exercises import exercises

    found = _kernels.load()
    return {name: found[name] for name in exercises.names() if name in found}
