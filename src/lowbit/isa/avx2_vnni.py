"""AVX-VNNI: the exact byte product of AVX-512 VNNI on AVX2's sixteen 256-bit registers.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, VPDPBUSD.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from lowbit.isa.avx2 import AVX2
from lowbit.isa.instruction import Call, fixed, instruction
from lowbit.isa.instruction_set import register
from lowbit.isa.types import Vector, s8, s32, u8

AVX2_VNNI = register(AVX2.plus("avx2_vnni", "avxvnni"))


def _dot(call: Call, acc: ir.Value, a: ir.Value, b: ir.Value) -> Any:
    """As for the 512-bit one: LLVM 20's form of the operands, which newer ones upgrade."""
    dwords = Vector(s32, 8).llvm
    cast = call.builder.bitcast
    return call.intrinsic("llvm.x86.avx512.vpdpbusd.256", acc, cast(a, dwords), cast(b, dwords))


@instruction(
    fixed(Vector(s32, 8), Vector(s32, 8), Vector(u8, 32), Vector(s8, 32)),
    _dot,
    feature="avxvnni",
)
def vpdpbusd_256(acc: Any, a: Any, b: Any) -> Any:
    """out[i] = acc[i] + Σ_{j<4} a[4i+j]·b[4i+j], a unsigned, b signed; wraps, never saturates."""
    product = a.astype(np.int32) * b.astype(np.int32)
    return acc + product.reshape(8, 4).sum(axis=1, dtype=np.int32)
