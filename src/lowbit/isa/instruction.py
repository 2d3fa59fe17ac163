"""What an instruction is: one object that holds its emission and its scalar meaning.

`emit` turns it into LLVM IR, `meaning` says in NumPy what it computes. Kernel texts call the
object like a function; the machine that its operands belong to (compiler or interpreter) picks
the half it needs. A test runs both halves of every instruction on the same random data, so that
they cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowbit.isa.types import Type, ir

if TYPE_CHECKING:
    from lowbit.isa.value import Value

Typing = Callable[..., "Type | None"]


@dataclass(frozen=True)
class Call:
    """What `emit` is given: the ir.IRBuilder and the types on both sides of one use, untyped."""

    builder: Any
    types: tuple[Any, ...]
    result: Any

    def intrinsic(self, name: str, *args: Any) -> Any:
        """Call the LLVM intrinsic `name` with `args`, declaring it in the module once."""
        returns = ir.VoidType() if self.result is None else self.result.llvm
        module = self.builder.module
        kind = ir.FunctionType(returns, [a.type for a in args])
        function = module.globals.get(name) or ir.Function(module, kind, name)
        return self.builder.call(function, args)


@dataclass(frozen=True, eq=False)
class Instruction:
    """`typing(*operand types) -> result type`, `emit(Call, *IR values)`, `meaning(*payloads)`.

    An operand that is not a Value (a Python int, a tuple, a type) is an immediate and reaches all
    three as it is. `feature` is the LLVM feature that the machine must have, "" for none.
    """

    name: str
    typing: Typing
    emit: Callable[..., Any]
    meaning: Callable[..., Any]
    feature: str = ""

    def __call__(self, *operands: Any) -> Value:
        for operand in operands:
            machine = getattr(operand, "machine", None)
            if machine is not None:
                return machine.execute(self, operands)
        raise TypeError(f"{self.name} needs at least one operand that lives on a machine")

    def __repr__(self) -> str:
        return f"<instruction {self.name}>"


class Signature:
    """The typing of an instruction that takes one list of operand types; others are TypeErrors."""

    def __init__(self, result: Type | None, *operands: Type) -> None:
        self.result, self.operands = result, operands

    def __call__(self, *given: Any) -> Type | None:
        if given != self.operands:
            want, got = ", ".join(map(str, self.operands)), ", ".join(map(str, given))
            raise TypeError(f"operands ({got}) where ({want}) are expected")
        return self.result


def intrinsic(name: str) -> Callable[..., Any]:
    """The emission that is one LLVM intrinsic."""
    return lambda call, *args: call.intrinsic(name, *args)


def instruction(
    typing: Typing, emit: Callable[..., Any] | str, feature: str = ""
) -> Callable[[Callable[..., Any]], Instruction]:
    """Decorate the meaning with its emission: an LLVM intrinsic's name, or a function."""
    emission = intrinsic(emit) if isinstance(emit, str) else emit
    return lambda meaning: Instruction(meaning.__name__, typing, emission, meaning, feature)
