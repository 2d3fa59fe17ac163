"""AVX-512 without VNNI: thirty-two 512-bit registers, and no product of bytes that is exact."""

from __future__ import annotations

from typing import Any

import numpy as np

from lowbit.isa.avx2 import AVX2, nearest_integers, packed, pairs_of_bytes, pairs_of_words
from lowbit.isa.instruction import Call, Signature, instruction
from lowbit.isa.instruction_set import register
from lowbit.isa.types import Vector, f32, ir, s8, s16, s32, u8

AVX512 = register(
    AVX2.plus(
        "avx512", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl",
        vector_bytes=64, vector_registers=32,
    )
)  # fmt: skip

_NAME = "llvm.x86.avx512.pmadd{}.512"
vpmaddwd_512 = pairs_of_words("vpmaddwd_512", 16, _NAME.format("w.d"), "avx512bw")
vpmaddubsw_512 = pairs_of_bytes("vpmaddubsw_512", 32, _NAME.format("ubs.w"), "avx512bw")


def _masked(call: Call, name: str, *args: Any) -> Any:
    """Of an intrinsic with a mask all lanes, in the rounding mode that is set."""
    all_lanes, as_set = ir.Constant(ir.IntType(16), -1), ir.Constant(ir.IntType(32), 4)
    elsewhere = ir.Constant(call.result.llvm, None)
    name = f"llvm.x86.avx512.mask.{name}.512"
    return call.intrinsic(name, *args, elsewhere, all_lanes, as_set)


def _nearest(call: Call, value: ir.Value) -> Any:
    return _masked(call, "cvtps2dq", value)


vcvtps2dq_512 = nearest_integers("vcvtps2dq_512", 16, _nearest, "avx512f")
_PACKED = "llvm.x86.avx512.pack{}.512"
vpackssdw_512 = packed("vpackssdw_512", s32, s16, 512, _PACKED.format("ssdw"), "avx512bw")
vpacksswb_512 = packed("vpacksswb_512", s16, s8, 512, _PACKED.format("sswb"), "avx512bw")
vpackuswb_512 = packed("vpackuswb_512", s16, u8, 512, _PACKED.format("uswb"), "avx512bw")


_FLOATS = Vector(f32, 16)


def _fraction(call: Call, value: ir.Value) -> Any:
    return _masked(call, "reduce.ps", value, ir.Constant(ir.IntType(32), 1))  # rounds down


@instruction(Signature(_FLOATS, _FLOATS), _fraction, feature="avx512dq")
def vreduceps_512(a: Any) -> Any:
    """What a exceeds the nearest integer below by, rounded down: thus less than 1; -0 for integers,
    and 0 for infinities."""
    with np.errstate(invalid="ignore"):
        exact = a.astype(np.float64) - np.floor(a)
        nearest = np.minimum(exact, 1).astype(np.float32)
        down = np.where((nearest > exact) | (nearest == 1), np.nextafter(nearest, 0), nearest)
    return np.where(np.isinf(a), 0.0, np.where(down == 0, -0.0, down)).astype(np.float32)


def _scaled(call: Call, a: ir.Value, b: ir.Value) -> Any:
    return _masked(call, "scalef.ps", a, b)


@instruction(Signature(_FLOATS, _FLOATS, _FLOATS), _scaled, feature="avx512f")
def vscalefps_512(a: Any, b: Any) -> Any:
    """a · 2^n, rounded once, where n is the greatest integer up to b. An infinite b goes before a
    NaN that is a; infinity and zero, scaled so that they would change, are NaN."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        n = np.clip(np.nan_to_num(np.floor(b)), -400, 400).astype(np.int64)  # beyond, 0 or infinity
        scaled = np.ldexp(a.astype(np.float64), n).astype(np.float32)
        endless = np.where(np.isnan(a), 1, a) * np.where(b > 0, b, np.float32(0))
    return np.where(np.isinf(b), endless, np.where(np.isnan(a), a, scaled + 0 * b))
