"""The interpreting backend: a kernel text runs step by step on NumPy.

Every load and store is checked against the elements that its array really has, gaps between the
rows of a slice included, and can be recorded. It is slow and knows no instruction set of the
machine it runs on: an AMX kernel runs anywhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from lowbit.isa.instruction import Instruction
from lowbit.isa.instruction_set import InstructionSet
from lowbit.isa.tiles import TileState
from lowbit.isa.types import Pointer, Scalar, Type, Vector, s64, tile
from lowbit.isa.value import Register, Value
from lowbit.jit.builder import Builder
from lowbit.jit.memory import Access, Address, ArrayMemory, Memory


class Interpreter(Builder):
    """A Builder that runs the text at once, as one thread."""

    def __init__(self, isa: InstructionSet, trace: list[Access] | None = None) -> None:
        super().__init__(isa)
        self.trace = trace
        self.executed: dict[str, int] = defaultdict(int)

    def execute(self, instruction: Instruction, operands: tuple[Any, ...]) -> Value | None:
        _, payloads, result = self.typed(instruction, operands)
        self.executed[instruction.name] += 1
        value = instruction.meaning(*payloads)
        return None if result is None else Value(self, result, value)

    def _constant(self, value: float, type_: Type) -> Value:
        if isinstance(type_, Vector):
            lanes = np.full(type_.lanes, value).astype(type_.element.numpy)
            lanes.flags.writeable = False
            return Value(self, type_, lanes)
        assert isinstance(type_, Scalar)
        return Value(self, type_, int(value) if type_ == s64 else type_.numpy.type(value))

    def pointer(self, name: str, array: np.ndarray, element: Scalar) -> Value:
        """A pointer to the first element of an array."""
        return self.pointing(ArrayMemory(name, array, self.trace), element)

    def pointing(self, memory: Memory, element: Scalar) -> Value:
        """A pointer to where the offsets of a memory begin."""
        return Value(self, Pointer(element), Address(memory, 0, element.numpy))

    def advance(self, pointer: Value, elements: Value | int) -> Value:
        size = self._check_pointer(pointer).element.bytes
        moved = pointer.payload.moved_bytes(int(self.index(elements).payload) * size)
        return Value(self, pointer.type, moved)

    def reinterpret(self, pointer: Value, element: Scalar) -> Value:
        self._check_pointer(pointer)
        address = pointer.payload
        return Value(self, Pointer(element), Address(address.memory, address.offset, element.numpy))

    def thread(self) -> Value:
        return Value(self, s64, 0)

    def local(self, element: Scalar, count: int) -> Value:
        poison = np.full(count * element.bytes, 0xA5, np.uint8).view(element.numpy)
        return self.pointer("local", poison, element)

    def _register(self, initial: Value) -> Register:
        return Register(initial)

    def _tile(self, number: int) -> Value:
        return Value(self, tile, TileState())

    def range(
        self, start: Value | int, stop: Value | int, step: Value | int = 1
    ) -> Iterator[Value]:
        self._check_step(step)
        first, end, by = (int(self.index(v).payload) for v in (start, stop, step))
        for i in range(first, end, by):
            yield Value(self, s64, i)

    def when(self, condition: Value) -> Iterator[None]:
        if condition.payload:
            yield

    def parallel(self, items: Value) -> Iterator[Value]:
        for item in range(int(items.payload)):
            yield Value(self, s64, item)
