"""AArch64's byte products on thirty-two 128-bit registers: the dot-product and i8mm extensions.

All of them wrap modulo 2^32 and none saturates. With the dot-product extension both operands have
the same sign; i8mm adds the mixed one, and products of two small matrices. Source: Arm Architecture
Reference Manual for A-profile (DDI 0487), SDOT, UDOT, USDOT, SMMLA, USMMLA (vector).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lowbit.isa.instruction import fixed, instruction
from lowbit.isa.instruction_set import InstructionSet, register
from lowbit.isa.types import Vector, s8, s32, u8

NEON_DOTPROD = register(
    InstructionSet(
        name="neon_dotprod",
        features=("neon", "dotprod"),
        fallback="generic",
        vector_bytes=16,
        vector_registers=32,
        architecture="aarch64",
    )
)

NEON_I8MM = register(NEON_DOTPROD.plus("neon_i8mm", "i8mm"))

_SUMS, _SIGNED, _UNSIGNED = Vector(s32, 4), Vector(s8, 16), Vector(u8, 16)
_NAME = "llvm.aarch64.neon.{}.v4i32.v16i8"


def _dot(acc: Any, a: Any, b: Any) -> Any:
    product = a.astype(np.int32) * b.astype(np.int32)
    return acc + product.reshape(4, 4).sum(axis=1, dtype=np.int32)


def _matrix(acc: Any, a: Any, b: Any) -> Any:
    rows, columns = a.astype(np.int32).reshape(2, 8), b.astype(np.int32).reshape(2, 8)
    return acc + (rows @ columns.T).reshape(4)


@instruction(fixed(_SUMS, _SUMS, _SIGNED, _SIGNED), _NAME.format("sdot"), feature="dotprod")
def sdot(acc: Any, a: Any, b: Any) -> Any:
    """out[i] = acc[i] + Σ_{j<4} a[4i+j]·b[4i+j], both signed."""
    return _dot(acc, a, b)


@instruction(fixed(_SUMS, _SUMS, _UNSIGNED, _UNSIGNED), _NAME.format("udot"), feature="dotprod")
def udot(acc: Any, a: Any, b: Any) -> Any:
    """out[i] = acc[i] + Σ_{j<4} a[4i+j]·b[4i+j], both unsigned."""
    return _dot(acc, a, b)


@instruction(fixed(_SUMS, _SUMS, _UNSIGNED, _SIGNED), _NAME.format("usdot"), feature="i8mm")
def usdot(acc: Any, a: Any, b: Any) -> Any:
    """out[i] = acc[i] + Σ_{j<4} a[4i+j]·b[4i+j], a unsigned, b signed."""
    return _dot(acc, a, b)


@instruction(fixed(_SUMS, _SUMS, _SIGNED, _SIGNED), _NAME.format("smmla"), feature="i8mm")
def smmla(acc: Any, a: Any, b: Any) -> Any:
    """out[2i+j] = acc[2i+j] + Σ_{k<8} a[8i+k]·b[8j+k] for i, j < 2, both signed."""
    return _matrix(acc, a, b)


@instruction(fixed(_SUMS, _SUMS, _UNSIGNED, _SIGNED), _NAME.format("usmmla"), feature="i8mm")
def usmmla(acc: Any, a: Any, b: Any) -> Any:
    """out[2i+j] = acc[2i+j] + Σ_{k<8} a[8i+k]·b[8j+k] for i, j < 2, a unsigned, b signed."""
    return _matrix(acc, a, b)
