"""Rows of bytes as they are: copied, and made unsigned."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.isa.generic import load_head, minimum, reduce_add, store_head
from lowbit.isa.types import Vector, s32, u8
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.rows.input_format import (
    ByteRows,
    LeftOperand,
    Lines,
    Row,
    RowFacts,
)
from lowbit.kernels.cpu.shared.layout import LINE

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
