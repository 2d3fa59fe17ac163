"""AVX-VNNI: the exact products of AVX-512 VNNI on AVX2's sixteen 256-bit registers.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, VPDPBUSD, VPDPWSSD.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lowbit.isa.avx2 import AVX2
from lowbit.isa.generic import madd16
from lowbit.isa.instruction import Call, Instruction, Signature
from lowbit.isa.instruction_set import register
from lowbit.isa.types import Vector, ir, s8, s16, s32, u8

AVX2_VNNI = register(AVX2.plus("avx2_vnni", "avxvnni"))


def byte_products(name: str, lanes: int, feature: str) -> Instruction:
    """VPDPBUSD with so many lanes of 32 bits."""
    sums = Vector(s32, lanes)

    def emit(call: Call, acc: ir.Value, a: ir.Value, b: ir.Value) -> Any:
        # LLVM 20 takes the bytes as dwords; newer ones upgrade that form when they read it.
        a, b = (call.builder.bitcast(one, sums.llvm) for one in (a, b))
        return call.intrinsic(f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", acc, a, b)

    def meaning(acc: Any, a: Any, b: Any) -> Any:
        """out[i] = acc[i] + Σ_{j<4} a[4i+j]·b[4i+j], a unsigned, b signed; wraps."""
        product = a.astype(np.int32) * b.astype(np.int32)
        return acc + product.reshape(lanes, 4).sum(axis=1, dtype=np.int32)

    typing = Signature(sums, sums, Vector(u8, 4 * lanes), Vector(s8, 4 * lanes))
    return Instruction(name, typing, emit, meaning, feature)


vpdpbusd_256 = byte_products("vpdpbusd_256", 8, "avxvnni")


def word_products(name: str, lanes: int, feature: str) -> Instruction:
    """VPDPWSSD with so many lanes of 32 bits."""
    sums, words = Vector(s32, lanes), Vector(s16, 2 * lanes)

    def emit(call: Call, acc: ir.Value, a: ir.Value, b: ir.Value) -> Any:
        a, b = (call.builder.bitcast(one, sums.llvm) for one in (a, b))  # as above
        return call.intrinsic(f"llvm.x86.avx512.vpdpwssd.{32 * lanes}", acc, a, b)

    def meaning(acc: Any, a: Any, b: Any) -> Any:
        """out[i] = acc[i] + a[2i]·b[2i] + a[2i+1]·b[2i+1]; wraps."""
        return acc + madd16.meaning(a, b)

    return Instruction(name, Signature(sums, sums, words, words), emit, meaning, feature)


vpdpwssd_256 = word_products("vpdpwssd_256", 8, "avxvnni")
