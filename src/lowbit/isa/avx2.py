"""AVX2: sixteen 256-bit registers, and no product of bytes that is exact.

`vpmaddubsw` multiplies bytes but saturates the pair sums at 16 bits, so products here go through
16-bit lanes, which are exact. Source: Intel 64 and IA-32 Architectures Software Developer's
Manual, volume 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lowbit.isa.instruction import fixed, instruction
from lowbit.isa.instruction_set import InstructionSet
from lowbit.isa.types import Vector, s16, s32

AVX2 = InstructionSet(
    name="avx2",
    features=("avx", "avx2", "fma", "bmi", "bmi2", "popcnt", "sse4.2"),
    fallback="generic",
    vector_bytes=32,
    vector_registers=16,
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
