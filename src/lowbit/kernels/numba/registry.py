"""Where the rungs make themselves known: a decorator, and no list to keep by hand."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowbit.kernels.numba.operations import Bytes, Layout, check_operands

Kernel = Callable[[Bytes, Bytes, NDArray[np.int32]], None]


@dataclass(frozen=True)
class Rung:
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


_rungs: dict[int, Rung] = {}


def rung(step: int, layout: Layout) -> Callable[[Any], Any]:
    """Register a function under numba.njit as a rung.

    ValueError if the step is taken by another one.
    """

    def register(kernel: Any) -> Any:
        name = kernel.__name__
        taken = _rungs.setdefault(step, Rung(name, step, kernel, layout))
        if taken.name != name:
            raise ValueError(f"step {step} is taken by {taken.name}; give {name} another one")
        return kernel

    return register


@cache
def rungs() -> tuple[Rung, ...]:
    """All rungs from the lowest, after importing every file of kernels/numba.

    ModuleNotFoundError if Numba or jaxtyping is not installed.
    """
    from lowbit.kernels import numba

    for module in pkgutil.iter_modules(numba.__path__):
        importlib.import_module(f"{numba.__name__}.{module.name}")
    return tuple(_rungs[step] for step in sorted(_rungs))
