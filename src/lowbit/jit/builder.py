"""The language of kernel texts: what a text can do besides calling instructions.

A text is a Python function whose first parameter `k` is a Builder. Plain Python loops and
conditions run while the kernel is generated (they unroll and specialise); `k.range`, `k.when` and
`k.parallel` are the ones that the machine runs:

    for i in k.range(0, n, 16): ...      a loop
    for _ in k.when(i < n): ...          the body runs if the condition holds
    for item in k.parallel(items): ...   items are shared out among threads; regions run in order

Items are cut into as many runs of neighbours as there are threads, at most RUNS. A thread begins
with a run of its own, the same in every call that it enters on the same processor, whose caches
then know it; whoever has done its own run helps with those of the others.

All three are generators: the compiler yields once and closes the block when the body is done, the
interpreter yields as often as the machine would. So a body must not `break` or `return`. A text
with parallel regions reads and writes operands only in them: outside there may be a thread that
comes when the call has returned (jit.team).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lowbit.isa.instruction import Instruction
from lowbit.isa.instruction_set import InstructionSet
from lowbit.isa.types import Pointer, Scalar, Type, Vector, element_of, s64
from lowbit.isa.value import Register, Value

MAX_REGIONS = 4  # of a kernel
RUNS = 16  # of items in a region


def item_size(elements: int, least: int, most: int) -> int:
    """How large items are: as many as a region has runs, if that lets them be of a good size."""
    return min(max(elements // RUNS, least), most)


class RegisterPressureError(Exception):
    """A kernel text asks for more registers or tiles than its instruction set has."""


def _signed(bits: int) -> tuple[int, int]:
    return -(2 ** (bits - 1)), 2 ** (bits - 1)


class Builder(ABC):
    """A backend: what it makes of a kernel text for one instruction set."""

    def __init__(self, isa: InstructionSet) -> None:
        self.isa = isa
        self._vector_registers = 0
        self._tiles: dict[int, Value] = {}
        self._results: dict[tuple[Instruction, tuple[Any, ...]], Type | None] = {}
        self._integers: dict[tuple[int, Type], Value] = {}

    # What the backends differ in.

    @abstractmethod
    def execute(self, instruction: Any, operands: tuple[Any, ...]) -> Value | None: ...
    @abstractmethod
    def _constant(self, value: float, type_: Type) -> Value: ...
    @abstractmethod
    def advance(self, pointer: Value, elements: Value | int) -> Value: ...
    @abstractmethod
    def reinterpret(self, pointer: Value, element: Scalar) -> Value: ...
    @abstractmethod
    def range(
        self, start: Value | int, stop: Value | int, step: Value | int = 1
    ) -> Iterator[Value]: ...
    @abstractmethod
    def when(self, condition: Value) -> Iterator[None]: ...
    @abstractmethod
    def local(self, element: Scalar, count: int) -> Value:
        """Scratch memory of this thread: `count` elements, 64-byte aligned, undefined at first."""

    @abstractmethod
    def _register(self, initial: Value) -> Register: ...
    @abstractmethod
    def _tile(self, number: int) -> Value: ...

    # What kernels alone may say, since threads enter them with a call's counters.

    def parallel(self, items: Value) -> Iterator[Value]:
        raise TypeError("k.parallel stands in kernels only")

    def thread(self) -> Value:
        """A number that no other thread of this call has, less than there are threads, and mostly
        the same in every call."""
        raise TypeError("k.thread stands in kernels only")

    # What they share.

    def index(self, value: Value | int) -> Value:
        """A Python int as an s64; a value as it is. TypeError for one of another type."""
        if not isinstance(value, Value):
            return self.constant(value, s64)
        if value.type != s64:
            raise TypeError(f"an s64 is expected, got {value.type}; convert it with .to(s64)")
        return value

    def constant(self, value: float, type_: Type) -> Value:
        """A number, of a vector's type in every lane. ValueError if the type does not hold it."""
        if type(value) is not int:  # -0.0 is another constant than 0.0, and equal
            self._check_constant(value, type_)
            return self._constant(value, type_)
        key = value, type_
        if key not in self._integers:
            self._check_constant(value, type_)
            self._integers[key] = self._constant(value, type_)
        return self._integers[key]

    def typed(self, instruction: Instruction, operands: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        """(operand types, payloads, result type) of one use; TypeError if it may not be."""
        types, payloads = [], []
        for operand in operands:
            has_type = type(operand) is Value
            types.append(operand.type if has_type else operand)
            payloads.append(operand.payload if has_type else operand)
        use = instruction, *types
        if use not in self._results:
            self._results[use] = self._result(*use)
        return types, payloads, self._results[use]

    def _result(self, instruction: Instruction, *types: Any) -> Type | None:
        if instruction.feature and instruction.feature not in self.isa.features:
            raise TypeError(
                f"{instruction.name} needs {instruction.feature}, which {self.isa.name} lacks"
            )
        try:
            return instruction.typing(*types)
        except TypeError as error:
            raise TypeError(f"{instruction.name}: {error}") from None

    @staticmethod
    def _check_constant(value: float, type_: Type) -> None:
        element = element_of(type_)
        if element.kind in "su":
            low, high = (0, 2**element.bits) if element.kind == "u" else _signed(element.bits)
            if not low <= value < high:
                raise ValueError(f"{value} is no {element}: from {low} to {high - 1}")

    @staticmethod
    def _check_step(step: Value | int) -> None:
        if isinstance(step, int) and step < 1:
            raise ValueError(f"the step of a k.range must be positive, got {step}")

    def zeros(self, element: Scalar, lanes: int) -> Value:
        """A vector of zeros."""
        return self.constant(0, Vector(element, lanes))

    def register(self, initial: Value) -> Register:
        """A variable, which loops may change. Vector ones are counted against the set's registers.

        RegisterPressureError where accumulators alone would leave none to work with.
        """
        if isinstance(initial.type, Vector):
            self._vector_registers += -(-initial.type.bytes // self.isa.vector_bytes)
            if self._vector_registers > self.isa.vector_registers - 2:
                raise RegisterPressureError(
                    f"{self._vector_registers} vector registers hold variables, and "
                    f"{self.isa.name} has {self.isa.vector_registers} in all"
                )
        return self._register(initial)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """The vector variables made inside are no longer counted after it."""
        before = self._vector_registers
        yield
        self._vector_registers = before

    def tile(self, number: int) -> Value:
        """The tile of that number; RegisterPressureError if the instruction set has none such."""
        if not 0 <= number < self.isa.tiles:
            raise RegisterPressureError(
                f"tile {number} is asked for, and {self.isa.name} has {self.isa.tiles} tiles"
            )
        if number not in self._tiles:
            self._tiles[number] = self._tile(number)
        return self._tiles[number]

    @staticmethod
    def _check_pointer(pointer: Value) -> Pointer:
        if not isinstance(pointer.type, Pointer):
            raise TypeError(f"a pointer is expected, got {pointer.type}")
        return pointer.type
