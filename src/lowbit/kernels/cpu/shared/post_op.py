"""A post-operation: what may follow a product, in registers, before its one store.

Its name is code; the numbers that it is given are not: they come with each call in one array of
parameters. A new one is a file in post_ops/.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from lowbit.isa.generic import select
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.registry import Registry


@dataclass(frozen=True)
class Operands:
    """Where the operands of an epilogue are: one entry a row, or one a column (padded to a panel).

    `residual` has the output's shape, its rows `columns` apart. `parameters` are float32 numbers:
    those of each post-operation, one after another; then those of the output.
    """

    row_zero: Value
    row_sum: Value
    row_scale: Value
    column_sum: Value
    column_zero: Value
    column_scale: Value
    bias: Value
    residual: Value
    parameters: Value
    out: Value
    out_stride: Value
    columns: Value


@dataclass(frozen=True)
class Columns:
    """`lanes` columns of the output from `column` on, of which the first `left` exist, and the
    numbers that a post-operation was given, each in every lane."""

    k: Builder
    operands: Operands
    column: Value
    lanes: int
    left: Value
    numbers: Sequence[Value]


# (row, vector of values) -> what they become
Apply = Callable[[Value, Value], Value]


class PostOp(ABC):
    """`operand`: the argument that it needs ("bias", "residual"), if any. `parameters`: how many
    numbers it is given."""

    operand = ""
    parameters = 0

    @abstractmethod
    def begin(self, at: Columns) -> Apply:
        """Load what belongs to some columns; return how to apply it to a row of them."""


class Elementwise(PostOp):
    """A function of one number, float32 in and out."""

    def __init__(self, function: Callable[[Value], Value]) -> None:
        self.function = function

    def begin(self, at: Columns) -> Apply:
        return lambda row, value: self.function(value)


class WithNumbers(ABC):
    """A post-operation with its numbers, as users write it: the base of `Clamp`."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def numbers(self) -> tuple[float, ...]:
        """Its parameters."""


post_ops: Registry[PostOp] = Registry("post-operation", "lowbit.kernels.cpu.shared.post_ops")


def keeping_nan(x: Value, result: Value) -> Value:
    """`result`, but NaN where x is NaN, which comparisons would lose."""
    return select(x.equals(x), result, x)
