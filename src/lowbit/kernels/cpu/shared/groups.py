"""Products with 4-bit weights whose scales change along K: what happens between groups.

The weight's nibbles n are multiplied as they are, unsigned; the left operand comes as signed bytes,
the digits of a number to the base 256. With d_i digit number i (the first is the highest), x ≈ X·q
and q = Σ_i d_i·256^−i, where X belongs to the row, or to the row's group,

    Σ_k x_k·(n_k − z)·s  =  Σ_g s_g·X_g·( Σ_i 256^−i·P_ig  −  z_g·Q_g )

with P_ig = Σ_{k∈g} d_i·n and Q_g = Σ_{k∈g} q. All P are exact integers, so the result is the same
on every instruction set. One digit is what quantizes activations to 8 bits; two or three are as
good as bfloat16 or float32 (see digits.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from lowbit.isa.generic import minimum
from lowbit.isa.types import f32, s8, s32
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.shared.layout import FLIP, NIBBLE_FLIP, PANEL, blocks

BASE = 256.0


class Grouping(NamedTuple):
    """What is static about groups. It keys the code.

    `size`: the k of a group, a multiple of 8. `digits`: of the left operand, each of which is a
    row of bytes. `zeros`: the type of the weight's zero points less 8, "s8" or "f32"; "" if
    there are none.
    """

    size: int
    digits: int
    zeros: str

    @property
    def centred(self) -> bool:
        """Whether Σ d·(n − 8) of integers is bit for bit what P − 8·Q is in float32, so that a
        kernel may multiply n − 8."""
        largest = self.size * FLIP * (2 * NIBBLE_FLIP - 1)
        return self.digits == 1 and not self.zeros and largest <= _EXACT


# (place of the row's group, sums of each digit, total so far) -> total with this group
Add = Callable[[Value, list[Value], Value], Value]

_EXACT = 1 << 24  # up to which float32 holds all integers


@dataclass(frozen=True)
class Groups:
    """Where scales, zero points and sums of groups are.

    scale, zero: 16 for each group of each panel; row_scale (with several digits) and row_sum:
    float32, one for each of `count` groups of each of `rows` rows.
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
        """Lines of nibbles, 8 k, in a group."""
        return self.grouping.size // 8

    def place(self, row: Value, group: Value) -> Value:
        """Where the entry of a row's group is; rows that do not exist have that of the last."""
        return minimum(row, self.rows - 1) * self.count + group

    def columns(
        self, k: Builder, panel: Value, group: Value, at: int, lanes: int, centred: bool = False
    ) -> Add:
        """Load what belongs to `lanes` columns of a panel, from `at` on; return how to add a row's
        sums over this group. `centred`: they are sums of n − 8 (see Grouping.centred)."""
        where = (panel * self.count + group) * PANEL + at
        scale = (self.scale + where).load(lanes)
        zero = k.constant(float(NIBBLE_FLIP), f32).splat(lanes)
        if self.grouping.zeros == "s8":
            zero = zero + (self.zero.cast(s8) + where).load(lanes).to(s32).to(f32)
        elif self.grouping.zeros:
            zero = zero + (self.zero.cast(f32) + where).load(lanes)

        def add(place: Value, sums: list[Value], total: Value) -> Value:
            value = sums[0].to(f32)
            for number, digit in enumerate(sums[1:], 1):
                value = value + digit.to(f32) * BASE**-number
            if not centred:
                value = value - zero * (self.row_sum + place).load().splat(lanes)
            value = value * scale
            if len(sums) > 1:
                value = value * (self.row_scale + place).load().splat(lanes)
            return total + value

        return add


def group_count(grouping: Grouping, depth: int) -> int:
    """How many groups K has, the last of which may be shorter."""
    return blocks(depth, grouping.size)
