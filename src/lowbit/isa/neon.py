"""AArch64's byte products on thirty-two 128-bit registers: the dot-product and i8mm extensions.

All of them wrap modulo 2^32 and none saturates. With the dot-product extension both operands have
the same sign; i8mm adds the mixed one, and products of two small matrices. Source: Arm Architecture
Reference Manual for A-profile (DDI 0487), SDOT, UDOT, USDOT, SMMLA, USMMLA (vector).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lowbit.isa.instruction import Instruction, Signature, intrinsic
from lowbit.isa.instruction_set import InstructionSet, register
from lowbit.isa.types import Scalar, Vector, s8, s32, u8

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


def _dot(acc: Any, a: Any, b: Any) -> Any:
    """out[i] = acc[i] + Σ_{j<4} a[4i+j]·b[4i+j]."""
    product = a.astype(np.int32) * b.astype(np.int32)
    return acc + product.reshape(4, 4).sum(axis=1, dtype=np.int32)


def _matrix(acc: Any, a: Any, b: Any) -> Any:
    """out[2i+j] = acc[2i+j] + Σ_{k<8} a[8i+k]·b[8j+k] for i, j < 2."""
    rows, columns = a.astype(np.int32).reshape(2, 8), b.astype(np.int32).reshape(2, 8)
    return acc + (rows @ columns.T).reshape(4)


def _product(
    name: str, a: Scalar, b: Scalar, meaning: Callable[..., Any], feature: str
) -> Instruction:
    sums, llvm_name = Vector(s32, 4), f"llvm.aarch64.neon.{name}.v4i32.v16i8"
    typing = Signature(sums, sums, Vector(a, 16), Vector(b, 16))
    return Instruction(name, typing, intrinsic(llvm_name), meaning, feature)


sdot = _product("sdot", s8, s8, _dot, "dotprod")
udot = _product("udot", u8, u8, _dot, "dotprod")
usdot = _product("usdot", u8, s8, _dot, "i8mm")
smmla = _product("smmla", s8, s8, _matrix, "i8mm")
usmmla = _product("usmmla", u8, s8, _matrix, "i8mm")
