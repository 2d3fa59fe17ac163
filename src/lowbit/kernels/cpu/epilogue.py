"""What happens to accumulators before they are stored, in registers.

With stored values a' (u8) and b' (s8) and their zero points, the accumulators hold Σ a'·b', and

    Σ (a' − za)·(b' − zb)  =  Σ a'·b'  −  za·(Σ b' − K·zb)  −  zb·Σ a'

The bracket is folded into the packed operand's column sums; Σ a' is made while a is packed. All
of this wraps modulo 2^32, so it is exact whenever the result fits in 32 bits. (Jacob et al.,
"Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference",
2018, section 2.3.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lowbit.isa.generic import store_head
from lowbit.isa.types import f32
from lowbit.jit.builder import Builder
from lowbit.jit.value import Value
from lowbit.kernels.micro_kernel import Store


class Epilogue(NamedTuple):
    """Which steps the epilogue has. It keys the code.

    `a_zero`, `b_zero`: the left operand has zero points per row, the right one per column.
    `scaled`: the output is float32 and each element is multiplied by its row's, then by its
    column's scale; otherwise it is s32. `bias`: a float32 per column is added last.
    """

    a_zero: bool = False
    b_zero: bool = False
    scaled: bool = False
    bias: bool = False


@dataclass(frozen=True)
class Operands:
    """Where the epilogue's operands are: one entry a row, or one a column (padded to a panel)."""

    row_zero: Value
    row_sum: Value
    row_scale: Value
    column_sum: Value
    column_zero: Value
    column_scale: Value
    bias: Value
    out: Value
    out_stride: Value
    columns: Value


def columns(k: Builder, epilogue: Epilogue, at: Operands, column: Value, lanes: int) -> Store:
    """Load what belongs to `lanes` columns from `column` on; return how to store a row of them."""
    column_sum = (at.column_sum + column).load(lanes) if epilogue.a_zero else None
    column_zero = (at.column_zero + column).load(lanes) if epilogue.b_zero else None
    column_scale = (at.column_scale + column).load(lanes) if epilogue.scaled else None
    bias = (at.bias + column).load(lanes) if epilogue.bias else None
    left = at.columns - column

    def store(row: Value, accumulators: Value) -> None:
        value = accumulators
        if column_sum is not None:
            value = value - (at.row_zero + row).load().splat(lanes) * column_sum
        if column_zero is not None:
            value = value - (at.row_sum + row).load().splat(lanes) * column_zero
        if column_scale is not None:
            value = value.to(f32) * (at.row_scale + row).load().splat(lanes) * column_scale
        if bias is not None:
            value = value + bias
        out = at.out.cast(f32) if epilogue.scaled else at.out
        place = out + (row * at.out_stride + column)
        for _ in k.when(left > lanes - 1):
            place.store(value)
        for _ in k.when(left < lanes):
            store_head(value, place, left)

    return store
