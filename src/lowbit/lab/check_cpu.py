"""lowbit's own kernels, run by their interpreter on memory that sees every access."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lowbit
from lowbit import isa as instruction_sets
from lowbit.isa.instruction import Instruction
from lowbit.isa.instruction_set import InstructionSet
from lowbit.isa.types import Pointer, Scalar, s64
from lowbit.jit import interpret
from lowbit.jit.interpret import Address, Interpreter
from lowbit.jit.kernel import Kernel
from lowbit.jit.value import Register, Value
from lowbit.lab.check_bind import Parameter, TensorArgument
from lowbit.lab.check_memory import Memory
from lowbit.lab.check_tensor import CheckedTensor
from lowbit.lab.record_registers import RegisterWatch
from lowbit.lab.trace import Program


@dataclass(frozen=True)
class CpuKernel:
    """A lowbit kernel for one instruction set, which the machine need not have, and with its
    static arguments, or a function that makes them from the arguments of a run. An item of a
    parallel region is what a program is elsewhere.

    A pointer that is no tensor of the specification, scratch for example, is given as an array, a
    function of the sizes that makes one, or None where the text does not use it. One that is an
    input in another layout is given as a `check_bind.Packed`.
    """

    kernel: Kernel
    isa: str = "generic"
    static: Mapping[str, Any] | Callable[[Mapping[str, Any]], Mapping[str, Any]] = field(
        default_factory=dict[str, Any]
    )
    constants: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.kernel.name

    @property
    def text(self) -> Callable[..., None]:
        """The function as it was written."""
        return self.kernel.text

    @property
    def description(self) -> str:
        """What runs it."""
        return f"lowbit {lowbit.__version__} for {self.isa}"

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The run-time parameters."""
        return tuple(Parameter(name) for name in self.kernel.types)

    @property
    def alternatives(self) -> tuple[Mapping[str, Any], ...]:
        """None: it says nothing of other values."""
        return ()

    def machinery(self) -> tuple[str, ...]:
        """The folders whose frames are not a kernel's text."""
        room = Path(interpret.__file__).parent
        return (str(room), str(room.parent / "isa"), contextlib.__file__)

    def run(
        self,
        memory: Memory,
        arguments: Mapping[str, Any],
        programs: Sequence[Program],
        grid: tuple[int, int, int],
    ) -> None:
        """Run the whole text once; it makes its programs itself."""
        machine = _CheckedInterpreter(instruction_sets.named(self.isa), memory)
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


class _CheckedInterpreter(Interpreter):
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

    def checked(self, tensor: CheckedTensor, element: Scalar) -> Value:
        """A pointer to a tensor's first element."""
        address = Address(_Region(tensor, self._memory), 0, element.numpy)
        return Value(self, Pointer(element), address)

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


class _Region(interpret.Memory):
    """What an Address of the interpreter refers to, for a tensor of the lab.

    The bounds are the lab's to judge, so here every byte counts as an element.
    """

    def __init__(self, tensor: CheckedTensor, memory: Memory) -> None:
        super().__init__(tensor.name, np.zeros(1, np.uint8))
        self.start = 1 << 40
        self.mine: Any = _Everywhere()
        self.bytes: Any = _Bytes(tensor, memory, self.start)


class _Everywhere:
    def __len__(self) -> int:
        return 1 << 62

    def __getitem__(self, span: slice) -> np.bool_:
        return np.True_


class _Bytes:
    """Bytes that are loaded and stored as the elements of a tensor."""

    def __init__(self, tensor: CheckedTensor, memory: Memory, start: int) -> None:
        self._tensor, self._memory, self._start = tensor, memory, start

    def _lanes(self, span: slice) -> tuple[NDArray[np.int64], NDArray[np.bool_], np.dtype[Any]]:
        first, size = span.start - self._start, span.stop - span.start
        whole = first % self._tensor.itemsize == 0 and size % self._tensor.itemsize == 0
        dtype = self._tensor.dtype if whole else np.dtype(np.uint8)
        offsets = first + np.arange(0, size, dtype.itemsize, dtype=np.int64)
        return offsets, np.ones(offsets.shape, bool), dtype

    def __getitem__(self, span: slice) -> NDArray[np.uint8]:
        offsets, active, dtype = self._lanes(span)
        blank = np.zeros(offsets.shape, dtype)
        loaded = self._memory.load(self._tensor, offsets, active, blank, False)
        return loaded.view(np.uint8)

    def __setitem__(self, span: slice, values: NDArray[np.uint8]) -> None:
        offsets, active, dtype = self._lanes(span)
        lanes = np.ascontiguousarray(values).view(dtype)
        self._memory.store(self._tensor, offsets, active, lanes, False)
