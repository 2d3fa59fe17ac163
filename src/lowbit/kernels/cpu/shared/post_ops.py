"""Post-operations: what may follow a product, in registers. A new one is added to this file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from lowbit.isa.generic import fma, maximum, minimum, select
from lowbit.isa.types import Scalar, f32, s8, s32, u8, with_element
from lowbit.isa.value import Value
from lowbit.kernels.cpu.shared.functions import (
    constant,
    exp,
    fused,
    logistic_of,
    polynomial,
    vanishing,
)
from lowbit.kernels.cpu.shared.post_op import (
    Apply,
    Columns,
    Elementwise,
    PostOp,
    WithNumbers,
    keeping_nan,
    post_ops,
)
from lowbit.numerics.float32 import float32_number


class Bias(PostOp):
    """Adds float32 [N]."""

    operand = "bias"
    proportional = True

    def begin(self, at: Columns) -> Apply:
        bias = at.scaled(at.of_columns(at.operands.bias))
        return lambda row, value: value + bias


post_ops.add("bias", Bias())


@dataclass(frozen=True)
class Clamp(WithNumbers):
    """A post-operation that bounds values: at least `low`, at most `high`, within float32.

    TypeError, ValueError: they are no such numbers, or in the wrong order.
    """

    name = "clamp"
    low: float
    high: float

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            number = float32_number(getattr(self, name), f"{name} of Clamp")
            object.__setattr__(self, name, number)
        if not self.low <= self.high:
            raise ValueError(f"{self} has its bounds in the wrong order, or NaN among them")

    @property
    def numbers(self) -> tuple[float, ...]:
        """The bounds."""
        return self.low, self.high


class _Bounding(PostOp):
    parameters = 2
    proportional = True

    def bounds(self, numbers: tuple[float, ...]) -> tuple[float, float]:
        low, high = numbers
        return low, high

    def begin(self, at: Columns) -> Apply:
        low, high = map(at.scaled, at.numbers)
        return lambda row, value: keeping_nan(value, minimum(maximum(value, low), high))


post_ops.add(Clamp.name, _Bounding())


# y·Φ(y), by a polynomial, or GELU's tanh approximation.

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


@dataclass(frozen=True)
class LeakyRelu(WithNumbers):
    """A post-operation that multiplies negative values by `slope`.

    TypeError, ValueError: that is no float32 number.
    """

    name = "leaky_relu"
    slope: float = 0.01

    def __post_init__(self) -> None:
        object.__setattr__(self, "slope", float32_number(self.slope, "slope of LeakyRelu"))

    @property
    def numbers(self) -> tuple[float, ...]:
        """The slope."""
        return (self.slope,)


class _Leaking(PostOp):
    parameters = 1
    proportional = True

    def begin(self, at: Columns) -> Apply:
        (slope,) = at.numbers
        return lambda row, value: select(value < 0.0, value * slope, value)


post_ops.add(LeakyRelu.name, _Leaking())


_KINDS = {"uint8": u8, "int8": s8}


@dataclass(frozen=True)
class QuantizedResidual(WithNumbers):
    """A post-operation that adds an 8-bit residual, which stands for scale · (r − zero_point).

    TypeError, ValueError: dtype is not "uint8" or "int8", the scale is no float32 number, or the
    zero point is outside of the dtype.
    """

    scale: float
    zero_point: int = 0
    dtype: str = "uint8"

    def __post_init__(self) -> None:
        if self.dtype not in _KINDS:
            raise ValueError(f"dtype of a QuantizedResidual: uint8 or int8, got {self.dtype!r}")
        low = -128 if self.dtype == "int8" else 0
        if not (isinstance(self.zero_point, int) and low <= self.zero_point <= low + 255):
            raise ValueError(f"zero_point must be an integer of {self.dtype}: {self.zero_point!r}")
        number = float32_number(self.scale, "scale of QuantizedResidual")
        object.__setattr__(self, "scale", number)

    @property
    def name(self) -> str:  # type: ignore[override]
        """By the type of the residual."""
        return f"residual_{_KINDS[self.dtype]}"

    @property
    def numbers(self) -> tuple[float, ...]:
        """Scale and zero point."""
        return self.scale, float(self.zero_point)


class _Adding(PostOp):
    operand, parameters, proportional = "residual", 2, True

    def __init__(self, element: Scalar) -> None:
        self.element = element

    def begin(self, at: Columns) -> Apply:
        scale, zero = at.scaled(at.numbers[0]), at.numbers[1]
        residual = at.operands.residual.cast(self.element)

        def apply(row: Value, value: Value) -> Value:
            steps = at.of_output(residual, row).to(s32).to(f32) - zero
            return value + steps * scale if at.factor is None else fma(steps, scale, value)

        return apply


for _kind in _KINDS.values():
    post_ops.add(f"residual_{_kind}", _Adding(_kind))


def relu(x: Value) -> Value:
    """max(x, 0)."""
    return keeping_nan(x, maximum(x, constant(x, 0.0)))


post_ops.add("relu", Elementwise(relu, (0.0, math.inf), proportional=True))


class Residual(PostOp):
    """Adds float32 [M, N]."""

    operand = "residual"
    proportional = True

    def begin(self, at: Columns) -> Apply:
        return lambda row, value: at.plus(value, at.of_output(at.operands.residual, row))


post_ops.add("residual", Residual())


# σ(y) = 1 / (1 + e^−y), and the piecewise linear function in its place.


def sigmoid(x: Value) -> Value:
    """1 / (1 + e^-x)."""
    return keeping_nan(x, 1.0 / (exp(0.0 - x) + 1.0))


def _ramp(x: Value) -> Value:
    """min(max(x / 6 + 1/2, 0), 1), as six times this, over six."""
    inner = minimum(maximum(x + 3.0, constant(x, 0.0)), constant(x, 6.0))
    return inner * (1.0 / 6.0)


def hardsigmoid(x: Value) -> Value:
    """min(max(x / 6 + 1/2, 0), 1)."""
    return keeping_nan(x, _ramp(x))


def hardswish(x: Value) -> Value:
    """x · hardsigmoid(x)."""
    return keeping_nan(x, vanishing(x) * _ramp(x))


post_ops.add("sigmoid", Elementwise(sigmoid))
post_ops.add("hardsigmoid", Elementwise(hardsigmoid))
post_ops.add("hardswish", Elementwise(hardswish))


def silu(x: Value) -> Value:
    """x · σ(x)."""
    return keeping_nan(x, logistic_of(x, 0.0 - x))


post_ops.add("silu", Elementwise(silu))


# tanh(x) = x + x³·p(x²) for |x| < 0.625, from the Cephes library's tanhf.
_NEAR = 0.625
_TANH_RATIO = (
    -5.70498872745e-3,
    2.06390887954e-2,
    -5.37397155531e-2,
    1.33314422036e-1,
    -3.33332819422e-1,
)


def tanh(x: Value) -> Value:
    """1 - 2 / (e^2|x| + 1), with the sign of x."""
    magnitude = maximum(x, 0.0 - x)
    far = 1.0 - 2.0 / (exp(magnitude * 2.0) + 1.0)
    square = x * x
    near = fused(x, square * polynomial(square, _TANH_RATIO), x)
    return keeping_nan(x, select(magnitude < _NEAR, near, select(x < 0.0, 0.0 - far, far)))


post_ops.add("tanh", Elementwise(tanh))
