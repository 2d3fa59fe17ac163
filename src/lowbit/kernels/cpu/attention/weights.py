"""Rows of scores become rows of weights, where they lie."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowbit.isa.avx512 import vcvtne2ps2bf16, vcvtneps2bf16, vreduceps_512, vscalefps_512
from lowbit.isa.generic import extract, maximum, select
from lowbit.isa.types import Value, Vector, bf16, f32, s32, with_element
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.rows.input_format import across
from lowbit.kernels.cpu.shared.formats import load_vector
from lowbit.kernels.cpu.shared.functions import constant, fused, polynomial
from lowbit.kernels.cpu.shared.post_ops import tanh

_LOG2_E = math.log2(math.e)
_LEAST = -127.0  # whose bits of the exponent, made by adding, are zero
_LEAST_NORMAL = -126.0  # to make a subnormal power takes Intel's cores hundreds of cycles
# Added to a number from -127 on, it leaves that, rounded, plus the bias of exponents, in the low
# bits.
_ROUND = 1.5 * 2.0**23 + 127
# 2^r = 1 + r·p(r) for |r| ≤ ½, minimax fits: the relative error is 1.9e-7 in float32, and 1.02e-4
# where a rounding to bfloat16, of 3.9e-3, follows.
_POWER = (1.3264727e-3, 9.6715130e-3, 5.5507336e-2, 2.4022242e-1, 6.9314700e-1)
_POWER_OF_PAIRS = (5.5008933e-2, 2.4221097e-1, 6.9328290e-1)
# The same for 0 ≤ r < 1: 1.6e-7, and 1.03e-4. At the ends they are 1 and 2, so that what is next to
# the greatest score on either side has a weight next to 1.
_FRACTION = (1.8793186e-3, 8.9909951e-3, 5.5818676e-2, 2.4015927e-1, 6.9315174e-1)
_FRACTION_OF_PAIRS = (7.8267970e-2, 2.2630768e-1, 6.9542435e-1)


def _has(k: Builder, vector: Value, feature: str) -> bool:
    """Whether the machine has a feature for such a vector of 16 lanes."""
    return vector.type == Vector(f32, 16) and feature in k.isa.features


def narrowed(k: Builder, value: Value) -> Value:
    """float32 as bfloat16, by the instruction where there is one."""
    return vcvtneps2bf16(value) if _has(k, value, "avx512bf16") else value.to(bf16)


def edge_of(k: Builder, lanes: int) -> Value:
    """2 · lanes of float32, zeros and then ones, in memory."""
    edge = k.local(f32, 2 * lanes)
    edge.store(k.zeros(f32, lanes))
    (edge + lanes).store(k.constant(1.0, f32).splat(lanes))
    return edge


@dataclass(frozen=True)
class Weigher:
    """What makes weights of scores.

    `pair`: weights are bfloat16, else float32. `factor`: of the scores, in every lane. `edge`: of
    `edge_of`. `capped`: what scores are multiplied by before a tanh takes their place, in every
    lane; None: they stay.
    """

    k: Builder
    lanes: int
    pair: bool
    factor: Value
    edge: Value
    capped: Value | None = None

    @classmethod
    def of(
        cls, k: Builder, lanes: int, pair: bool, factor: Value, edge: Value, cap: float
    ) -> Weigher:
        """factor: of the scores, and log2 e. Their exponents become cap · tanh(exponent / cap), in
        units of e; 0: they stay."""
        factor = factor.splat(lanes)
        if not cap:
            return cls(k, lanes, pair, factor, edge)
        most = constant(factor, cap * _LOG2_E)
        return cls(k, lanes, pair, most, edge, factor / most)

    def cap(self, row: Value, first: Value | int, end: Value) -> None:
        """Cap the scores from `first` to `end`, and those up to a whole vector."""
        if self.capped is None:
            return
        for at in self.k.range(first, end, self.lanes):
            (row + at).store(tanh((row + at).load(self.lanes) * self.capped))

    def exclude(self, row: Value, count: Value) -> None:
        """Make minus infinity of the first `count` scores, less than a vector of them."""
        outside = (self.edge + (self.lanes - count)).load(self.lanes)
        value = row.load(self.lanes)
        row.store(select(outside.equals(0.0), constant(value, -math.inf), value))

    def power(self, t: Value) -> Value:
        """2^t for t ≤ 0, and 1 for 0; 0 from below -126, or -126.5, on; NaN for NaN."""
        if _has(self.k, t, "avx512dq"):
            fraction = _FRACTION_OF_PAIRS if self.pair else _FRACTION
            power = vscalefps_512(polynomial(vreduceps_512(t), (*fraction, 1.0)), t)
            return select(t < _LEAST_NORMAL, constant(t, 0.0), power)
        t = maximum(constant(t, _LEAST), t)
        rounded = t + _ROUND
        r = t - (rounded - _ROUND)
        p = polynomial(r, (*(_POWER_OF_PAIRS if self.pair else _POWER), 1.0))
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

    def weigh(
        self, row: Value, limit: Value, end: Value, shift: Value, masked: bool,
        begin: Value | None = None,
    ) -> Value:  # fmt: skip
        """Make weights of the scores of a row from `begin`, a multiple of lanes, to `limit`, and
        zeros before and up to `end`, in place; sums of some of the weights in each lane. The
        greatest weight is 1, or 0 where no key takes part."""
        k, lanes = self.k, self.lanes
        target, less = row.cast(bf16) if self.pair else row, shift.splat(lanes)
        with k.scope():
            sums = [k.register(k.zeros(f32, lanes)) for _ in range(2)]

            def raised(at: Value, part: int) -> Value:
                score = (row + at).load(lanes)
                power = self.power(score + less if masked else fused(score, self.factor, less))
                sums[part].value = sums[part].value + power
                return power

            whole = (limit + (lanes - 1)) // lanes * lanes
            several = whole // (2 * lanes) * (2 * lanes)
            if begin is not None:
                several = begin + (whole - begin) // (2 * lanes) * (2 * lanes)
            for at in k.range(0 if begin is None else begin, several, 2 * lanes):
                self._store(target + at, [raised(at, 0), raised(at + lanes, 1)])
            for at in k.range(several, whole, lanes):
                self._store(target + at, [raised(at, 0)])
            zeros = k.zeros(bf16 if self.pair else f32, lanes)
            if begin is not None:
                for at in k.range(0, begin, lanes):
                    (target + at).store(zeros)
            for _ in k.when(whole < end):
                (target + whole).store(zeros)
                # Where rows see ever more keys. LLVM calls memset for it, which one vector is not
                # worth.
                for at in k.range(whole + lanes, end, lanes):
                    (target + at).store(zeros)
            return sums[0].value + sums[1].value

    def _store(self, target: Value, weights: list[Value]) -> None:
        """Vectors of weights, one or two, one behind another."""
        if self.pair and len(weights) == 2 and _has(self.k, weights[0], "avx512bf16"):
            weights = [vcvtne2ps2bf16(weights[1], weights[0])]
        elif self.pair:
            weights = [narrowed(self.k, weight) for weight in weights]
        for number, weight in enumerate(weights):
            (target + number * self.lanes).store(weight)

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
        value = value * self.factor
        if mask is not None:
            value = fused(load_vector(mask + at, self.lanes, left), _LOG2_E, value)
        if padding is not None:
            apart = load_vector(padding + at, self.lanes, left).to(s32).equals(0)
            value = select(apart, constant(value, -math.inf), value)
        return value
