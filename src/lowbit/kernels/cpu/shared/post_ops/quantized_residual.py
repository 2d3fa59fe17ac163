"""y + scale · (residual[m, n] − zero point), of a residual of 8-bit integers."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.isa.generic import fma
from lowbit.isa.types import Scalar, f32, s8, s32, u8
from lowbit.isa.value import Value
from lowbit.kernels.cpu.shared.post_op import Apply, Columns, PostOp, WithNumbers, post_ops
from lowbit.numerics.float32 import float32_number

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
