"""AVX-512 with VNNI: thirty-two 512-bit registers and an exact byte product.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, VPDPBUSD.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from lowbit.isa.avx512 import AVX512
from lowbit.isa.instruction import Call, fixed, instruction
from lowbit.isa.instruction_set import register
from lowbit.isa.types import Vector, s8, s32, u8

AVX512_VNNI = register(AVX512.plus("avx512_vnni", "avx512vnni"))


def _dot(call: Call, acc: ir.Value, a: ir.Value, b: ir.Value) -> Any:
    """LLVM 20 takes the bytes as sixteen dwords; newer ones upgrade that form when they read it."""
    dwords = Vector(s32, 16).llvm
    cast = call.builder.bitcast
    return call.intrinsic("llvm.x86.avx512.vpdpbusd.512", acc, cast(a, dwords), cast(b, dwords))


@instruction(
    fixed(Vector(s32, 16), Vector(s32, 16), Vector(u8, 64), Vector(s8, 64)),
    _dot,
    feature="avx512vnni",
)
def vpdpbusd(acc: Any, a: Any, b: Any) -> Any:
    """out[i] = acc[i] + Σ_{j<4} a[4i+j]·b[4i+j], a unsigned, b signed; wraps, never saturates."""
    product = a.astype(np.int32) * b.astype(np.int32)
    return acc + product.reshape(16, 4).sum(axis=1, dtype=np.int32)
