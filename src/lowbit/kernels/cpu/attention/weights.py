"""Rows of scores become rows of weights, where they lie."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

from lowbit.isa.avx512_bf16 import vcvtneps2bf16
from lowbit.isa.generic import extract, load_head, maximum, select
from lowbit.isa.types import Value, Vector, bf16, f32, s32, with_element
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.rows.input_format import across
from lowbit.kernels.cpu.shared.functions import constant, fused

_LOG2_E = math.log2(math.e)
_LEAST = -127.0  # from which on a power of two is zero
# Added to a number from -127 on, it leaves that, rounded, plus the bias of exponents, in the low
# bits.
_ROUND = 1.5 * 2.0**23 + 127
# 2^r = 1 + r·p(r) for |r| ≤ ½, minimax fits: the relative error is 1.9e-7 in float32, and 1.02e-4
# where a rounding to bfloat16, of 3.9e-3, follows.
_POWER = (1.3264727e-3, 9.6715130e-3, 5.5507336e-2, 2.4022242e-1, 6.9314700e-1)
_POWER_OF_PAIRS = (5.5008933e-2, 2.4221097e-1, 6.9328290e-1)


def narrowed(k: Builder, value: Value) -> Value:
    """float32 as bfloat16, by the instruction where there is one."""
    whole = value.type == Vector(f32, 16)
    return vcvtneps2bf16(value) if whole and "avx512bf16" in k.isa.features else value.to(bf16)


@dataclass(frozen=True)
class Weigher:
    """What makes weights of scores.

    `pair`: weights are bfloat16, else float32. `factor`: of the scores, in every lane. `edge`:
    2 · lanes of float32, zeros and then ones, in memory.
    """

    k: Builder
    lanes: int
    pair: bool
    factor: Value
    edge: Value

    def power(self, t: Value) -> Value:
        """2^t for t ≤ 0; 0 below -126.5, NaN for NaN."""
        t = maximum(constant(t, _LEAST), t)
        rounded = t + _ROUND
        r = t - (rounded - _ROUND)
        coefficients = _POWER_OF_PAIRS if self.pair else _POWER
        p = constant(t, coefficients[0])
        for coefficient in (*coefficients[1:], 1.0):
            p = fused(p, r, coefficient)
        exponent = (rounded.bits(with_element(t.type, s32)) << 23).bits(with_element(t.type, f32))
        return p * exponent

    def inside(self, value: Value, left: Value) -> Value:
        """The first `left` lanes, and minus infinity."""
        outside = (self.edge + (self.lanes - left)).load(self.lanes)
        return select(outside.equals(0.0), value, constant(value, -math.inf))

    def shift(self, row: Value, limit: Value, mask: Value | None, padding: Value | None) -> Value:
        """What is to be added to exponents: the greatest one's opposite, or 0 if none is finite.

        Scores of a row that are masked are replaced, as are those behind the end of its last
        vector; with masks, by exponents.
        """
        greatest = self._greatest(row, limit, mask, padding)
        if mask is None and padding is None:
            greatest = greatest * self.factor
        none = greatest.equals(-math.inf)
        return extract(select(none, constant(greatest, 0.0), 0.0 - greatest), 0)

    def weigh(self, row: Value, limit: Value, end: Value, shift: Value, masked: bool) -> Value:
        """Make weights of the first `limit` scores of a row, and zeros up to `end`, in place; the
        sum of the weights, of which the greatest is 1, or 0 where no key takes part."""
        k, lanes = self.k, self.lanes
        target, less = row.cast(bf16) if self.pair else row, shift.splat(lanes)
        with k.scope():
            sums = [k.register(k.zeros(f32, lanes)) for _ in range(2)]

            def raise_(at: Value, part: int) -> None:
                score = (row + at).load(lanes)
                t = score + less if masked else fused(score, self.factor, less)
                power = self.power(t)
                sums[part].value = sums[part].value + power
                (target + at).store(narrowed(k, power) if self.pair else power)

            whole = (limit + (lanes - 1)) // lanes * lanes
            several = whole // (2 * lanes) * (2 * lanes)
            for at in k.range(0, several, 2 * lanes):
                raise_(at, 0)
                raise_(at + lanes, 1)
            for at in k.range(several, whole, lanes):
                raise_(at, 0)
            zeros = k.zeros(bf16 if self.pair else f32, lanes)
            for _ in k.when(whole < end):
                (target + whole).store(zeros)
                # Where rows see ever more keys. LLVM calls memset for it, which one vector is not
                # worth.
                for at in k.range(whole + lanes, end, lanes):
                    (target + at).store(zeros)
            return across(sums[0].value + sums[1].value, operator.add)

    def _greatest(
        self, row: Value, limit: Value, mask: Value | None, padding: Value | None
    ) -> Value:
        """The greatest of a row, in every lane."""
        k, lanes = self.k, self.lanes
        masked = mask is not None or padding is not None
        lowest = k.constant(-math.inf, f32).splat(lanes)
        with k.scope():
            most = [k.register(lowest) for _ in range(2)]

            def take(at: Value, left: Value | None, part: int) -> None:
                value = (row + at).load(lanes)
                if masked:
                    value = self._masked(value, at, left, mask, padding)
                if left is not None:
                    value = self.inside(value, left)
                if masked or left is not None:
                    (row + at).store(value)
                most[part].value = maximum(value, most[part].value)

            several, whole = limit // (2 * lanes) * (2 * lanes), limit // lanes * lanes
            for at in k.range(0, several, 2 * lanes):
                take(at, None, 0)
                take(at + lanes, None, 1)
            for at in k.range(several, whole, lanes):
                take(at, None, 0)
            for _ in k.when(whole < limit):
                take(whole, limit - whole, 0)
            both = maximum(most[0].value, most[1].value)
        return across(both, maximum).splat(lanes)

    def _masked(
        self, value: Value, at: Value, left: Value | None, mask: Value | None, padding: Value | None
    ) -> Value:
        """The exponents of scores, with minus infinity for those that do not take part."""

        def read(pointer: Value) -> Value:
            place = pointer + at
            return place.load(self.lanes) if left is None else load_head(place, left, self.lanes)

        value = value * self.factor
        if mask is not None:
            value = fused(read(mask), _LOG2_E, value)
        if padding is not None:
            apart = read(padding).to(s32).equals(0)
            value = select(apart, constant(value, -math.inf), value)
        return value
