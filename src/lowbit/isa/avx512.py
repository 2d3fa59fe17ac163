"""AVX-512 without VNNI: thirty-two 512-bit registers, and no product of bytes that is exact.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lowbit.isa.avx2 import AVX2, pairs_of_bytes
from lowbit.isa.instruction import fixed, instruction
from lowbit.isa.instruction_set import register
from lowbit.isa.types import Vector, s8, s16, s32, u8

AVX512 = register(
    AVX2.plus(
        "avx512", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl",
        vector_bytes=64, vector_registers=32,
    )
)  # fmt: skip


@instruction(
    fixed(Vector(s32, 16), Vector(s16, 32), Vector(s16, 32)),
    "llvm.x86.avx512.pmaddw.d.512",
    feature="avx512bw",
)
def vpmaddwd_512(a: Any, b: Any) -> Any:
    """out[i] = a[2i]·b[2i] + a[2i+1]·b[2i+1]; wraps only if all four are -2^15."""
    product = a.astype(np.int32) * b.astype(np.int32)
    return product.reshape(16, 2).sum(axis=1, dtype=np.int32)


@instruction(
    fixed(Vector(s16, 32), Vector(u8, 64), Vector(s8, 64)),
    "llvm.x86.avx512.pmaddubs.w.512",
    feature="avx512bw",
)
def vpmaddubsw_512(a: Any, b: Any) -> Any:
    """out[i] = a[2i]·b[2i] + a[2i+1]·b[2i+1], a unsigned, b signed, SATURATED to 16 bits."""
    return pairs_of_bytes(a, b)
