"""lowbit's own kernels, run by their interpreter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

import lowbit
from lowbit import isa as instruction_sets
from lowbit.isa.types import Pointer
from lowbit.isa.value import Value
from lowbit.jit import interpret
from lowbit.jit.kernel import Kernel
from lowbit.lab.backends.backend import backends
from lowbit.lab.backends.kernel import KernelBackend
from lowbit.lab.run.bind import Parameter, TensorArgument
from lowbit.lab.run.cpu import CheckedInterpreter
from lowbit.lab.run.memory import Memory
from lowbit.lab.run.program import Grid, Program


@backends.register("lowbit")
@dataclass(frozen=True)
class CpuKernel(KernelBackend):
    """A lowbit kernel for one instruction set, which the machine need not have, and with its
    static arguments, or a function that makes them from the arguments of a run. An item of a
    parallel region is what a program is elsewhere.

    A pointer that is no tensor of the specification, scratch for example, is given as an array, a
    function of the sizes that makes one, or None where the text does not use it. One that is an
    input in another layout is given as a `Packed` of lab/run/bind.py.
    """

    kernel: Kernel
    isa: str = "generic"
    static: Mapping[str, Any] | Callable[[Mapping[str, Any]], Mapping[str, Any]] = field(
        default_factory=dict[str, Any]
    )

    needs_grid = False

    @classmethod
    def takes(cls, kernel: Any) -> bool:
        return isinstance(kernel, (Kernel, CpuKernel))

    @classmethod
    def of(cls, kernel: Any) -> Self:
        return cls(kernel) if isinstance(kernel, Kernel) else kernel

    @property
    def text(self) -> Callable[..., None]:
        return self.kernel.text

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def description(self) -> str:
        return f"lowbit {lowbit.__version__} for {self.isa}"

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The run-time parameters."""
        return tuple(Parameter(name) for name in self.kernel.types)

    @property
    def machinery(self) -> tuple[str, ...]:
        room = Path(interpret.__file__).parent
        return (str(room), str(room.parent / "isa"), contextlib.__file__)

    def run(
        self, memory: Memory, arguments: Mapping[str, Any], programs: Sequence[Program], grid: Grid
    ) -> None:
        """Run the whole text once; it makes its programs itself."""
        machine = CheckedInterpreter(instruction_sets.named(self.isa), memory)
        values: list[Value] = []
        for name, type_ in self.kernel.types.items():
            given = arguments[name]
            if isinstance(given, TensorArgument):
                assert isinstance(type_, Pointer)
                values.append(machine.checked(memory.tensors[given.name], type_.element))
            elif isinstance(type_, Pointer):
                array = np.zeros(0, type_.element.numpy) if given is None else given
                values.append(machine.pointer(name, array, type_.element))
            else:
                values.append(machine.constant(given, type_))
        static = self.static(arguments) if callable(self.static) else self.static
        memory.begin((0, 0))
        with np.errstate(all="ignore"):
            self.kernel.text(machine, *values, **static)
