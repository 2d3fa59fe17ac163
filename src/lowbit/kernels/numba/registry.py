"""Where the steps make themselves known: a decorator, and no list to keep by hand."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowbit.kernels.numba.operations import Bytes, Layout, check_operands
from lowbit.registry import Registry

Kernel = Callable[[Bytes, Bytes, NDArray[np.int32]], None]


@dataclass(frozen=True)
class Uint4Step:
    """A kernel of the ladder.

    step: its place, from 1. kernel: a function under numba.njit of a, b and out: int32 [M, N],
    which it fills. layout: how it takes a and b.
    """

    name: str
    step: int
    kernel: Kernel
    layout: Layout

    @property
    def idea(self) -> str:
        """The first line of the kernel's docstring, without its full stop."""
        return (inspect.getdoc(self.kernel) or "").partition("\n")[0].rstrip(".")

    def prepare(self, a: Bytes, b: Bytes) -> Callable[[], NDArray[np.int32]]:
        """The product as a call: arranges the operands now, compiles when first called.

        a: uint8 [M, K], b: uint8 [N, K], of values 0 to 15. The call returns a new int32 [M, N].
        TypeError or ValueError as `check_operands`.
        """
        check_operands(a, b)
        return partial(_multiply, self.kernel, *self.layout.arrange(a, b), (len(a), len(b)))


def _multiply(kernel: Kernel, a: Bytes, b: Bytes, shape: tuple[int, int]) -> NDArray[np.int32]:
    out = np.empty(shape, np.int32)
    kernel(a, b, out)
    return out


_steps: Registry[Uint4Step] = Registry("step of uint4 products", "lowbit.kernels.numba")


def uint4_step(step: int, layout: Layout) -> Callable[[Any], Any]:
    """Register a function under numba.njit as a step.

    ValueError if the step is taken by another one.
    """

    def register(kernel: Any) -> Any:
        _steps.add(str(step), Uint4Step(kernel.__name__, step, kernel, layout))
        return kernel

    return register


def uint4_steps() -> tuple[Uint4Step, ...]:
    """All steps from the lowest. ModuleNotFoundError if Numba or jaxtyping is not installed."""
    return tuple(sorted(_steps, key=lambda one: one.step))
