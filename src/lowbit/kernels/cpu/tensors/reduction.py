"""What sums, means and maxima have in common, wherever the numbers come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lowbit.isa.generic import maximum
from lowbit.isa.types import Scalar, Vector, element_of, f32, s32
from lowbit.isa.value import Register, Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.shared.formats import (
    FORMATS,
    LIMITS,
    Convert,
    dequantizing,
    load_vector,
    parameters_of,
    storing,
)
from lowbit.kernels.cpu.shared.functions import rounded
from lowbit.kernels.cpu.shared.post_op import keeping_nan


class Reduction(NamedTuple):
    """What is made of many numbers. It keys the code.

    kind: "sum", "mean" or "max". format, out: of input and output. requantized: whether maxima of
    integers are converted; if not, input and output have one format, scale and zero point, and what
    is stored is compared. Sums of 8-bit integers are exact, in 32 bits.
    """

    kind: str
    format: str
    out: str
    requantized: bool = False

    @property
    def converted(self) -> bool:
        return self.kind != "max" or self.requantized

    @property
    def computed(self) -> Scalar:
        """What is computed with."""
        if self.format not in LIMITS:
            return f32
        return FORMATS[self.format] if self.kind == "max" else s32


class Reducer:
    """A reduction in a kernel.

    parameters: scale and zero point of an input of integers, 1 / scale and zero point of an 8-bit
    output; nothing where maxima are not converted. lanes: of what is finished; 0 for scalars.
    """

    def __init__(self, k: Builder, reduction: Reduction, parameters: Value, lanes: int) -> None:
        self._k, self._reduction, self._lanes = k, reduction, lanes
        numbers: list[Value] = []
        counts = [parameters_of(name) for name in (reduction.format, reduction.out)]
        for i in range(sum(counts) if reduction.converted else 0):
            number = (parameters + i).load()
            numbers.append(number.splat(lanes) if lanes else number)
        self._given = numbers[: counts[0]]
        self._stored: Convert = lambda value: value.to(FORMATS[reduction.out])
        if reduction.converted:
            self._stored = storing(reduction.out, numbers[counts[0] :])

    def start(self, lanes: int) -> Value:
        """What changes nothing."""
        kind, least = self._reduction.computed, 0.0
        if self._reduction.kind == "max":
            least = LIMITS.get(self._reduction.format, (float("-inf"),))[0]
        start = least if kind.is_float else int(least)
        return self._k.constant(start, Vector(kind, lanes) if lanes else kind)

    def loaded(self, value: Value) -> Value:
        return value.to(self._reduction.computed)

    def combine(self, a: Value, b: Value) -> Value:
        """The sum, or the greater of both: NaN if one is."""
        if self._reduction.kind != "max":
            return a + b
        greater = maximum(a, b)
        return keeping_nan(a, greater) if element_of(a.type) == f32 else greater

    def take(self, values: Sequence[Register], source: Value, left: Value | None = None) -> None:
        """Combine vectors with what lies from `source` on, of which the first `left` exist."""
        for register in values:
            lanes = register.value.type.lanes  # type: ignore[union-attr]
            read = self.loaded(load_vector(source, lanes, left))
            register.value = self.combine(register.value, read)
            source = source + lanes

    def finish(self, value: Value, count: Value, divisor: Value | None) -> Value:
        """What is stored, of `count` numbers; a mean is their sum over `divisor`. Both s32."""
        if self._reduction.kind == "max":
            if self._reduction.requantized:
                value = dequantizing(self._reduction.format, self._given)(value)
            return self._stored(value)
        if self._given:
            scale, zero = self._given
            value = (value - self._every(count) * rounded(zero)).to(f32) * scale
        if self._reduction.kind == "mean" and divisor is not None:
            value = value / self._every(divisor).to(f32)
        return self._stored(value)

    def _every(self, number: Value) -> Value:
        return number.splat(self._lanes) if self._lanes else number
