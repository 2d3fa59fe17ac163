"""y, or a fraction of it where it is negative."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.isa.generic import select
from lowbit.kernels.cpu.shared.post_op import Apply, Columns, PostOp, WithNumbers, post_ops
from lowbit.numerics.float32 import float32_number


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
