"""AVX-512 without VNNI: thirty-two 512-bit registers, and no product of bytes that is exact."""

from __future__ import annotations

from lowbit.isa.avx2 import AVX2, pairs_of_bytes, pairs_of_words
from lowbit.isa.instruction_set import register

AVX512 = register(
    AVX2.plus(
        "avx512", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl",
        vector_bytes=64, vector_registers=32,
    )
)  # fmt: skip

_NAME = "llvm.x86.avx512.pmadd{}.512"
vpmaddwd_512 = pairs_of_words("vpmaddwd_512", 16, _NAME.format("w.d"), "avx512bw")
vpmaddubsw_512 = pairs_of_bytes("vpmaddubsw_512", 32, _NAME.format("ubs.w"), "avx512bw")
