"""Numba-CUDA kernels, run by Numba's CUDA simulator."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lowbit.lab.backends.backend import backends
from lowbit.lab.backends.kernel import KernelBackend
from lowbit.lab.run.bind import Parameter
from lowbit.lab.run.memory import Memory
from lowbit.lab.run.numba import run_blocks
from lowbit.lab.run.program import Grid, Program

_THREADS = {"threads": 32, "threads_y": 1, "threads_z": 1}


@backends.register("Numba")
@dataclass(frozen=True)
class NumbaKernel(KernelBackend):
    """A simulated kernel. Besides its own parameters it has `threads`, `threads_y`, `threads_z`:
    the size of a block, 32, 1 and 1 unless given; the grid is in blocks."""

    function: Callable[..., None]

    slow = True  # The simulator makes each thread one of Python.

    @classmethod
    def takes(cls, kernel: Any) -> bool:
        """Whether this is a function under numba.cuda.jit, compiled or simulated."""
        return type(kernel).__module__.startswith(("numba.cuda.", "numba_cuda."))

    @classmethod
    def of(cls, kernel: Any) -> Self:
        """RuntimeError, with what to do, if the kernel is not simulated."""
        if type(kernel).__name__ != "FakeCUDAKernel":
            raise RuntimeError(
                "a Numba kernel is checked in the CUDA simulator: set NUMBA_ENABLE_CUDASIM=1 "
                "before numba is imported, or run `lowbit check` on its file"
            )
        return cls(kernel.fn)

    @property
    def text(self) -> Callable[..., None]:
        return self.function

    @property
    def description(self) -> str:
        import numba

        return f"Numba {numba.__version__}'s CUDA simulator"

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The function's own, and the size of a block."""
        own = tuple(Parameter(name) for name in inspect.signature(self.function).parameters)
        return (*own, *(Parameter(name, True, size) for name, size in _THREADS.items()))

    @property
    def machinery(self) -> tuple[str, ...]:
        import numba

        return (str(Path(numba.__file__).parent), threading.__file__)

    def run(
        self, memory: Memory, arguments: Mapping[str, Any], programs: Sequence[Program], grid: Grid
    ) -> None:
        values = [value for name, value in arguments.items() if name not in _THREADS]
        block = tuple(int(arguments[name]) for name in _THREADS)
        run_blocks(self.function, memory, values, block, programs, grid)
