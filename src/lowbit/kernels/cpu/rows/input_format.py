"""What the left operand is before it is packed, and how a row of it becomes rows of bytes.

A new one is a class with one method, `pack`, in a file of this folder, and a line where products
are stated (product/requests.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from lowbit.isa.generic import extract, load_head, minimum, reduce_add, shuffle, store_head
from lowbit.isa.types import Scalar, Vector, s32, s64, u8
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.shared.groups import Grouping
from lowbit.kernels.cpu.shared.layout import FLIP, LINE


@dataclass(frozen=True)
class LeftOperand:
    """Where the left operand is, whose rows have `k_size` elements; strides count elements.

    `zero`: the zero points of rows, s32, as stored values have them. `windows`, `first_row`: of
    rows that are windows, the table that says where they lie, and the number of the first row.
    """

    a: Value
    row_stride: Value
    stride: Value
    k_size: Value
    zero: Value
    windows: Value
    first_row: Value

    def row(self, number: Value) -> Value:
        """Where a row begins that lies in one piece."""
        return self.a + number * self.row_stride


@dataclass(frozen=True)
class Row:
    """One row, by its number, and where its lines of 64 bytes go; several, one after another, if it
    has several digits."""

    operand: LeftOperand
    number: Value
    lines: Value
    line_stride: Value

    @property
    def source(self) -> Value:
        """Where it is, if it lies in one piece."""
        return self.operand.row(self.number)

    @property
    def stride(self) -> Value:
        """How far apart its elements are."""
        return self.operand.stride

    @property
    def length(self) -> Value:
        """Its elements."""
        return self.operand.k_size


# (number of a line, how many of its bytes are in the row, None: all) -> its 64 bytes
Lines = Callable[[Value, Value | None], Value]


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
    as fast as copying. `windows`: rows are found through a table. `flip`: what makes bytes of rows
    unsigned. `grouping`: of a right operand with groups, for which rows are signed.
    """

    made = True
    copied = False
    windows = False

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
    def flip(self) -> int:
        return 0

    @property
    def by_lines(self) -> bool:
        """Whether a row's lines of 64 bytes can be made one by one, by `lines`."""
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

    def lines(self, k: Builder, operand: LeftOperand, number: Value) -> Lines:
        """What makes the lines of a row without facts. Of one that is not whole, what is behind
        the row's end does not matter."""
        raise NotImplementedError


@dataclass(frozen=True)
class ByteRows(InputFormat):
    """uint8, or int8 if `signed`, which is multiplied with 128 added and so always has zero points;
    `shifted`: zero points are given."""

    signed: bool = False
    shifted: bool = False

    made = False
    copied = True

    @property
    def element(self) -> Scalar:
        return u8

    @property
    def zero_points(self) -> bool:
        return self.shifted or self.signed

    @property
    def flip(self) -> int:
        return FLIP if self.signed else 0


@dataclass(frozen=True)
class ImageRows(ByteRows):
    """Windows of images, with one scale and zero point for all rows."""

    windows = True

    @property
    def uniform(self) -> bool:
        return True

    def number(self, operand: LeftOperand, place: int) -> Value:
        """A number of the table that says where windows lie."""
        return (operand.windows + place).load().to(s64)

    def nothing(self, k: Builder, operand: LeftOperand) -> Value:
        """What lies outside of an image, as it is multiplied."""
        return operand.zero.load().to(u8) if self.zero_points else k.constant(0, u8)


def across(vector: Value, combine: Callable[[Value, Value], Value]) -> Value:
    """All lanes combined into one scalar."""
    half = vector.lanes // 2
    while half:
        turned = shuffle(vector, vector, tuple(lane ^ half for lane in range(vector.lanes)))
        vector, half = combine(vector, turned), half // 2
    return extract(vector, 0)


# Rows of bytes as they are: copied, and made unsigned.

_WORD = 8  # bytes that are copied together, where a whole line would be too many


@dataclass(frozen=True)
class Bytes(ByteRows):
    """`contiguous`: neighbours along K are neighbours in memory; `shared`: all rows have the same
    scale and zero point. Row sums are made in the same pass."""

    contiguous: bool = True
    shared: bool = False

    @property
    def uniform(self) -> bool:
        return self.shared

    @property
    def by_lines(self) -> bool:
        return self.contiguous

    def lines(self, k: Builder, operand: LeftOperand, number: Value) -> Lines:
        row = operand.row(number)

        def line(which: Value, left: Value | None) -> Value:
            source = row + which * LINE
            values = source.load(LINE) if left is None else load_head(source, left, LINE)
            return values ^ self.flip

        return line

    def pack(self, k: Builder, row: Row, facts: RowFacts) -> None:
        flip = self.flip
        total = k.register(k.constant(0, s32))

        def add(values: Value) -> None:
            if facts.sum is not None:
                wide = values.to(s32)
                one = reduce_add(wide) if isinstance(wide.type, Vector) else wide
                total.value = total.value + one

        if self.contiguous:
            whole = row.length // LINE
            for line in k.range(0, whole):
                values = (row.source + line * LINE).load(LINE) ^ flip
                (row.lines + line * row.line_stride).store(values)
                add(values)
            for _ in k.when(whole * LINE < row.length):
                begin = whole * LINE
                target = row.lines + whole * row.line_stride
                _pack_tail(k, flip, row.source + begin, row.length - begin, target)
                if facts.sum is not None:
                    add(target.load(LINE))
        else:
            for line in k.range(0, (row.length + (LINE - 1)) // LINE):
                target = row.lines + line * row.line_stride
                target.store(k.zeros(u8, LINE))
                begin = line * LINE
                for i in k.range(begin, minimum(begin + LINE, row.length)):
                    value = (row.source + i * row.stride).load() ^ flip
                    (target + (i - begin)).store(value)
                    add(value)
        if facts.sum is not None:
            facts.sum.store(total.value)


def _pack_tail(k: Builder, flip: int, source: Value, length: Value, target: Value) -> None:
    """The last line of a row, whose `length` bytes are followed by zeros."""
    target.store(k.zeros(u8, LINE))
    if k.isa.vector_bytes == LINE:  # which has masks for its bytes
        store_head(load_head(source, length, LINE) ^ flip, target, length)
        return
    whole = length // _WORD * _WORD
    for i in k.range(0, whole, _WORD):
        (target + i).store((source + i).load(_WORD) ^ flip)
    for i in k.range(whole, length):
        (target + i).store((source + i).load() ^ flip)
