"""lowbit's own interpreter on memory that sees every access."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowbit.isa.instruction import Instruction
from lowbit.isa.instruction_set import InstructionSet
from lowbit.isa.types import Scalar, s64
from lowbit.isa.value import Register, Value
from lowbit.jit.interpret import Interpreter
from lowbit.lab.run.memory import Memory
from lowbit.lab.run.registers import RegisterWatch
from lowbit.lab.run.tensor import CheckedTensor


class CheckedInterpreter(Interpreter):
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
        return self.pointing(_Region(tensor, self._memory), element)

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
        offsets, active, dtype = self._lanes(offset, size)
        blank = np.zeros(offsets.shape, dtype)
        loaded = self._memory.load(self._tensor, offsets, active, blank, False)
        return loaded.view(np.uint8)

    def store(self, offset: int, values: NDArray[np.uint8]) -> None:
        offsets, active, dtype = self._lanes(offset, len(values))
        lanes = np.ascontiguousarray(values).view(dtype)
        self._memory.store(self._tensor, offsets, active, lanes, False)

    def _lanes(
        self, offset: int, size: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_], np.dtype[Any]]:
        whole = offset % self._tensor.itemsize == 0 and size % self._tensor.itemsize == 0
        dtype = self._tensor.dtype if whole else np.dtype(np.uint8)
        offsets = offset + np.arange(0, size, dtype.itemsize, dtype=np.int64)
        return offsets, np.ones(offsets.shape, bool), dtype
