"""AVX-512 without VNNI: thirty-two 512-bit registers, and no product of bytes that is exact."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from lowbit.isa.avx2 import AVX2, nearest_integers, packed, pairs_of_bytes, pairs_of_words
from lowbit.isa.instruction import Call
from lowbit.isa.instruction_set import register
from lowbit.isa.types import s8, s16, s32, u8

AVX512 = register(
    AVX2.plus(
        "avx512", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl",
        vector_bytes=64, vector_registers=32,
    )
)  # fmt: skip

_NAME = "llvm.x86.avx512.pmadd{}.512"
vpmaddwd_512 = pairs_of_words("vpmaddwd_512", 16, _NAME.format("w.d"), "avx512bw")
vpmaddubsw_512 = pairs_of_bytes("vpmaddubsw_512", 32, _NAME.format("ubs.w"), "avx512bw")


def _nearest(call: Call, value: ir.Value) -> Any:
    """All lanes, in the rounding mode that is set."""
    all_lanes, as_set = ir.Constant(ir.IntType(16), -1), ir.Constant(ir.IntType(32), 4)
    elsewhere = ir.Constant(call.result.llvm, None)
    name = "llvm.x86.avx512.mask.cvtps2dq.512"
    return call.intrinsic(name, value, elsewhere, all_lanes, as_set)


vcvtps2dq_512 = nearest_integers("vcvtps2dq_512", 16, _nearest, "avx512f")
_PACKED = "llvm.x86.avx512.pack{}.512"
vpackssdw_512 = packed("vpackssdw_512", s32, s16, 512, _PACKED.format("ssdw"), "avx512bw")
vpacksswb_512 = packed("vpacksswb_512", s16, s8, 512, _PACKED.format("sswb"), "avx512bw")
vpackuswb_512 = packed("vpackuswb_512", s16, u8, 512, _PACKED.format("uswb"), "avx512bw")
