"""The search for scales and zero points of least squared error, as numerics/ranges.py states it.

A lane is a group. What comes out is the same to the bit as there; two things that cannot change it
are left out:

- Factors that no group can be best with. The terms of a sum are not negative, and rounding is
  monotonic, so a sum is never below what two of its terms, those of the least and the greatest
  element, make alone.
- The comparison in float64, for groups where the one in float32 decides. An element's error in
  units of the scale is off by no more than η = 2^(bits−20), and a sum of squares in float32, in
  spans of 8192, by less than 2^-10 of itself. So where the root of the mean square is above 1/16
  with the given scale, a sum that is less by 2^(bits−12) of itself is less in float64. (Of very
  large and very small scales, which are rounded otherwise there, nothing is said.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lowbit.isa.generic import maximum, minimum, select
from lowbit.isa.types import Vector, element_of, f32, f64, s32
from lowbit.isa.value import Register, Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.rows.input_format import across
from lowbit.numerics import IntFormat
from lowbit.numerics.affine import SMALLEST_SCALE
from lowbit.numerics.ranges import FACTORS, PARTS, SPAN, TURN, TURNS
from lowbit.registry.locks import cached_property

# What numerics/affine.py states, in kernels: float64 where it has float64, the same bits.

LARGEST = float(np.finfo(np.float32).max)
# Added to a number of less than a quarter of it and taken away again, it leaves the nearest
# integer, ties to even.
_ROUND = {f32: 1.5 * 2.0**23, f64: 1.5 * 2.0**52}


def nearest(value: Value, low: Value | None, high: Value | None) -> Value:
    """The nearest integers, ties to even, within integer bounds of less than 2^21; None: no number
    is beyond. Bounding first gives the same as bounding last."""
    if low is not None:
        value = maximum(value, low)
    if high is not None:
        value = minimum(value, high)
    magic = _ROUND[element_of(value.type)]
    return (value + magic) - magic


def parameters(
    k: Builder, low: Value, high: Value, fmt: IntFormat, symmetric: bool
) -> tuple[Value, Value]:
    """`affine_parameters` of vectors of float32, low ≤ 0 ≤ high: scales, and zero points as
    float32."""
    lanes = low.lanes
    wide = Vector(f64, lanes)
    low, high = low.to(f64), high.to(f64)
    if symmetric:
        exact = maximum(0.0 - low, high) / float(fmt.qmax - fmt.midpoint)
    else:
        exact = (high - low) / float(fmt.qmax - fmt.qmin)
    floored = maximum(exact, k.constant(float(SMALLEST_SCALE), wide))
    nothing = low.equals(high)
    scale = select(nothing, k.constant(1, wide), floored).to(f32)
    if symmetric:
        return scale, k.constant(fmt.midpoint, Vector(f32, lanes))
    least = k.constant(fmt.qmin - fmt.qmax, wide)
    zero = float(fmt.qmin) - nearest(low / scale.to(f64), least, None)
    return scale, zero.to(f32)


def steps(x: Value, scale: Value, zero: Value, fmt: IntFormat) -> Value:
    """`quantize_affine` of float32, less the zero point, in float64; all three are vectors of
    float32."""
    z = zero.to(f64)
    return nearest(x.to(f64) / scale.to(f64), float(fmt.qmin) - z, float(fmt.qmax) - z)


def dequantized(k: Builder, steps: Value, scale: Value) -> Value:
    """`dequantize_affine`: float32."""
    largest = k.constant(LARGEST, scale.type)  # type: ignore[arg-type]
    return minimum(maximum(steps.to(f32) * scale, 0.0 - largest), largest)


# Sums over the elements of groups, a lane for each group, in the orders that numerics states.
#
# Elements lie in memory one vector after another. Lanes never meet, so the bits of a sum do not
# depend on how many there are, and so on no instruction set.

# A vector of elements -> what is added to each sum.
Terms = Callable[[Value], Sequence[Value]]

_LEAF, _EIGHT, _DEPTH = 128, 8, 16


def ordered_sums(
    k: Builder, source: Value, size: Value, kind: Vector, count: int, terms: Terms
) -> list[Value]:
    """`count` sums, vectors of `kind`, as `numerics.ranges.ordered_sum` adds. Behind the last of
    `size` elements are zeros, whose terms are 0, up to a multiple of `PARTS`."""
    registers = PARTS * -(-kind.bytes // k.isa.vector_bytes)
    together = max(1, (k.isa.vector_registers - 2) // registers)
    sums: list[Value] = []
    for first in range(0, count, together):
        some = slice(first, min(first + together, count))
        sums += _sums(k, source, size, kind, some, terms)
    return sums


def _sums(
    k: Builder, source: Value, size: Value, kind: Vector, some: slice, terms: Terms
) -> list[Value]:
    """Those of some of the terms, as many as there are registers for."""
    lanes, zeros = kind.lanes, k.constant(0, kind)
    totals = [k.local(kind.element, lanes) for _ in range(some.start, some.stop)]
    for total in totals:
        total.store(zeros)
    length = select(size > 2 * SPAN, k.index(SPAN), maximum(size, k.index(1)))
    for span in k.range(0, size, length):
        with k.scope():
            sums = [[k.register(zeros) for _ in range(PARTS)] for _ in totals]
            end = minimum(span + length, size)
            whole = span + (end - span) // TURN * TURN

            def add(
                at: Value, starts: Sequence[int], sums: Sequence[Sequence[Register]] = sums
            ) -> None:
                for start in starts:
                    for part in range(PARTS):
                        vector = (source + (at + (start + part)) * lanes).load(lanes)
                        for one, term in zip(sums, terms(vector)[some], strict=True):
                            one[part].value = one[part].value + term

            for at in k.range(span, whole, TURN):
                add(at, range(TURN - PARTS, -1, -PARTS))
            for at in k.range(whole, end, PARTS):
                add(at, (0,))
            for total, (a, b, c, d) in zip(totals, sums, strict=True):
                total.store(total.load(lanes) + ((a.value + b.value) + (c.value + d.value)))
    return [total.load(lanes) for total in totals]


def leaves(size: int) -> list[tuple[int, int]]:
    """How `np.sum` adds a contiguous row of so many: (elements that are added together, how often
    the last two sums are then added), in order."""
    if size <= _LEAF:
        return [(size, 0)]
    half = size // 2 // _EIGHT * _EIGHT
    first, second = leaves(half), leaves(size - half)
    count, merges = second.pop()
    return [*first, *second, (count, merges + 1)]


def pairwise_sum(k: Builder, source: Value, plan: Value, count: Value, lanes: int) -> Value:
    """The sum of all elements, float32, by the `leaves` in `plan`, s64 [count, 2]."""
    stack = k.local(f32, _DEPTH * lanes)
    first, top = k.register(k.index(0)), k.register(k.index(0))
    for leaf in k.range(0, count):
        size = (plan + leaf * 2).load()
        (stack + top.value * lanes).store(_leaf(k, source + first.value * lanes, size, lanes))
        first.value = first.value + size
        top.value = top.value + 1
        for _ in k.range(0, (plan + (leaf * 2 + 1)).load()):
            top.value = top.value - 1
            last = stack + (top.value - 1) * lanes
            last.store(last.load(lanes) + (last + lanes).load(lanes))
    return stack.load(lanes)


def _leaf(k: Builder, source: Value, size: Value, lanes: int) -> Value:
    """In eight parts, then their sums, then what is left, one by one."""

    def element(at: Value | int) -> Value:
        return (source + at * lanes).load(lanes)

    with k.scope():
        total = k.register(k.zeros(f32, lanes))
        whole = size // _EIGHT * _EIGHT
        for _ in k.when(whole > 0):
            parts = [k.register(element(part)) for part in range(_EIGHT)]
            for at in k.range(_EIGHT, whole, _EIGHT):
                for part, register in enumerate(parts):
                    register.value = register.value + element(at + part)
            a, b, c, d, e, f, g, h = (part.value for part in parts)
            total.value = ((a + b) + (c + d)) + ((e + f) + (g + h))
        for at in k.range(whole, size):
            total.value = total.value + element(at)
        return total.value


_PLAIN = 2.0**100  # scales below, and above its inverse, with which nothing over- or underflows
_CLEAR = 1 / 256  # of a mean square, in units of the scale
_SLACK = 1 + 2.0**-20  # how far rounding may take the extremes beyond the ends of the format


@dataclass(frozen=True)
class Groups:
    """As many groups as a vector has lanes: x and u = x / scale, float32 [size rounded up to 4,
    lanes]; the scales and zero points of the whole range; the least and greatest u, or 0."""

    k: Builder
    x: Value
    u: Value
    size: Value
    scale: Value
    zero: Value
    low: Value
    high: Value

    @cached_property
    def kind(self) -> Vector:
        assert isinstance(self.scale.type, Vector)
        return self.scale.type

    def constant(self, number: float) -> Value:
        return self.k.constant(number, self.kind)

    def kept(self, value: Value) -> Value:
        """Memory for a vector that changes."""
        place = self.k.local(f32, self.kind.lanes)
        place.store(value)
        return place

    def get(self, place: Value) -> Value:
        return place.load(self.kind.lanes)

    def any(self, condition: Value) -> Value:
        """Whether it holds in a lane."""
        ones = self.k.constant(1, Vector(s32, self.kind.lanes))
        return across(select(condition, ones, ones - ones), maximum) > 0


@dataclass(frozen=True)
class Tried:
    """A factor of the scale, and zero points: vectors of float32. `bounded`: whether integers can
    be below, and above, the format's ends."""

    factor: Value
    inverse: Value
    zero: Value
    fmt: IntFormat
    bounded: tuple[bool, bool] = (True, True)

    def integers(self, u: Value) -> Value:
        """The nearest ones, less the zero points."""
        below, above = self.bounded
        low = float(self.fmt.qmin) - self.zero if below else None
        return nearest(u * self.inverse, low, float(self.fmt.qmax) - self.zero if above else None)

    def error(self, u: Value, integers: Value | None = None) -> Value:
        """The squared error."""
        rest = (self.integers(u) if integers is None else integers) * self.factor - u
        return rest * rest


