"""How numbers are kept in memory, and the way from there to float32 and back, in registers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lowbit.isa.avx2 import vcvtps2dq, vpackssdw, vpacksswb, vpackuswb
from lowbit.isa.avx512 import vcvtps2dq_512, vpackssdw_512, vpacksswb_512, vpackuswb_512
from lowbit.isa.generic import (
    add_saturated,
    load_head,
    maximum,
    minimum,
    select,
    shuffle,
    store_head,
)
from lowbit.isa.instruction import Instruction
from lowbit.isa.types import Scalar, Vector, bf16, f32, s8, s16, s32, s64, u8, u16, u32, u64
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.shared.functions import canonical, constant, constant_of, rounded

# Formats by name, and what lies in memory. Integers come with a scale and a zero point.
FORMATS: dict[str, Scalar] = {"f32": f32, "bf16": bf16, "u8": u8, "s8": s8, "s32": s32}
TENSORS = ("f32", "bf16", "u8", "s8")
"""Formats of what attention and passes over rows read and write."""
# Integers and truth values that stand for themselves, by NumPy's names.
WHOLE: dict[str, Scalar] = {
    "int8": s8, "uint8": u8, "int16": s16, "uint16": u16, "int32": s32, "uint32": u32,
    "int64": s64, "uint64": u64, "bool": u8,
}  # fmt: skip
# Elements that are only moved, by their size in bytes.
RAW: dict[str, Scalar] = {"raw1": u8, "raw2": u16, "raw4": u32, "raw8": s64}
LIMITS = {"u8": (0.0, 255.0), "s8": (-128.0, 127.0)}

Affine = tuple[float, int]  # a scale and a zero point
Convert = Callable[[Value], Value]


def check_formats(names: Iterable[str], known: Collection[str]) -> None:
    """ValueError: one of the names is none of those known."""
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is no format; known: {', '.join(known)}")


def parameters_of(name: str) -> int:
    """How many float32 numbers go with a format: scale (its inverse for an output), zero point."""
    return 2 if name in FORMATS and name not in ("f32", "bf16") else 0


def to_store(out: Affine | None) -> tuple[float, ...]:
    """The numbers of an output, if it is of 8 bits."""
    return () if out is None else (float(np.float32(1) / np.float32(out[0])), out[1])


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
    """From float32 to what a format stores."""
    if name in LIMITS:
        quantized = quantizing(name, *numbers)
        return lambda value: quantized(value).to(FORMATS[name])
    if name in WHOLE:
        return partial(_whole_part, name)
    return canonical if name == "f32" else lambda value: value.to(FORMATS[name])


def _whole_part(name: str, value: Value) -> Value:
    """float32 without its fraction, as `numerics.formats.whole_part` has it. As a bool: whether it
    is not 0."""
    kind = WHOLE[name]
    if name == "bool":
        truth = constant_of(value, u8, 1)
        return select(value.equals(0.0), truth - truth, truth)
    if kind == u64:
        half = constant(value, 2.0**63)
        upper = _converted(value - half, s64) ^ -(2**63)
        return select(value < half, _converted(value, s64), upper).to(u64)
    return _converted(value, s64 if kind.bits == 64 or kind == u32 else s32).to(kind)


def _converted(value: Value, kind: Scalar) -> Value:
    """float32 as s32 or s64; what these do not hold, and NaN, as their least."""
    limit = np.float32(2.0 ** (kind.bits - 1))
    below = float(np.nextafter(-limit, np.float32(-np.inf)))
    inside = (constant(value, below) < value) & (value < float(limit))
    whole = select(inside, value, constant(value, 0.0)).to(kind)
    return select(inside, whole, constant_of(value, kind, -(2 ** (kind.bits - 1))))


def storing_whole(name: str) -> Convert:
    """From integers of any type to integers that stand for themselves, which wrap; of bool
    whether they are not 0."""
    if name != "bool":
        return lambda value: value.to(WHOLE[name])

    def truth(value: Value) -> Value:
        one = constant(value, 1)
        return select(value.equals(0), one - one, one).to(u8)

    return truth


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


def transposed(rows: Sequence[Value]) -> list[Value]:
    """Squares of as many lanes as there are vectors, side by side: each by itself, transposed.

    Each pass interleaves vector i with vector i + count/2, which rotates the bits of an element's
    place, (vector, lane), by one.
    """
    turned, count, lanes = list(rows), len(rows), rows[0].lanes
    low = [at + i // 2 + lanes * (i % 2) for at in range(0, lanes, count) for i in range(count)]
    zips = tuple(low), tuple(lane + count // 2 for lane in low)
    for _ in range(count.bit_length() - 1):
        pairs = zip(turned[: count // 2], turned[count // 2 :], strict=True)
        turned = [shuffle(a, b, order) for a, b in pairs for order in zips]
    return turned


# Four vectors of float32 that become bytes together.
#
# By itself a vector is clamped on both sides, rounded, and narrowed by an instruction that takes as
# long as two. Four share what packs them, which clamps besides: only numbers beyond 32 bits, and
# not below, would come out wrong, so that they are clamped before.

FOUR = 4


class _Instructions(NamedTuple):
    nearest: Instruction
    words: Instruction
    bytes: dict[str, Instruction]


_BY_LANES = {
    16: _Instructions(vcvtps2dq_512, vpackssdw_512, {"s8": vpacksswb_512, "u8": vpackuswb_512}),
    8: _Instructions(vcvtps2dq, vpackssdw, {"s8": vpacksswb, "u8": vpackuswb}),
}


def packs(k: Builder, lanes: int) -> bool:
    """Whether the machine packs vectors of so many lanes."""
    found = _BY_LANES.get(lanes)
    return found is not None and found.words.feature in k.isa.features


def quantized(
    k: Builder, name: str, vectors: list[Value], inverse: Value | None, zero: Value
) -> Value:
    """Four vectors as bytes, of each 16 of which every vector has four in turn; quantized to "u8"
    or "s8" as `formats.quantizing` does, to the same bits."""
    lanes = vectors[0].lanes
    if not packs(k, lanes):
        return _one_by_one(k, name, vectors, inverse, zero)
    nearest, words, pack = _BY_LANES[lanes]
    greatest, whole_zero = LIMITS[name][1] - zero, rounded(zero)
    # NaN and what is less than 32 bits hold become the least of these, which is clamped below.
    steps = vectors if inverse is None else [value * inverse for value in vectors]
    whole = [nearest(minimum(greatest, value)) for value in steps]
    shift = words(whole_zero, whole_zero)
    halves = (add_saturated(words(a, b), shift) for a, b in (whole[:2], whole[2:]))
    return pack[name](*halves).bits(Vector(u8, FOUR * lanes))


def _one_by_one(
    k: Builder, name: str, vectors: list[Value], inverse: Value | None, zero: Value
) -> Value:
    lanes = vectors[0].lanes
    convert, packed = quantizing(name, inverse, zero), k.zeros(s32, lanes)
    for q, value in enumerate(vectors):
        packed = packed | ((convert(value) & 0xFF) << (8 * q))
    values = packed.bits(Vector(u8, FOUR * lanes))
    order = (16 * (i // 16) + 4 * (i % 4) + i % 16 // 4 for i in range(FOUR * lanes))
    return shuffle(values, values, tuple(order))


def in_turn(packed: Value) -> Value:
    """The bytes of `quantized`, vector after vector."""
    count = packed.lanes // FOUR
    fours = packed.bits(Vector(u32, count))
    each = count // FOUR
    order = tuple(FOUR * i + q for q in range(FOUR) for i in range(each))
    return shuffle(fours, fours, order).bits(Vector(u8, FOUR * count))


def bfloat16_pair(first: Value, second: Value) -> Value:
    """Two vectors of float32 as bfloat16, one behind another, to the bits of a conversion: rounded
    where they are, so that the upper halves of both are taken in one operation."""
    lanes = first.lanes
    halves = []
    for value in first, second:
        bits = canonical(value).bits(Vector(u32, lanes))
        rounded_bits = bits + (bits >> 16 & 1) + 0x7FFF
        halves.append(rounded_bits.bits(Vector(bf16, 2 * lanes)))
    return shuffle(*halves, tuple(range(1, 4 * lanes, 2)))


class RowStore:
    """How rows of float32 vectors are stored in a format, to the bits of `formats.storing`; those
    of 8 bits four vectors at once, where that is faster. `numbers`: the format's, in every lane."""

    def __init__(self, k: Builder, name: str, numbers: Sequence[Value], lanes: int) -> None:
        self._k, self._name, self._numbers, self._lanes = k, name, numbers, lanes
        self._convert = storing(name, numbers)
        self._packs = name in LIMITS and packs(k, lanes)

    def __call__(
        self, width: Value, value: Callable[[Value, Value | None], Value], target: Value
    ) -> None:
        """Store a row of so many numbers. `value`: a vector of it, by where that begins and how
        many of its lanes exist; None: all."""
        k, lanes = self._k, self._lanes

        def one(at: Value, left: Value | None = None) -> None:
            store_vector(self._convert(value(at, left)), target + at, left)

        fours, whole = (width // size * size for size in (FOUR * lanes, lanes))
        for at in k.range(0, fours, FOUR * lanes):
            places = [at + i * lanes for i in range(FOUR)]
            if self._packs:
                packed = quantized(k, self._name, [value(p, None) for p in places], *self._numbers)
                (target + at).store(in_turn(packed).bits(Vector(FORMATS[self._name], FOUR * lanes)))
            else:
                for place in places:
                    one(place)
        for at in k.range(fours, whole, lanes):
            one(at)
        for _ in k.when(whole < width):
            one(whole, width - whole)
