"""AVX-512: thirty-two 512-bit registers; VNNI, bfloat16 and permutations of bytes besides."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from lowbit.isa import host
from lowbit.isa.avx2 import (
    AVX2,
    byte_products,
    nearest_integers,
    packed,
    pairs_of_bytes,
    pairs_of_words,
    word_products,
)
from lowbit.isa.generic import fma
from lowbit.isa.instruction import Call, Signature, instruction
from lowbit.isa.instruction_set import register
from lowbit.isa.types import Vector, bf16, f32, ir, s8, s16, s32, u8

# Without VNNI no product of bytes is exact.

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


# AVX-512 with VNNI: thirty-two 512-bit registers and exact products of bytes and words.

AVX512_VNNI = register(AVX512.plus("avx512_vnni", "avx512vnni"))

vpdpbusd = byte_products("vpdpbusd", 16, "avx512vnni")
vpdpbusd_half = byte_products("vpdpbusd_half", 8, "avx512vnni")
vpdpwssd = word_products("vpdpwssd", 16, "avx512vnni")


# AVX-512 with bfloat16 products: pairs along K multiplied and summed in float32.
#
# Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, VDPBF16PS.

AVX512_BF16 = register(AVX512_VNNI.plus("avx512_bf16", "avx512bf16", extension=True))


def starts_like_fma() -> bool:
    """Whether VDPBF16PS starts as often as VFMADD231PS on this machine, and so multiplies twice as
    many numbers: on AMD's CPUs, but not on Intel's. Source: uops.info."""
    return host.vendor() == "AuthenticAMD"


_SMALLEST_NORMAL = np.float32(2.0**-126)
_SOURCES = {1: "ps", 2: "2ps"}


@cache
def _bfloat() -> ir.Type:
    """LLVM's `bfloat`, which llvmlite does not name."""

    class BFloat(ir.Type):
        def _to_string(self) -> str:
            return "bfloat"

    return BFloat()


def flushed(values: Any) -> Any:
    """Floats as float32, with subnormal numbers made zero of their sign."""
    values = np.asarray(values).astype(np.float32)
    return np.where(np.abs(values) < _SMALLEST_NORMAL, np.copysign(np.float32(0), values), values)


def _dot(call: Call, acc: ir.Value, a: ir.Value, b: ir.Value) -> Any:
    bfloats = ir.VectorType(_bfloat(), 32)
    cast = call.builder.bitcast
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    return call.intrinsic(name, acc, cast(a, bfloats), cast(b, bfloats))


@instruction(
    Signature(Vector(f32, 16), Vector(f32, 16), Vector(bf16, 32), Vector(bf16, 32)),
    _dot,
    feature="avx512bf16",
)
def vdpbf16ps(acc: Any, a: Any, b: Any) -> Any:
    """out[i] = acc[i] + a[2i+1]·b[2i+1] + a[2i]·b[2i], in this order, each step fused.

    Subnormal inputs and results count as zero; rounding is to nearest even.
    """
    left, right = flushed(a), flushed(b)
    first = flushed(fma.meaning(left[1::2], right[1::2], flushed(acc)))
    return flushed(fma.meaning(left[0::2], right[0::2], first))


def _narrow(call: Call, *values: Any) -> Any:
    """llvmlite has no type for what these intrinsics return."""
    module, name = call.builder.module, f"llvm.x86.avx512bf16.cvtne{_SOURCES[len(values)]}2bf16.512"
    kind = ir.FunctionType(ir.VectorType(_bfloat(), 16 * len(values)), [v.type for v in values])
    function = module.globals.get(name) or ir.Function(module, kind, name)
    return call.builder.bitcast(call.builder.call(function, values), call.result.llvm)


@instruction(Signature(Vector(bf16, 16), Vector(f32, 16)), _narrow, feature="avx512bf16")
def vcvtneps2bf16(a: Any) -> Any:
    """The nearest bfloat16, ties to even; subnormal numbers as zero, the upper half of a NaN, made
    a quiet one."""
    bits = flushed(a).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(a), bits >> 16 | 0x40, rounded).astype(np.uint16).view(bf16.numpy)


@instruction(
    Signature(Vector(bf16, 32), Vector(f32, 16), Vector(f32, 16)), _narrow, feature="avx512bf16"
)
def vcvtne2ps2bf16(high: Any, low: Any) -> Any:
    """`low` and behind it `high`, each as vcvtneps2bf16 makes it."""
    return np.concatenate([vcvtneps2bf16.meaning(low), vcvtneps2bf16.meaning(high)])


# AVX-512 with permutations of bytes across a whole register.
#
# Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, VPERMI2B.

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
