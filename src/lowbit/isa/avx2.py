"""AVX2: sixteen 256-bit registers, and no product of bytes that is always exact.

`vpmaddubsw` multiplies bytes but saturates the pair sums at 16 bits, so it may be used only where
that is known not to happen; `vpmaddwd` on 16-bit lanes is exact. Source: Intel 64 and IA-32
Architectures Software Developer's Manual, volume 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lowbit.isa.instruction import fixed, instruction
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


@instruction(
    fixed(Vector(s32, 8), Vector(s16, 16), Vector(s16, 16)),
    "llvm.x86.avx2.pmadd.wd",
    feature="avx2",
)
def vpmaddwd(a: Any, b: Any) -> Any:
    """out[i] = a[2i]·b[2i] + a[2i+1]·b[2i+1]; wraps only if all four are -2^15."""
    product = a.astype(np.int32) * b.astype(np.int32)
    return product.reshape(8, 2).sum(axis=1, dtype=np.int32)


def pairs_of_bytes(a: Any, b: Any) -> Any:
    """What VPMADDUBSW means at any width."""
    sums = (a.astype(np.int32) * b.astype(np.int32)).reshape(-1, 2).sum(axis=1)
    return np.clip(sums, -(2**15), 2**15 - 1).astype(np.int16)


@instruction(
    fixed(Vector(s16, 16), Vector(u8, 32), Vector(s8, 32)),
    "llvm.x86.avx2.pmadd.ub.sw",
    feature="avx2",
)
def vpmaddubsw(a: Any, b: Any) -> Any:
    """out[i] = a[2i]·b[2i] + a[2i+1]·b[2i+1], a unsigned, b signed, SATURATED to 16 bits."""
    return pairs_of_bytes(a, b)
