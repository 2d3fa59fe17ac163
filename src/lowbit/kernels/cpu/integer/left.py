"""The left operand of a product: how its rows are packed, and where those of a step are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lowbit.isa.generic import minimum, select
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.integer.micro_kernel import Shape
from lowbit.kernels.cpu.rows.input_format import InputFormat, LeftOperand, Row, RowFacts
from lowbit.kernels.cpu.rows.windows import Strips
from lowbit.kernels.cpu.shared.groups import Groups
from lowbit.kernels.cpu.shared.layout import LINE

_LONG = 512  # k of rows that are packed by themselves


def ceil(a: Value, b: Value | int) -> Value:
    return (a + b - 1) // b


@dataclass(frozen=True)
class Place:
    """Where the rows of a step are, packed or as they lie, and which of the output they are: from
    `row` to before `end`. block_bytes, at: as in `Step`. row_stride: of rows in place."""

    a: Value
    row: Value
    end: Value
    block_bytes: Value
    at: Callable[[Value], Value]
    row_stride: Value | None = None


@dataclass(frozen=True)
class Rows:
    """The left operand, and how its rows are packed: `block_rows` rows of bytes in a block, for
    `block_outputs` rows of the operand.

    Arrays over the rows have an entry for each; of sums, float32, with groups, one for each group,
    and of scales too if they are by group. What nobody asks for is not touched.
    """

    format: InputFormat
    wants_sums: bool
    groups: Groups | None
    operand: LeftOperand
    scale: Value
    sum: Value
    count: Value
    block_rows: Value

    @property
    def k_size(self) -> Value:
        return self.operand.k_size

    @property
    def k_blocks(self) -> Value:
        """Blocks of 64 k."""
        return ceil(self.k_size, LINE)

    @property
    def block_outputs(self) -> Value:
        return self.block_rows // self.format.digits

    def steps(self, shape: Shape) -> Value:
        """How many steps there are; of images, in one of them."""
        rows = self.block_outputs * shape.row_blocks
        if isinstance(self.format, Strips):
            facts = self.format.facts(self.operand)
            if shape.lines > 1:
                return ceil(facts.lines, shape.lines)
            return facts.lines * ceil(facts.length, rows)
        return ceil(self.count, rows)

    def images(self, k: Builder) -> Value:
        """In how many parts rows come that no step and no item has in common."""
        if isinstance(self.format, Strips):
            facts = self.format.facts(self.operand)
            return self.count // facts.pixels
        return k.index(1)

    def by_lines(self, k: Builder) -> bool:
        """Whether lines are made one by one: without facts, by vectors with masks for bytes."""
        return self.format.by_lines and not self.wants_sums and k.isa.vector_bytes == LINE

    @property
    def block_bytes(self) -> Value:
        """Of a packed block."""
        return self.k_blocks * self.block_rows * LINE

    def pack_all(self, k: Builder, target: Value) -> None:
        """Pack all blocks, in a parallel region: long rows one by one, so that a thread packs what
        it has just made."""
        each = select(self.k_size < _LONG, self.block_outputs, k.index(1))
        for item in k.parallel(ceil(self.count, each)):
            block, within = item * each // self.block_outputs, item * each % self.block_outputs
            lines = target + block * self.block_bytes + within * (self.format.digits * LINE)
            self.pack(k, item * each, lines, each)

    def pack(self, k: Builder, first: Value, target: Value, count: Value | None = None) -> None:
        """Pack so many rows of a block, or one, from row `first` on, as far as there are rows."""
        count = self.block_outputs if count is None else count
        if self.by_lines(k):
            self._pack_whole_lines(k, first, count, target)
            for _ in k.when(self.k_size % LINE > 0):
                last = self.k_size // LINE
                place = target + last * (self.block_rows * LINE)
                self._pack_line(k, first, count, last, place, whole=False)
            return
        digits = self.format.digits
        for r in k.range(first, minimum(first + count, self.count)):
            lines = target + (r - first) * (digits * LINE)
            row = Row(self.operand, r, lines, self.block_rows * LINE)
            with k.scope():
                self.format.pack(k, row, self._facts(r))

    def _pack_whole_lines(self, k: Builder, first: Value, count: Value, target: Value) -> None:
        for r in k.range(0, minimum(count, self.count - first)):
            line = self.format.lines(k, self.operand, first + r)
            for which in k.range(0, self.k_size // LINE):
                (target + (which * (self.block_rows * LINE) + r * LINE)).store(line(which, None))

    def pack_block(
        self, k: Builder, first: Value, count: Value, block: Value, target: Value
    ) -> None:
        """Pack a block of 64 k of `count` rows from `first` on, as far as there are rows."""
        for whole in (True, False):
            left = self.k_size - block * LINE
            for _ in k.when(left > LINE - 1 if whole else left < LINE):
                self._pack_line(k, first, count, block, target, whole)

    def _pack_line(
        self, k: Builder, first: Value, count: Value, block: Value, target: Value, whole: bool
    ) -> None:
        left = None if whole else self.k_size - block * LINE
        for r in k.range(0, minimum(count, self.count - first)):
            line = self.format.lines(k, self.operand, first + r)
            (target + r * LINE).store(line(block, left))

    def _facts(self, r: Value) -> RowFacts:
        """Where what is made beside row r goes."""
        if self.groups is None:
            return RowFacts(
                self.scale + r, self.operand.zero + r, self.sum + r if self.wants_sums else None
            )
        first = r * self.groups.count
        scale = self.scale + (first if self.groups.grouping.by_group else r)
        return RowFacts(scale, self.operand.zero + r, self.groups.row_sum + first)
