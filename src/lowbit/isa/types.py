"""The types that kernel texts and instructions are written in.

Every type has two representations: an LLVM one, for compiled kernels, and a NumPy one, for
interpreted ones. Integers carry a sign here, although LLVM's do not, because widening,
comparing and converting depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from ml_dtypes import bfloat16

from lowbit.registry.locks import Deferred, cached_property

if TYPE_CHECKING:
    from llvmlite import ir

    from lowbit.isa.value import Value
else:
    ir = Deferred("llvmlite.ir")  # of no use for a program that is kept on disk
    Value = object


_MADE: dict[tuple[Any, ...], Any] = {}


class _Interned(type):
    """A class whose instances of the same parameters are one object. Types are compared and looked
    up at every instruction that is emitted or interpreted: this way by identity."""

    def __call__(cls, *parameters: Any) -> Any:
        key = cls, *parameters
        found = _MADE.get(key)
        return _MADE.setdefault(key, super().__call__(*parameters)) if found is None else found


class _Type(metaclass=_Interned):
    """What all types share: a copy and a pickle are the same object again."""

    __match_args__: tuple[str, ...] = ()

    def __reduce__(self) -> Any:
        return type(self), tuple(vars(self)[name] for name in self.__match_args__)


@dataclass(frozen=True, eq=False)
class Scalar(_Type):
    """A number: kind "s" (signed), "u" (unsigned), "f" (IEEE float), "bf" (bfloat16, the upper half
    of a float32, which is only stored, and converted from and to that) or "b" (one bit)."""

    kind: str
    bits: int

    @cached_property
    def llvm(self) -> ir.Type:
        if self.kind != "f":  # LLVM would compute with its bfloat, on every machine somehow
            return ir.IntType(self.bits)
        return {32: ir.FloatType(), 64: ir.DoubleType()}[self.bits]

    @cached_property
    def numpy(self) -> np.dtype[Any]:
        if self.kind == "b":
            return np.dtype(np.bool_)
        if self.kind == "bf":
            return np.dtype(bfloat16)
        return np.dtype(f"{'i' if self.kind == 's' else self.kind}{self.bits // 8}")

    @cached_property
    def bytes(self) -> int:
        return max(1, self.bits // 8)

    @property
    def is_float(self) -> bool:
        return self.kind == "f"

    def __str__(self) -> str:
        return "bool" if self.kind == "b" else f"{self.kind}{self.bits}"


@dataclass(frozen=True, eq=False)
class Vector(_Type):
    """`lanes` numbers of one scalar type, side by side in a register."""

    element: Scalar
    lanes: int

    @cached_property
    def llvm(self) -> ir.Type:
        return ir.VectorType(self.element.llvm, self.lanes)

    @cached_property
    def bytes(self) -> int:
        return self.element.bytes * self.lanes

    def __str__(self) -> str:
        return f"{self.element}x{self.lanes}"


@dataclass(frozen=True, eq=False)
class Pointer(_Type):
    """The address of an element; arithmetic on it counts elements."""

    element: Scalar

    @cached_property
    def llvm(self) -> ir.Type:
        return ir.PointerType()

    def __str__(self) -> str:
        return f"{self.element}*"


@dataclass(frozen=True, eq=False)
class Tile(_Type):
    """A two-dimensional matrix register, named by its number (0 to 7), never moved."""

    @cached_property
    def llvm(self) -> ir.Type:
        return ir.IntType(8)

    def __str__(self) -> str:
        return "tile"


Type = Scalar | Vector | Pointer | Tile

bit = Scalar("b", 1)
u8, s8 = Scalar("u", 8), Scalar("s", 8)
u16, s16 = Scalar("u", 16), Scalar("s", 16)
u32, s32 = Scalar("u", 32), Scalar("s", 32)
u64, s64 = Scalar("u", 64), Scalar("s", 64)
f32, f64 = Scalar("f", 32), Scalar("f", 64)
bf16 = Scalar("bf", 16)
tile = Tile()

# How the parameters of a kernel text are annotated: a type checker sees a Value, the compiler
# and the interpreter see which type it has.
Int = Annotated[Value, s64]
U8Pointer = Annotated[Value, Pointer(u8)]
S8Pointer = Annotated[Value, Pointer(s8)]
S16Pointer = Annotated[Value, Pointer(s16)]
S32Pointer = Annotated[Value, Pointer(s32)]
S64Pointer = Annotated[Value, Pointer(s64)]
F32Pointer = Annotated[Value, Pointer(f32)]


def element_of(type_: Type) -> Scalar:
    """The scalar type of a vector's lane, of what a pointer points to, or the scalar itself."""
    if isinstance(type_, Scalar):
        return type_
    if isinstance(type_, Vector | Pointer):
        return type_.element
    raise TypeError(f"a {type_} has no elements")


def with_element(type_: Type, element: Scalar) -> Scalar | Vector:
    """`type_` (scalar or vector) with another element type and the same number of lanes."""
    if isinstance(type_, Vector):
        return Vector(element, type_.lanes)
    if isinstance(type_, Scalar):
        return element
    raise TypeError(f"expected a scalar or a vector, got {type_}")
