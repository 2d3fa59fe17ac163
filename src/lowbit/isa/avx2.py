"""AVX2: sixteen 256-bit registers, and no product of bytes that is always exact.

`vpmaddubsw` multiplies bytes but saturates the pair sums at 16 bits, so it may be used only where
that is known not to happen; `vpmaddwd` on 16-bit lanes is exact. Source: Intel 64 and IA-32
Architectures Software Developer's Manual, volume 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lowbit.isa.generic import madd16
from lowbit.isa.instruction import Instruction, Signature, intrinsic
from lowbit.isa.instruction_set import InstructionSet, register
from lowbit.isa.types import Vector, s8, s16, s32, u8

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


vpmaddwd = pairs_of_words("vpmaddwd", 8, "llvm.x86.avx2.pmadd.wd", "avx2")
vpmaddubsw = pairs_of_bytes("vpmaddubsw", 16, "llvm.x86.avx2.pmadd.ub.sw", "avx2")
