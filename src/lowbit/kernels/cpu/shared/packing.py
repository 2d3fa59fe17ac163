"""Four vectors of float32 that become bytes together.

By itself a vector is clamped on both sides, rounded, and narrowed by an instruction that takes as
long as two. Four share what packs them, which clamps besides: only numbers beyond 32 bits, and not
below, would come out wrong, so that they are clamped before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lowbit.isa.avx2 import vcvtps2dq, vpackssdw, vpacksswb, vpackuswb
from lowbit.isa.avx512 import vcvtps2dq_512, vpackssdw_512, vpacksswb_512, vpackuswb_512
from lowbit.isa.generic import add_saturated, minimum, select, shuffle
from lowbit.isa.instruction import Instruction
from lowbit.isa.types import Vector, bf16, s32, u8, u32
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.shared.formats import FORMATS, LIMITS, quantizing
from lowbit.kernels.cpu.shared.functions import rounded

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
    lanes = _lanes(vectors[0])
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
    lanes = _lanes(vectors[0])
    convert, packed = quantizing(name, inverse, zero), k.zeros(s32, lanes)
    for q, value in enumerate(vectors):
        packed = packed | ((convert(value) & 0xFF) << (8 * q))
    values = packed.bits(Vector(u8, FOUR * lanes))
    order = (16 * (i // 16) + 4 * (i % 4) + i % 16 // 4 for i in range(FOUR * lanes))
    return shuffle(values, values, tuple(order))


def in_turn(packed: Value) -> Value:
    """The bytes of `quantized`, vector after vector."""
    count = _lanes(packed) // FOUR
    fours = packed.bits(Vector(u32, count))
    each = count // FOUR
    order = tuple(FOUR * i + q for q in range(FOUR) for i in range(each))
    return shuffle(fours, fours, order).bits(Vector(u8, FOUR * count))


def bfloat16_pair(first: Value, second: Value) -> Value:
    """Two vectors of float32 as bfloat16, one behind another, to the bits of a conversion: rounded
    where they are, so that the upper halves of both are taken in one operation."""
    lanes = _lanes(first)
    words = []
    for value in first, second:
        bits = value.bits(Vector(u32, lanes))
        rounded_bits = bits + (bits >> 16 & 1) + 0x7FFF
        nan = value.machine.constant(0x7FC00000, bits.type)
        number = select(value.equals(value), rounded_bits, nan)
        words.append(number.bits(Vector(bf16, 2 * lanes)))
    return shuffle(*words, tuple(range(1, 4 * lanes, 2)))


def storing_four(
    k: Builder, name: str, numbers: Sequence[Value]
) -> Callable[[list[Value]], Value] | None:
    """As `formats.storing`, to the same bits, for four vectors at once, one behind another; None
    if that is no faster. `numbers`: 1 / scale and zero point in every lane."""
    if name not in LIMITS or not packs(k, _lanes(numbers[0])):
        return None
    inverse, zero = numbers
    return lambda four: in_turn(quantized(k, name, four, inverse, zero)).bits(
        Vector(FORMATS[name], FOUR * _lanes(zero))
    )


def _lanes(value: Value) -> int:
    assert isinstance(value.type, Vector)
    return value.type.lanes
