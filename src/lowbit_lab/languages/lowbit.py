"""lowbit's own kernels, run by their interpreter on memory that sees every access, and compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

import lowbit
from lowbit import isa as instruction_sets
from lowbit.isa.instruction import Instruction
from lowbit.isa.instruction_set import InstructionSet
from lowbit.isa.types import Pointer, s64
from lowbit.isa.value import Register, Value
from lowbit.jit import interpret
from lowbit.jit.kernel import Kernel
from lowbit_lab.backends.backend import Variant
from lowbit_lab.backends.kernel import KernelBackend
from lowbit_lab.backends.language import languages
from lowbit_lab.compare import assembly
from lowbit_lab.compare.built import Built
from lowbit_lab.compare.problem import Problem
from lowbit_lab.run.bind import Parameter, TensorArgument
from lowbit_lab.run.memory import Lanes, Memory
from lowbit_lab.run.registers import RegisterWatch
from lowbit_lab.run.tensor import CheckedTensor
from lowbit_lab.run.trace import Grid, Program


@dataclass(frozen=True)
class CpuKernel:
    """A lowbit kernel for the instruction sets that it is written for, which the machine need not
    have, and with its static arguments, or a function that makes them from the arguments of a run.
    An item of a parallel region is what a program is elsewhere.

    A pointer that is no tensor of the specification, scratch for example, is given as an array, a
    function of the sizes that makes one, or None where the text does not use it. One that is an
    input in another layout is given as a `lowbit_lab.Packed`. ValueError for an unknown set.
    """

    kernel: Kernel
    isa: str | tuple[str, ...] = "generic"
    static: Mapping[str, Any] | Callable[[Mapping[str, Any]], Mapping[str, Any]] = field(
        default_factory=dict[str, Any]
    )

    def __post_init__(self) -> None:
        list(map(instruction_sets.named, self.sets))

    @property
    def sets(self) -> tuple[str, ...]:
        """The names of the sets that it is written for."""
        return (self.isa,) if isinstance(self.isa, str) else self.isa

    @property
    def chosen(self) -> InstructionSet:
        """The set that it is compiled for: the best of those that run here, or below the one that
        LOWBIT_ISA forces; without such the first that it is written for."""
        have = instruction_sets.chain(instruction_sets.active())
        return next(
            (one for one in have if one.name in self.sets), instruction_sets.named(self.sets[0])
        )

    def static_at(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The static arguments for these arguments."""
        return dict(self.static(arguments) if callable(self.static) else self.static)


@languages.register("lowbit")
@dataclass(frozen=True, kw_only=True)
class LowbitKernel(KernelBackend):
    """A CpuKernel, or a kernel alone as one."""

    asked: CpuKernel

    title = "lowbit"
    written = "a lowbit kernel"

    @classmethod
    def takes(cls, kernel: Any) -> bool:
        return isinstance(kernel, (Kernel, CpuKernel))

    @staticmethod
    def asked_of(kernel: Kernel | CpuKernel) -> CpuKernel:
        """The kernel with its instruction set."""
        return CpuKernel(kernel) if isinstance(kernel, Kernel) else kernel

    @classmethod
    def function(cls, kernel: Any) -> FunctionType:
        return cls.asked_of(kernel).kernel.text

    @classmethod
    def names(cls, kernel: Any) -> Sequence[str]:
        return [*cls.asked_of(kernel).kernel.types]

    @classmethod
    def of(cls, kernel: Any) -> Self:
        asked = cls.asked_of(kernel)
        room = Path(interpret.__file__).parent
        return cls(
            text=asked.kernel.text,
            description=f"lowbit {lowbit.__version__} for {asked.chosen.name}",
            parameters=tuple(map(Parameter, asked.kernel.types)),
            machinery=(str(room), str(room.parent / "isa"), contextlib.__file__),
            asked=asked,
        )

    def run(
        self, memory: Memory, arguments: Mapping[str, Any], programs: Sequence[Program], grid: Grid
    ) -> None:
        """Run the whole text once; it makes its programs itself."""
        machine = _CheckedInterpreter(self.asked.chosen, memory)
        values: list[Value] = []
        for name, type_ in self.asked.kernel.types.items():
            given = arguments[name]
            if isinstance(given, TensorArgument):
                assert isinstance(type_, Pointer)
                region = _Region(memory.tensors[given.name], memory)
                values.append(machine.pointing(region, type_.element))
            elif isinstance(type_, Pointer):
                array = np.zeros(0, type_.element.numpy) if given is None else given
                values.append(machine.pointer(name, array, type_.element))
            else:
                values.append(machine.constant(given, type_))
        memory.begin((0, 0))
        with np.errstate(all="ignore"):
            self.text(machine, *values, **self.asked.static_at(arguments))

    @classmethod
    def compile(cls, variant: Variant, problem: Problem, sm: int) -> Built:
        asked = cls.asked_of(variant.kernel)
        static = asked.static_at(cls.arguments(variant, problem, problem.arrays(variant)))
        isa = asked.chosen
        return Built(
            *cls.source(variant.kernel),
            made_by=f"lowbit for {isa.name}",
            code=assembly.parse(asked.kernel.assembly(isa, **static)),
        )

    @classmethod
    def call(
        cls, variant: Variant, built: Built, problem: Problem, arrays: Mapping[str, Any]
    ) -> Callable[[], object]:
        """RuntimeError if it is written for no set that this machine has, or that is forced."""
        given = cls.arguments(variant, problem, arrays)
        asked, best = cls.asked_of(variant.kernel), instruction_sets.active()
        if asked.chosen not in instruction_sets.chain(best):
            raise RuntimeError(
                f"it is written for {' and '.join(asked.sets)}, and this is {best.name}"
            )
        program = asked.kernel.program(asked.chosen, **asked.static_at(given))
        values: Sequence[Any] = [*given.values()]
        return lambda: program(1, *values)


