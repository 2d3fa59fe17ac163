"""Conversions between number types: LLVM's own, and bfloat16's, which are spelled out in integers,
so that every machine gives the same bits. Source: the LLVM language reference.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lowbit.isa.generic import constant_like
from lowbit.isa.instruction import Call, instruction
from lowbit.isa.types import (
    Scalar,
    Type,
    Vector,
    bf16,
    element_of,
    f32,
    ir,
    s64,
    u32,
    with_element,
)

_BFLOAT16_NAN = 0x7FC0


def _convert_type(value: Type, to: Scalar) -> Type:
    kinds = {element_of(value), to}
    if bf16 in kinds and not kinds <= {bf16, f32}:
        raise TypeError(f"a {value} is converted to {to} by way of float32")
    return with_element(value, to)


def _widened(call: Call, value: ir.Value) -> Any:
    """bfloat16 as the float32 whose upper half it is."""
    b, words = call.builder, with_element(call.result, u32)
    return b.bitcast(b.shl(b.zext(value, words.llvm), constant_like(words, 16)), call.result.llvm)


def _nearest(call: Call, value: ir.Value) -> Any:
    """float32 as the nearest bfloat16, ties to even; NaN as the one of _BFLOAT16_NAN."""
    b, words = call.builder, with_element(call.types[0], u32)
    bits = b.bitcast(value, words.llvm)
    upper = b.lshr(bits, constant_like(words, 16))
    even = b.add(bits, b.and_(upper, constant_like(words, 1)))
    rounded = b.lshr(b.add(even, constant_like(words, 0x7FFF)), constant_like(words, 16))
    is_number = b.fcmp_ordered("==", value, value)
    chosen = b.select(is_number, rounded, constant_like(words, _BFLOAT16_NAN))
    return b.trunc(chosen, call.result.llvm)


def _convert(call: Call, value: ir.Value, to: Scalar) -> Any:
    source, target, b = element_of(call.types[0]), call.result, call.builder
    if source == to:
        return value
    if bf16 in (source, to):
        return _widened(call, value) if source == bf16 else _nearest(call, value)
    if source.is_float and to.is_float:
        return (b.fpext if to.bits > source.bits else b.fptrunc)(value, target.llvm)
    if source.is_float:
        return (b.fptosi if to.kind == "s" else b.fptoui)(value, target.llvm)
    if to.is_float:
        return (b.sitofp if source.kind == "s" else b.uitofp)(value, target.llvm)
    if to.bits > source.bits:
        return (b.sext if source.kind == "s" else b.zext)(value, target.llvm)
    return b.trunc(value, target.llvm) if to.bits < source.bits else value


@instruction(_convert_type, _convert)
def convert(a: Any, to: Scalar) -> Any:
    """Lane by lane to another number type: widened by its sign, narrowed by dropping high bits;
    float32 to the nearest bfloat16, ties to even, every NaN to the same."""
    converted = np.asarray(a).astype(to.numpy)
    if to == bf16:
        converted = np.where(np.isnan(converted), to.numpy.type(np.nan), converted)
    return converted if converted.ndim else (int(converted) if to == s64 else converted[()])


def _bitcast_type(value: Type, to: Type) -> Type:
    if not isinstance(value, Scalar | Vector) or not isinstance(to, Scalar | Vector):
        raise TypeError(f"cannot reinterpret {value} as {to}")
    if value.bytes != to.bytes:
        raise TypeError(f"cannot reinterpret {value} ({value.bytes} bytes) as {to} ({to.bytes})")
    return to


@instruction(_bitcast_type, lambda call, v, to: call.builder.bitcast(v, to.llvm))
def bitcast(a: Any, to: Scalar | Vector) -> Any:
    """The same bits under another type of the same size (little-endian)."""
    viewed = np.atleast_1d(np.asarray(a)).view(element_of(to).numpy)
    return viewed if isinstance(to, Vector) else viewed[0]
