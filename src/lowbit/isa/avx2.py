"""AVX2: sixteen 256-bit registers, and no product of bytes that is always exact.

`vpmaddubsw` multiplies bytes but saturates the pair sums at 16 bits, so it may be used only where
that is known not to happen; `vpmaddwd` on 16-bit lanes is exact. Source: Intel 64 and IA-32
Architectures Software Developer's Manual, volume 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lowbit.isa.generic import madd16
from lowbit.isa.instruction import Call, Instruction, Signature, intrinsic
from lowbit.isa.instruction_set import InstructionSet, register
from lowbit.isa.types import Scalar, Vector, f32, ir, s8, s16, s32, u8

AVX2 = register(
    InstructionSet(
        name="avx2",
        features=("avx", "avx2", "fma", "bmi", "bmi2", "popcnt", "sse4.2"),
        fallback="generic",
        vector_bytes=32,
        vector_registers=16,
    )
)


def pairs_of_words(name: str, lanes: int, llvm_name: str, feature: str) -> Instruction:
    """VPMADDWD with so many lanes of 32 bits: what `madd16` means, by an instruction of its own."""
    words = Vector(s16, 2 * lanes)
    typing = Signature(Vector(s32, lanes), words, words)
    return Instruction(name, typing, intrinsic(llvm_name), madd16.meaning, feature)


def pairs_of_bytes(name: str, lanes: int, llvm_name: str, feature: str) -> Instruction:
    """VPMADDUBSW with so many lanes of 16 bits."""

    def meaning(a: Any, b: Any) -> Any:
        """out[i] = a[2i]·b[2i] + a[2i+1]·b[2i+1], a unsigned, b signed, SATURATED to 16 bits."""
        sums = (a.astype(np.int32) * b.astype(np.int32)).reshape(lanes, 2).sum(axis=1)
        return np.clip(sums, -(2**15), 2**15 - 1).astype(np.int16)

    typing = Signature(Vector(s16, lanes), Vector(u8, 2 * lanes), Vector(s8, 2 * lanes))
    return Instruction(name, typing, intrinsic(llvm_name), meaning, feature)


def packed(
    name: str, source: Scalar, to: Scalar, bits: int, llvm_name: str, feature: str
) -> Instruction:
    """VPACKSSDW, VPACKSSWB, VPACKUSWB: two vectors become one of numbers half as wide."""
    lanes, each = bits // source.bits, 128 // source.bits
    limits = np.iinfo(to.numpy)

    def meaning(a: Any, b: Any) -> Any:
        """Of each 128 bits those of a, then those of b, SATURATED."""
        both = np.stack([a.reshape(-1, each), b.reshape(-1, each)], axis=1).reshape(-1)
        return np.clip(both, limits.min, limits.max).astype(to.numpy)

    typing = Signature(Vector(to, 2 * lanes), Vector(source, lanes), Vector(source, lanes))
    return Instruction(name, typing, intrinsic(llvm_name), meaning, feature)


def nearest_integers(name: str, lanes: int, emit: Any, feature: str) -> Instruction:
    """VCVTPS2DQ with so many lanes, as programs find the rounding mode."""

    def meaning(a: Any) -> Any:
        """Round half to even; -2^31 where 32 bits do not hold that, and for NaN."""
        with np.errstate(invalid="ignore"):
            whole = np.rint(a.astype(np.float64))
            held = (whole >= -(2.0**31)) & (whole < 2.0**31)
        return np.where(held, whole, -(2.0**31)).astype(np.int32)

    typing = Signature(Vector(s32, lanes), Vector(f32, lanes))
    return Instruction(name, typing, emit, meaning, feature)


vpmaddwd = pairs_of_words("vpmaddwd", 8, "llvm.x86.avx2.pmadd.wd", "avx2")
vpmaddubsw = pairs_of_bytes("vpmaddubsw", 16, "llvm.x86.avx2.pmadd.ub.sw", "avx2")

vcvtps2dq = nearest_integers("vcvtps2dq", 8, intrinsic("llvm.x86.avx.cvt.ps2dq.256"), "avx2")
vpackssdw = packed("vpackssdw", s32, s16, 256, "llvm.x86.avx2.packssdw", "avx2")
vpacksswb = packed("vpacksswb", s16, s8, 256, "llvm.x86.avx2.packsswb", "avx2")
vpackuswb = packed("vpackuswb", s16, u8, 256, "llvm.x86.avx2.packuswb", "avx2")


# AVX-VNNI: the exact products of AVX-512 VNNI on AVX2's sixteen 256-bit registers.
#
# Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, VPDPBUSD,
# VPDPWSSD.

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
