"""What the left operand is before it is packed, and how a row of it becomes rows of bytes.

A new one is a class with one method, `pack`, in a file of this folder, and a line where products
are stated (product/requests.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from lowbit.isa.generic import extract, shuffle
from lowbit.isa.types import Scalar, Vector
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.shared.groups import Grouping


@dataclass(frozen=True)
class Row:
    """One row: where it is, how far apart its elements are, and where its lines of 64 bytes go;
    several, one after another, if it has several digits."""

    source: Value
    stride: Value
    length: Value
    lines: Value
    line_stride: Value


@dataclass(frozen=True)
class RowFacts:
    """Where what is made beside a row goes: its scale or those of its groups, its zero point, and
    its sum or those of its groups; `sum` is None where nobody asks for it."""

    scale: Value
    zero: Value
    sum: Value | None


@dataclass(frozen=True)
class InputFormat(ABC):
    """How rows are made. It keys the code; subclasses are frozen dataclasses.

    `element`: what lies in memory. `zero_points`: whether rows have zero points, given or made;
    `uniform`: scale and zero point of all rows are the first, which is then applied to columns.
    `made`: whether scales and zero points are made from the rows, or given. `copied`: packing is
    as fast as copying. `grouping`: of a right operand with groups, for which rows are signed.
    """

    made = True
    copied = False

    @property
    @abstractmethod
    def element(self) -> Scalar: ...
    @property
    @abstractmethod
    def zero_points(self) -> bool: ...
    @property
    def uniform(self) -> bool:
        return False

    @property
    def by_lines(self) -> bool:
        """Whether a row's lines of 64 bytes can be made one by one, by `line`."""
        return False

    @property
    def grouping(self) -> Grouping | None:
        return None

    @property
    def digits(self) -> int:
        """The rows of bytes that a row becomes."""
        return self.grouping.digits if self.grouping else 1

    @abstractmethod
    def pack(self, k: Builder, row: Row, facts: RowFacts) -> None:
        """Emit the work on one row. Lines behind its end are filled."""

    def line(self, source: Value, left: Value | None) -> Value:
        """The line of a row that begins at `source`, without facts: 64 bytes, of which only `left`
        are in the row, if that is given. What is behind them does not matter."""
        raise NotImplementedError


def across(vector: Value, combine: Callable[[Value, Value], Value]) -> Value:
    """All lanes combined into one scalar."""
    assert isinstance(vector.type, Vector)
    lanes = vector.type.lanes
    half = lanes // 2
    while half:
        turned = shuffle(vector, vector, tuple(lane ^ half for lane in range(lanes)))
        vector, half = combine(vector, turned), half // 2
    return extract(vector, 0)
