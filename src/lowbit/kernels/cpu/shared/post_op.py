"""A post-operation: what may follow a product, in registers, before its one store.

Its name is code; the numbers that it is given are not: they come with each call in one array of
parameters. A new one is added to post_ops.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

from lowbit.isa.generic import fma, load_head, select, shuffle
from lowbit.isa.types import Scalar, element_of
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.registry import Registry


@dataclass(frozen=True)
class Operands:
    """Where the operands of an epilogue are: one entry a row, or one a column (padded to a panel).

    `residual` has the output's shape, its rows `residual_stride` apart. `parameters` are float32
    numbers: those of each post-operation, one after another; then those of the output.
    """

    row_zero: Value
    row_sum: Value
    row_scale: Value
    column_sum: Value
    column_zero: Value
    column_scale: Value
    bias: Value
    residual: Value
    residual_stride: Value
    parameters: Value
    out: Value
    out_stride: Value
    columns: Value


WAITING = 3  # vectors that are made of some columns' numbers, and wait


@dataclass(frozen=True)
class Columns:
    """`lanes` columns of the output from `column` on, of which the first `left` exist, and the
    numbers that a post-operation was given, each in every lane. With `rows`, a vector holds so many
    neighbouring rows of all columns, row by row, and all of them exist. `fours`: of each 16 columns
    there are four, and no operand of the output's shape. `factor`: what is added or compared is
    multiplied by that first, since values are. `waiting`: where vectors wait that are made of the
    columns' numbers, `WAITING` in all, so that they are made once; `making`: they are made now."""

    k: Builder
    operands: Operands
    column: Value
    lanes: int
    left: Value
    numbers: Sequence[Value] = ()
    rows: int = 1
    fours: bool = False
    factor: Value | None = None
    waiting: Value | None = None
    making: bool = False

    def once(self, which: int, kind: Scalar, make: Callable[[], Value]) -> Value:
        """Vector number `which` of those that wait, of such elements."""
        if self.waiting is None:
            return make()
        place = (self.waiting + which * self.lanes).cast(kind)
        if self.making:
            place.store(make())
        return place.load(self.lanes)

    def scaled(self, operand: Value) -> Value:
        """What is added to values, or compared with them."""
        return operand if self.factor is None else operand * self.factor

    def plus(self, value: Value, operand: Value) -> Value:
        """Values and an operand that is `scaled` for that."""
        return value + operand if self.factor is None else fma(operand, self.factor, value)

    @property
    def each(self) -> int:
        """Lanes of one row."""
        return self.lanes // self.rows

    def of_columns(self, array: Value) -> Value:
        """What an array, padded to panels, says of the columns."""
        start = array + self.column
        if self.fours:
            return _joined([(start + 4 * i).load(4) for i in range(0, self.lanes, 4)])
        values = start.load(self.lanes)
        if self.rows == 1:
            return values
        return shuffle(values, values, tuple(i % self.each for i in range(self.lanes)))

    def of_output(self, array: Value, row: Value) -> Value:
        """The elements of a residual, an array of the output's shape."""
        k, stride = self.k, self.operands.residual_stride
        start = array + (self.column + row * stride)
        if self.rows == 1:
            with k.scope():
                found = k.register(k.zeros(element_of(array.type), self.lanes))
                for _ in k.when(self.left > self.lanes - 1):  # not all machines mask bytes
                    found.value = start.load(self.lanes)
                for _ in k.when(self.left < self.lanes):
                    found.value = load_head(start, self.left, self.lanes)
            return found.value
        return _joined([(start + stride * number).load(self.each) for number in range(self.rows)])

    def of_rows(self, array: Value, row: Value) -> Value:
        """What an array says of the row or rows."""
        if self.rows == 1:
            return (array + row).load().splat(self.lanes)
        values = (array + row).load(self.rows)
        return shuffle(values, values, tuple(i // self.each for i in range(self.lanes)))


def _joined(parts: list[Value]) -> Value:
    """Vectors, whose number is a power of two, one behind the other."""
    while len(parts) > 1:
        both = tuple(range(2 * parts[0].lanes))
        parts = [shuffle(x, y, both) for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


# (row, vector of values) -> what they become
Apply = Callable[[Value, Value], Value]


class PostOp(ABC):
    """`operand`: the argument that it needs ("bias", "residual"), if any. `parameters`: how many
    numbers it is given. `proportional`: of values that are multiplied by a positive factor it makes
    what it would make of them, multiplied by that, and can (`Columns.factor`)."""

    operand = ""
    parameters = 0
    proportional = False

    @abstractmethod
    def begin(self, at: Columns) -> Apply:
        """Load what belongs to some columns; return how to apply it to a row of them."""

    def bounds(self, numbers: tuple[float, ...]) -> tuple[float, float] | None:
        """The least and the greatest result, where numbers between them stay as they are."""
        return None


class Elementwise(PostOp):
    """A function of one number, float32 in and out."""

    def __init__(
        self,
        function: Callable[[Value], Value],
        bounds: tuple[float, float] | None = None,
        proportional: bool = False,
    ) -> None:
        self.function, self._bounds, self.proportional = function, bounds, proportional

    def bounds(self, numbers: tuple[float, ...]) -> tuple[float, float] | None:
        return self._bounds

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


def function_of(
    name: str, k: Builder, lanes: int, numbers: Sequence[Value]
) -> Callable[[Value], Value]:
    """A post-operation that reads no operand, as a function of vectors; ValueError: it does."""
    one = post_ops.get(name)
    if one.operand:
        raise ValueError(f"the post-operation {name!r} reads {one.operand}")
    start = k.index(0)
    nothing = cast(Operands, None)  # which it does not look at
    apply = one.begin(Columns(k, nothing, start, lanes, k.index(lanes), numbers))
    return lambda value: apply(start, value)
