"""What kernel texts compute with: typed values that belong to a machine.

The machine is either the compiler, where a value's payload is an LLVM value, or the interpreter,
where it is a number, a NumPy vector or a checked address. The text cannot tell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from lowbit.isa import conversion, generic
from lowbit.isa.instruction import Instruction
from lowbit.isa.types import Pointer, Scalar, Type, Vector


class Machine(Protocol):
    """What a backend must offer to the values in it."""

    def execute(self, instruction: Instruction, operands: tuple[Any, ...]) -> Any: ...
    def constant(self, value: float, type_: Type) -> Value: ...
    def advance(self, pointer: Value, elements: Value) -> Value: ...
    def reinterpret(self, pointer: Value, element: Scalar) -> Value: ...


def _operator(instruction: Instruction, swapped: bool = False) -> Callable[[Value, Any], Value]:
    """The method of a Python operator."""
    return lambda value, other: value._with(instruction, other, swapped)


class Value:
    """A scalar, vector, pointer or tile in a kernel text.

    Python numbers mix with values and take their type. Pointers move by elements: `p + n`.
    """

    __slots__ = ("machine", "payload", "type")

    def __init__(self, machine: Machine, type_: Type, payload: Any) -> None:
        self.machine = machine
        self.type = type_
        self.payload = payload

    def _with(self, instruction: Instruction, other: Any, swapped: bool = False) -> Value:
        if not isinstance(other, Value):
            other = self.machine.constant(other, self.type)
        return instruction(other, self) if swapped else instruction(self, other)

    def __add__(self, other: Any) -> Value:
        if isinstance(self.type, Pointer):
            return self.machine.advance(self, other)
        return self._with(generic.add, other)

    __radd__ = _operator(generic.add, swapped=True)
    __sub__, __rsub__ = _operator(generic.sub), _operator(generic.sub, swapped=True)
    __mul__, __rmul__ = _operator(generic.mul), _operator(generic.mul, swapped=True)
    __truediv__, __rtruediv__ = _operator(generic.fdiv), _operator(generic.fdiv, swapped=True)
    __floordiv__, __mod__ = _operator(generic.div), _operator(generic.rem)
    __and__, __or__, __xor__ = map(_operator, (generic.and_, generic.or_, generic.xor))
    __lt__, __gt__ = _operator(generic.lt), _operator(generic.lt, swapped=True)

    def __lshift__(self, count: int) -> Value:
        return generic.shl(self, count)

    def __rshift__(self, count: int) -> Value:
        return generic.shr(self, count)

    def equals(self, other: Any) -> Value:
        """Lane by lane equality."""
        return self._with(generic.eq, other)

    def __bool__(self) -> bool:
        raise TypeError(
            "a kernel's value has no truth while the kernel is generated; "
            "use k.when(condition) for a branch or select(...) for a choice"
        )

    def __eq__(self, other: object) -> bool:
        raise TypeError("use a.equals(b): == would compare Python objects, not what they hold")

    __hash__ = None  # type: ignore[assignment]

    def to(self, element: Scalar) -> Value:
        """Lane by lane to another number type."""
        return conversion.convert(self, element)

    def bits(self, type_: Scalar | Vector) -> Value:
        """The same bits under another type."""
        return conversion.bitcast(self, type_)

    def splat(self, lanes: int) -> Value:
        """A vector with this scalar in every lane."""
        return generic.splat(self, lanes)

    def load(self, lanes: int = 0) -> Value:
        """What this pointer points to: a scalar, or a vector of `lanes`."""
        return generic.load(self, lanes)

    def store(self, value: Value) -> None:
        """Write `value` where this pointer points to."""
        generic.store(value, self)

    def cast(self, element: Scalar) -> Value:
        """This pointer as one to another element type; the address stays."""
        return self.machine.reinterpret(self, element)

    @property
    def lanes(self) -> int:
        """How many there are, of a vector."""
        assert isinstance(self.type, Vector)
        return self.type.lanes

    def __repr__(self) -> str:
        return f"<{self.type}>"


class Register:
    """A variable of a kernel text: what `k.register(initial)` returns. It keeps its type."""

    def __init__(self, initial: Value) -> None:
        self._type = initial.type
        self._put(initial)

    @property
    def value(self) -> Value:
        return self._get()

    @value.setter
    def value(self, new: Value) -> None:
        if new.type != self._type:
            raise TypeError(f"a variable of {self._type} cannot hold a {new.type}")
        self._put(new)

    # What machines differ in.

    def _get(self) -> Value:
        return self._value

    def _put(self, new: Value) -> None:
        self._value = new
