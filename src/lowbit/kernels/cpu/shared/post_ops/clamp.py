"""At least one number, at most another."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.isa.generic import maximum, minimum
from lowbit.kernels.cpu.shared.post_op import (
    Apply,
    Columns,
    PostOp,
    WithNumbers,
    keeping_nan,
    post_ops,
)
from lowbit.numerics.float32 import float32_number


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
