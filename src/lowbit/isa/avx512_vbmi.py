"""AVX-512 with permutations of bytes across a whole register.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, VPERMI2B.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lowbit.isa.avx512 import AVX512
from lowbit.isa.instruction import Signature, instruction
from lowbit.isa.instruction_set import register
from lowbit.isa.types import Vector, u8

AVX512_VBMI = register(AVX512.plus("avx512_vbmi", "avx512vbmi", extension=True))

_BYTES = Vector(u8, 64)


@instruction(
    Signature(_BYTES, _BYTES, _BYTES, _BYTES),
    "llvm.x86.avx512.vpermi2var.qi.512",
    feature="avx512vbmi",
)
def vpermi2b(low: Any, indices: Any, high: Any) -> Any:
    """out[i] = the byte of `low` followed by `high` that the low 7 bits of indices[i] name."""
    return np.concatenate([low, high])[indices & 127]
