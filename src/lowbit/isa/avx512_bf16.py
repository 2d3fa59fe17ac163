"""AVX-512 with bfloat16 products: pairs along K multiplied and summed in float32.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, VDPBF16PS.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from lowbit.isa import host
from lowbit.isa.avx512_vnni import AVX512_VNNI
from lowbit.isa.generic import fma
from lowbit.isa.instruction import Call, Signature, instruction
from lowbit.isa.instruction_set import register
from lowbit.isa.types import Vector, bf16, f32, ir

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