class _CheckedInterpreter(interpret.Interpreter):
    """An interpreter whose pointers lead to a Memory of the lab; regions and items are programs.

    Where the memory has a recorder, it also gets to know registers and tiles.
    """

    def __init__(self, isa: InstructionSet, memory: Memory) -> None:
        super().__init__(isa)
        self._memory = memory
        self._regions = 0
        self._watch: RegisterWatch | None = None
        if memory.recorder is not None:
            self._watch = RegisterWatch(memory, memory.recorder, isa)

    def execute(self, instruction: Instruction, operands: tuple[Any, ...]) -> Value | None:
        if self._watch is None:
            return super().execute(instruction, operands)
        touched = {
            number: state.payload
            for number, state in self._tiles.items()
            if any(operand is state for operand in operands)
        }
        with self._watch.instruction(instruction.name, touched):
            return super().execute(instruction, operands)

    def _register(self, initial: Value) -> Register:
        return super()._register(initial) if self._watch is None else self._watch.variable(initial)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        with super().scope(), self._body():
            yield

    def range(
        self, start: Value | int, stop: Value | int, step: Value | int = 1
    ) -> Iterator[Value]:
        for i in super().range(start, stop, step):
            with self._body():
                yield i

    def when(self, condition: Value) -> Iterator[None]:
        for _ in super().when(condition):
            with self._body():
                yield

    def parallel(self, items: Value) -> Iterator[Value]:
        self._regions += 1
        region = self._regions
        self._memory.barrier()
        for item in range(int(items.payload)):
            self._memory.begin((region, item))
            with self._body():
                yield Value(self, s64, item)
        self._memory.barrier()
        self._memory.begin((region, -1))

    def _body(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._watch is None else self._watch.body()


class _Region:
    """What an address of the interpreter leads to: a tensor of the lab, which judges every access.

    Bytes are loaded and stored as the tensor's elements, where they are whole ones.
    """

    def __init__(self, tensor: CheckedTensor, memory: Memory) -> None:
        self._tensor, self._memory = tensor, memory

    def load(self, offset: int, size: int) -> NDArray[np.uint8]:
        lanes, dtype = self._lanes(offset, size)
        return self._memory.load(lanes, np.zeros(lanes.offsets.shape, dtype)).view(np.uint8)

    def store(self, offset: int, values: NDArray[np.uint8]) -> None:
        lanes, dtype = self._lanes(offset, len(values))
        self._memory.store(lanes, np.ascontiguousarray(values).view(dtype))

    def _lanes(self, offset: int, size: int) -> tuple[Lanes, np.dtype[Any]]:
        whole = offset % self._tensor.itemsize == 0 and size % self._tensor.itemsize == 0
        dtype = self._tensor.dtype if whole else np.dtype(np.uint8)
        offsets = offset + np.arange(0, size, dtype.itemsize, dtype=np.int64)
        return Lanes(self._tensor, offsets), dtype
