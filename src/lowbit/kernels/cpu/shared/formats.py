"""How numbers are kept in memory, and the way from there to float32 and back, in registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lowbit.isa.generic import load_head, maximum, minimum, store_head
from lowbit.isa.types import Scalar, bf16, f32, s8, s32, s64, u8, u16, u32
from lowbit.isa.value import Value
from lowbit.kernels.cpu.shared.functions import canonical, constant, rounded

# Formats by name, and what lies in memory. Integers come with a scale and a zero point.
FORMATS: dict[str, Scalar] = {"f32": f32, "bf16": bf16, "u8": u8, "s8": s8, "s32": s32}
# Integers that stand for themselves.
WIDE: dict[str, Scalar] = {"s64": s64}
# Elements that are only moved, by their size in bytes.
RAW: dict[str, Scalar] = {"raw1": u8, "raw2": u16, "raw4": u32, "raw8": s64}
LIMITS = {"u8": (0.0, 255.0), "s8": (-128.0, 127.0)}
# What float32 holds of integers that have no scale.
_WIDE_LIMITS = {"s32": (-(2.0**31), 2.0**31 - 2.0**7), "s64": (-(2.0**63), 2.0**63 - 2.0**39)}

Convert = Callable[[Value], Value]


def parameters_of(name: str) -> int:
    """How many float32 numbers go with a format: scale (its inverse for an output), zero point."""
    return 2 if name in FORMATS and name not in ("f32", "bf16") else 0


def same(value: Value) -> Value:
    """The conversion of what is only moved."""
    return value


def dequantizing(name: str, numbers: Sequence[Value]) -> Convert:
    """From what a format stores to float32: (q − zero point) · scale, rounded once for 8 bits."""
    if not numbers:
        return lambda value: value.to(f32)
    scale, zero = numbers
    whole_zero = rounded(zero)
    return lambda value: (value.to(s32) - whole_zero).to(f32) * scale


def storing(name: str, numbers: Sequence[Any]) -> Convert:
    """From float32 to what a format stores. s32 and s64 take what is left of a number without its
    fraction, clamped, and no scale or zero point."""
    if name in LIMITS:
        quantized = quantizing(name, *numbers)
        return lambda value: quantized(value).to(FORMATS[name])
    if name in _WIDE_LIMITS:
        least, greatest = _WIDE_LIMITS[name]
        return lambda value: minimum(
            maximum(value, constant(value, least)), constant(value, greatest)
        ).to((FORMATS | WIDE)[name])
    return canonical if name == "f32" else lambda value: value.to(FORMATS[name])


def quantizing(name: str, inverse: Value | None, zero: Value) -> Convert:
    """From float32 to what bytes hold, as s32: clamped first, so that rounding cannot leave; NaN to
    the least. Without `inverse` numbers are steps already."""
    least, greatest = (limit - zero for limit in LIMITS[name])
    whole_zero = rounded(zero)

    def quantized(value: Value) -> Value:
        steps = value if inverse is None else value * inverse
        steps = minimum(maximum(steps, least), greatest)
        return rounded(steps) + whole_zero

    return quantized


def load_vector(source: Value, lanes: int, left: Value | None) -> Value:
    """So many lanes, of which only `left` exist, if that is given."""
    return source.load(lanes) if left is None else load_head(source, left, lanes)


def store_vector(value: Value, place: Value, left: Value | None) -> None:
    """Store all lanes, or the first `left`, if that is given."""
    if left is None:
        place.store(value)
    else:
        store_head(value, place, left)
