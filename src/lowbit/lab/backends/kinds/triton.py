"""Triton kernels, run by Triton's interpreter, and on a GPU by Triton itself."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lowbit.lab.backends.backend import backends
from lowbit.lab.backends.kernel import KernelBackend
from lowbit.lab.run.bind import Parameter
from lowbit.lab.run.memory import Memory
from lowbit.lab.run.program import Grid, Program
from lowbit.lab.run.triton import run_programs, triton_modules


@backends.register("Triton")
@dataclass(frozen=True)
class TritonKernel(KernelBackend):
    """A Triton kernel without its decorators.

    `constants` are those of the first configuration of triton.autotune, `alternatives` those of the
    others, `heuristics` the functions of triton.heuristics; `jitted` is what triton.jit made.
    """

    function: Callable[..., None]
    heuristics: Mapping[str, Callable[[Mapping[str, Any]], Any]]
    jitted: Any

    @classmethod
    def takes(cls, kernel: Any) -> bool:
        """Whether this is a function under triton.jit, perhaps autotuned."""
        return type(kernel).__module__.startswith("triton.")

    @classmethod
    def of(cls, kernel: Any) -> Self:
        """Unwrap what triton.jit, autotune and heuristics have wrapped."""
        configurations, heuristics = list[dict[str, Any]](), dict[str, Any]()
        jitted = kernel
        while not isinstance(kernel, types.FunctionType):
            configurations += [config.kwargs for config in getattr(kernel, "configs", ())]
            if type(kernel).__name__ == "Heuristics":
                heuristics |= kernel.values
            jitted, kernel = kernel, kernel.fn
        first, *others = configurations or [{}]
        return cls(kernel, heuristics, jitted, constants=first, alternatives=tuple(others))

    @property
    def text(self) -> Callable[..., None]:
        return self.function

    @property
    def description(self) -> str:
        return f"Triton {triton_modules()[0].__version__}"

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(
            Parameter(
                p.name,
                "constexpr" in str(p.annotation),
                None if p.default is inspect.Parameter.empty else p.default,
            )
            for p in inspect.signature(self.function).parameters.values()
        )

    def decided(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments after the heuristics."""
        made = dict(arguments)
        for name, choose in self.heuristics.items():
            made[name] = choose(made)
        return made

    @property
    def machinery(self) -> tuple[str, ...]:
        # The second is where the methods are that dataclasses make.
        return (str(Path(triton_modules()[0].__file__).parent), "<string>")

    def run(
        self, memory: Memory, arguments: Mapping[str, Any], programs: Sequence[Program], grid: Grid
    ) -> None:
        constants = {p.name for p in self.parameters if p.constant}
        decided = self.decided(arguments)
        run_programs(self.function, memory, decided, constants, programs, grid)

    @property
    def on_gpu(self) -> bool:
        # Under TRITON_INTERPRET=1 it is made to be interpreted, on a GPU's tensors too.
        return type(self.jitted).__name__ != "InterpretedFunction"

    def start(self, arguments: Mapping[str, Any], grid: Grid) -> None:
        self.jitted[grid](**self.decided(arguments))
