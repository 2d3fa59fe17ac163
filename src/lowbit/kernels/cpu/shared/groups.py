"""Products with weights whose scales change along K: what happens between groups.

The weight's integers n, nibbles or bytes, are multiplied unsigned; the left operand comes as signed
bytes, the digits of a number to the base 256. With d_i digit number i (the first is the highest),
x ≈ X·q and q = Σ_i d_i·256^−i, where X belongs to the row, or to the row's group,

    Σ_k x_k·(n_k − z)·s  =  Σ_g s_g·X_g·( Σ_i 256^−i·P_ig  −  z_g·Q_g )      −s_g·z_g: an offset

with P_ig = Σ_{k∈g} d_i·n and Q_g = Σ_{k∈g} q. All P are exact integers, so the result is the same
on every instruction set. Where there are no zero points, z = 8 (of bytes 128), and groups are not
too long, all that is in brackets is one exact integer (Grouping.exact). One digit is what quantizes
activations to 8 bits; two or three are as good as bfloat16 or float32 (see digits.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from lowbit.isa.generic import minimum
from lowbit.isa.types import Vector, f32, s8, s16, s32
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.shared.layout import NIBBLE_FLIP, PANEL, blocks

_BITS = 8
_HALF_BITS = -0x70002000  # of a float32: the sign, five bits of the exponent, ten of the fraction
BASE = 2.0**_BITS
LARGEST = {1: 128, 2: 127 * 257, 3: 2**22 - 1}
"""The magnitude of a number in so many digits, at most."""


class Grouping(NamedTuple):
    """What is static about groups. It keys the code.

    `size`: the k of a group, a multiple of 8. `digits`: of the left operand, each of which is a
    row of bytes. `flip`: what has made the weight's integers unsigned, 8 or 128. `zeros`: the type
    of its zero points less that, "s8" or "f32"; "f16": of offsets in their place; "" if there are
    none. `halves`: scales are float16. `own`: of one digit, whether each group of a row has a scale
    of its own, as it has with several.
    """

    size: int
    digits: int
    zeros: str
    flip: int = NIBBLE_FLIP
    halves: bool = False
    own: bool = False

    @property
    def by_group(self) -> bool:
        """Whether rows have a scale for each group."""
        return self.own or self.digits > 1

    @property
    def exact(self) -> bool:
        """Whether int32 holds Σ q·(n − flip), q of all digits as an integer, and that is what there
        is to scale: then nothing is rounded before, whether a kernel multiplies n or n − flip."""
        return not self.zeros and self.size * self.flip * LARGEST[self.digits] < 1 << 31


# (place of the row's group, sums of each digit, total so far) -> total with this group
Add = Callable[[Value, list[Value], Value], Value]


@dataclass(frozen=True)
class Groups:
    """Where scales, zero points and sums of groups are.

    scale, zero: 16 for each group of each panel; row_scale (if that is by group) and row_sum:
    float32, one for each of `count` groups of each of `rows` rows. Exact ones have q an integer,
    and in place of its sum `flip` times that, s32.
    """

    grouping: Grouping
    scale: Value
    zero: Value
    row_scale: Value
    row_sum: Value
    rows: Value
    count: Value

    @property
    def group_pairs(self) -> int:
        """Times 8 k in a group."""
        return self.grouping.size // 8

    def place(self, row: Value, group: Value) -> Value:
        """Where the entry of a row's group is; rows that do not exist have that of the last."""
        return minimum(row, self.rows - 1) * self.count + group

    def columns(
        self, k: Builder, panel: Value, group: Value, at: int, lanes: int, centred: bool = False
    ) -> Add:
        """Load what belongs to `lanes` columns of a panel, from `at` on; return how to add a row's
        sums over this group. `centred`: they are sums of n − flip (see Grouping.exact)."""
        where = (panel * self.count + group) * PANEL + at
        scale = (_halves(self.scale, where, lanes) if self.grouping.halves
                 else (self.scale + where).load(lanes))  # fmt: skip
        offset = _halves(self.zero, where, lanes) if self.grouping.zeros == "f16" else None
        bracket = self._exact if self.grouping.exact else self._rounded(k, where, lanes)

        def add(place: Value, sums: list[Value], total: Value) -> Value:
            value = bracket(None if centred else place, sums).to(f32) * scale
            if offset is not None:
                value = value + offset * (self.row_sum + place).load().splat(lanes)
            if self.grouping.by_group:
                value = value * (self.row_scale + place).load().splat(lanes)
            return total + value

        return add

    def _exact(self, place: Value | None, sums: list[Value]) -> Value:
        """What is in brackets, s32; without `place`, of sums of n − flip."""
        value = sums[0]
        for digit in sums[1:]:
            value = (value << _BITS) + digit
        if place is None:
            return value
        return value - (self.row_sum.cast(s32) + place).load().splat(value.lanes)

    def _rounded(
        self, k: Builder, where: Value, lanes: int
    ) -> Callable[[Value | None, list[Value]], Value]:
        """What is in brackets, float32."""
        zero = k.constant(float(self.grouping.flip), f32).splat(lanes)
        if self.grouping.zeros == "s8":
            zero = zero + (self.zero.cast(s8) + where).load(lanes).to(s32).to(f32)
        elif self.grouping.zeros == "f32":
            zero = zero + (self.zero.cast(f32) + where).load(lanes)

        def bracket(place: Value | None, sums: list[Value]) -> Value:
            assert place is not None
            value = sums[0].to(f32)
            for number, digit in enumerate(sums[1:], 1):
                value = value + digit.to(f32) * BASE**-number
            if self.grouping.zeros == "f16":
                return value
            return value - zero * (self.row_sum + place).load().splat(lanes)

        return bracket


def _halves(place: Value, where: Value, lanes: int) -> Value:
    """So many float16, normal numbers, as float32: sign, exponent and fraction where they belong,
    and the exponent corrected. Not every machine has an instruction for that."""
    bits = (place.cast(s16) + where).load(lanes).to(s32) << 13 & _HALF_BITS
    return bits.bits(Vector(f32, lanes)) * 2.0**112


def group_count(grouping: Grouping, depth: int) -> int:
    """How many groups K has, the last of which may be shorter."""
    return blocks(depth, grouping.size)