class Search:
    """The best of what was tried so far."""

    def __init__(self, groups: Groups, fmt: IntFormat, symmetric: bool) -> None:
        self._groups, self._fmt, self._symmetric = groups, fmt, symmetric
        self._least = groups.kept(groups.constant(float("inf")))
        self._factor = groups.kept(groups.constant(1))
        self._zero = groups.kept(groups.zero)

    def run(self, plan: Value, plan_count: Value) -> tuple[Value, Value]:
        """Scales and zero points. `plan` is that of `pairwise_sum`."""
        given = self._grid()
        if not self._symmetric:
            self._neighbours()
        self._turns(plan, plan_count)
        return self._decided(given)

    def _keep_better(self, one: Tried, error: Value) -> None:
        get = self._groups.get
        least = get(self._least)
        better = error < least
        self._least.store(select(better, error, least))
        self._factor.store(select(better, one.factor, get(self._factor)))
        if not self._symmetric:
            self._zero.store(select(better, one.zero, get(self._zero)))

    def _try(self, some: Sequence[Tried]) -> list[Value]:
        g = self._groups
        with g.k.scope():
            errors = ordered_sums(
                g.k, g.u, g.size, g.kind, len(some), lambda u: [one.error(u) for one in some]
            )
        for one, error in zip(some, errors, strict=True):
            self._keep_better(one, error)
        return errors

    def _grid(self) -> Value:
        """Try the factors; return the error of the whole range, for which the factor is 1."""
        g = self._groups
        together = 3 if g.k.isa.vector_registers > 16 else 1
        tried = [self._of_grid(np.float32(factor)) for factor in FACTORS]
        given, *_ = self._try([self._of_grid(np.float32(1))])
        for start in range(0, len(tried), together):
            some = tried[start : start + together]
            bounds = [one.error(g.low) + one.error(g.high) for one in some]
            lowest = bounds[0]
            for bound in bounds[1:]:
                lowest = minimum(lowest, bound)
            for _ in g.k.when(g.any(lowest < g.get(self._least))):
                self._try(some)
        return given

    def _of_grid(self, factor: np.float32) -> Tried:
        g, fmt = self._groups, self._fmt
        bounded = True, True
        if self._symmetric:  # no |u| is beyond qmax - midpoint
            end = (fmt.qmax - fmt.midpoint) * _SLACK / float(factor)
            bounded = end > fmt.midpoint - fmt.qmin + 0.5, end > fmt.qmax - fmt.midpoint + 0.5
        inverse = np.float32(1) / factor
        return Tried(g.constant(float(factor)), g.constant(float(inverse)), g.zero, fmt, bounded)

    def _tried(self, factor: Value, zero: Value) -> Tried:
        return Tried(factor, 1.0 / factor, zero, self._fmt)

    def _neighbours(self) -> None:
        """The zero points beside the given ones, with the best factor."""
        g, fmt = self._groups, self._fmt
        factor = g.get(self._factor)
        low, high = g.constant(fmt.qmin), g.constant(fmt.qmax)
        moved = (maximum(g.zero - 1.0, low), minimum(g.zero + 1.0, high))
        for zero in moved:
            self._try([self._tried(factor, zero)])

    def _turns(self, plan: Value, plan_count: Value) -> None:
        """Lines of least squares for the integers, and the integers of these lines, in turn."""
        g = self._groups
        factor, zero = g.kept(g.get(self._factor)), g.kept(g.get(self._zero))
        sum_u = g.constant(0)
        if not self._symmetric:
            sum_u = pairwise_sum(g.k, g.u, plan, plan_count, g.kind.lanes)
        count = 2 if self._symmetric else 3
        sums = g.k.local(f32, count * g.kind.lanes)

        def put(values: Sequence[Value]) -> None:
            for number, value in enumerate(values):
                (sums + number * g.kind.lanes).store(value)

        def products(u: Value, c: Value) -> list[Value]:
            return [u * c, c * c] if self._symmetric else [u * c, c * c, c]

        with g.k.scope():
            first = self._tried(g.get(factor), g.get(zero))
            put(ordered_sums(g.k, g.u, g.size, g.kind, count,
                             lambda u: products(u, first.integers(u))))  # fmt: skip
        for _ in g.k.range(0, TURNS):
            made = [g.get(sums + number * g.kind.lanes) for number in range(count)]
            for place, value in zip((factor, zero), self._line(g.get(factor), g.get(zero), sum_u,
                                                               made), strict=True):  # fmt: skip
                place.store(value)
            one = self._tried(g.get(factor), g.get(zero))

            def terms(u: Value, one: Tried = one) -> list[Value]:
                c = one.integers(u)
                return [one.error(u, c), *products(u, c)]

            with g.k.scope():
                error, *made = ordered_sums(g.k, g.u, g.size, g.kind, count + 1, terms)
            put(made)
            self._keep_better(one, error)

    def _line(
        self, factor: Value, zero: Value, sum_u: Value, sums: Sequence[Value]
    ) -> tuple[Value, Value]:
        """Factors and zero points for integers of these sums; what there was where no line is."""
        g, fmt = self._groups, self._fmt
        wide = Vector(f64, g.kind.lanes)
        sum_uc, sum_cc, *rest = (one.to(f64) for one in sums)
        nothing, largest = g.k.constant(0, wide), g.k.constant(float("inf"), wide)
        if self._symmetric:
            fitted = sum_uc / sum_cc
            good = (fitted > nothing) & (fitted < largest)
            return select(good, fitted, factor.to(f64)).to(f32), zero
        count = g.size.to(f64).splat(g.kind.lanes)
        sum_c, old, sum_u = rest[0], zero.to(f64), sum_u.to(f64)
        slope = (count * sum_uc - sum_u * sum_c) / (count * sum_cc - sum_c * sum_c)
        low, high = g.k.constant(fmt.qmin, wide), g.k.constant(fmt.qmax, wide)
        moved = nearest(old + (sum_c - sum_u / slope) / count, low, high)
        moved = select(slope > nothing, moved, old)
        d = moved - old
        fitted = (sum_uc - d * sum_u) / (sum_cc - 2.0 * d * sum_c + count * d * d)
        good = (fitted > nothing) & (fitted < largest)
        return select(good, fitted, factor.to(f64)).to(f32), select(good, moved, old).to(f32)

    def _decided(self, given: Value) -> tuple[Value, Value]:
        """The best, where its error is less in float64 too; else what was given."""
        g = self._groups
        factor, zero = g.get(self._factor), g.get(self._zero)
        wide = Vector(f64, g.kind.lanes)
        found = g.scale.to(f64) * factor.to(f64)
        found = maximum(found, g.k.constant(float(SMALLEST_SCALE), wide))
        found = minimum(found, g.k.constant(LARGEST, wide)).to(f32)
        floor = g.size.to(f32) * _CLEAR
        clear = g.get(self._least) < given * (1 - 2.0 ** (self._fmt.bits - 12))
        clear = clear & (given > floor.splat(g.kind.lanes))
        clear = clear & (g.scale < _PLAIN) & (g.scale > 1 / _PLAIN)
        same = factor.equals(1.0) & zero.equals(g.zero)
        taken = g.kept(select(clear, g.constant(1), g.constant(0)))
        doubt = select(clear | same, g.constant(0), g.constant(1))
        for _ in g.k.when(g.any(doubt > 0.0)):
            less = self._squared_error(found, zero) < self._squared_error(g.scale, g.zero)
            taken.store(select(less, g.constant(1), g.constant(0)))
        better = g.get(taken) > 0.0
        return select(better, found, g.scale), select(better, zero, g.zero)

    def _squared_error(self, scale: Value, zero: Value) -> Value:
        g, fmt = self._groups, self._fmt

        def terms(x: Value) -> list[Value]:
            made = dequantized(g.k, steps(x, scale, zero, fmt), scale)
            error = made.to(f64) - x.to(f64)
            return [error * error]

        with g.k.scope():
            return ordered_sums(g.k, g.x, g.size, Vector(f64, g.kind.lanes), 1, terms)[0]
