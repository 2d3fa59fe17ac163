"""y·Φ(y), by a polynomial, or GELU's tanh approximation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lowbit.isa.generic import maximum, minimum
from lowbit.isa.types import f32, s32, with_element
from lowbit.isa.value import Value
from lowbit.kernels.cpu.shared.functions import constant, fused, logistic_of, polynomial
from lowbit.kernels.cpu.shared.post_op import (
    Apply,
    Columns,
    Elementwise,
    PostOp,
    WithNumbers,
    keeping_nan,
    post_ops,
)

_END = 5.1
# Φ(t) = 1/2 + t·p(2 t² / end² − 1) for |t| ≤ end, a minimax fit of the absolute error: 3.9 u off,
# and with the roundings of float32 5.4 u, u = 2^-24. At -end it is bent to just below 0.
_NORMAL = (
    8.28035292e-4,
    -2.10537226e-3,
    1.98519626e-3,
    -2.88486155e-3,
    7.22836703e-3,
    -1.23105440e-2,
    1.73217598e-2,
    -2.39144918e-2,
    3.17400768e-2,
    -4.02331278e-2,
    5.07815965e-2,
    -6.90027117e-2,
    1.38605297e-1,
)
_TANH = 0.7978845608028654, 0.044715  # sqrt(2/π), and the cubic term's coefficient


def gelu(x: Value) -> Value:
    """x · Φ(x), Φ the normal distribution; 0 below -5.1, x above 5.1.

    Of two numbers `maximum` and `minimum` give the second where one is NaN, so that it stays.
    """
    inside = maximum(constant(x, -_END), x)
    t = minimum(constant(x, _END), inside)
    square = fused(t * t, 2 / _END**2, -1.0)
    return inside * maximum(constant(x, 0.0), fused(t, polynomial(square, _NORMAL), 0.5))


def gelu_tanh(x: Value) -> Value:
    """x/2 · (1 + tanh(u)) with u = sqrt(2/π)·(x + 0.044715·x³), which is x / (1 + e^-2u)."""
    scale, cubic = _TANH
    inner = fused(x * x * x, cubic, x)
    return keeping_nan(x, logistic_of(x, inner * (-2.0 * scale)))


@dataclass(frozen=True)
class CoarseGelu(WithNumbers):
    """GELU for results of 8 bits, as max(x, 0) − m·p(m) with m = min(|x|, end): that has few
    operations and, of a value in steps of the output, gives the result in steps. Minimax fits: the
    result is off by 1.28e-4, and with the roundings of float32 by up to 1.36e-4.

    It stands last, where `OutputSpec` puts it. `inverse`: of the scale of the output that follows.
    """

    name = "gelu_coarse"
    curve: ClassVar[tuple[float, ...]] = (
        3.82,
        7.413082424e-4,
        -1.122610133e-2,
        6.438600289e-2,
        -1.577587931e-1,
        6.680809226e-2,
        3.753559215e-1,
        -4.969500112e-1,
    )
    inverse: float

    @property
    def numbers(self) -> tuple[float, ...]:
        """The end and −p's coefficients, highest power first, for steps."""
        end, *coefficients = self.curve
        powers = range(len(coefficients) - 1, -1, -1)
        scaled = (c / self.inverse**power for c, power in zip(coefficients, powers, strict=True))
        return end * self.inverse, *scaled


class CoarseGeluTanh(CoarseGelu):
    """The same for GELU's tanh approximation: 1.01e-4, and 1.1e-4."""

    name = "gelu_tanh_coarse"
    curve = (
        3.78,
        7.127448713e-4,
        -1.079237340e-2,
        6.185088908e-2,
        -1.506197411e-1,
        5.689850572e-2,
        3.816295749e-1,
        -4.984243058e-1,
    )


class _Coarse(PostOp):
    proportional = True

    def __init__(self, kind: type[CoarseGelu]) -> None:
        self._own = kind.curve
        self.parameters = len(self._own)

    def begin(self, at: Columns) -> Apply:
        numbers = at.numbers
        if at.factor is None:  # values are no steps
            numbers = [at.k.constant(number, f32).splat(at.lanes) for number in self._own]
        end, first, *others = numbers

        def apply(row: Value, x: Value) -> Value:
            size = (x.bits(with_element(x.type, s32)) & 0x7FFFFFFF).bits(with_element(x.type, f32))
            m, p = minimum(end, size), first
            for number in others:
                p = fused(p, m, number)
            return fused(p, m, maximum(constant(x, 0.0), x))

        return apply


post_ops.add("gelu", Elementwise(gelu))
post_ops.add("gelu_tanh", Elementwise(gelu_tanh))
for kind in CoarseGelu, CoarseGeluTanh:
    post_ops.add(kind.name, _Coarse(kind))
