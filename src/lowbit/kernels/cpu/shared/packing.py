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
from lowbit.isa.generic import add_saturated, minimum, shuffle
from lowbit.isa.instruction import Instruction
from lowbit.isa.types import Vector, bf16, s32, u8, u32
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.shared.formats import FORMATS, LIMITS, quantizing, store_vector, storing
from lowbit.kernels.cpu.shared.functions import canonical, rounded

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


def _lanes(value: Value) -> int:
    assert isinstance(value.type, Vector)
    return value.type.lanes
