"""Products of groups of rows, each with a part of a packed matrix of its own: a mixture of experts.

The rows of each group are packed, then an item is a group by some of its panels, and computed as
those of `product` are. A group without rows is not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lowbit.isa.generic import maximum, minimum, select
from lowbit.isa.types import F32Pointer, Int, S32Pointer, S64Pointer, U8Pointer, f32, u8
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.integer.left import Rows, ceil
from lowbit.kernels.cpu.integer.micro_kernel import MicroKernel, Shape
from lowbit.kernels.cpu.integer.product import Items
from lowbit.kernels.cpu.rows.input_format import InputFormat, LeftOperand
from lowbit.kernels.cpu.shared.epilogue import Epilogue, Output
from lowbit.kernels.cpu.shared.groups import Groups
from lowbit.kernels.cpu.shared.layout import PANEL
from lowbit.kernels.cpu.shared.post_op import Operands


@kernel
def routed_product(
    k: Builder, a: U8Pointer, ends: S64Pointer, row_scale: F32Pointer, row_zero: S32Pointer,
    row_sum: S32Pointer, panels: U8Pointer, column_sum: S32Pointer, column_zero: S32Pointer,
    column_scale: F32Pointer, out: F32Pointer, packed: U8Pointer, experts: Int, n: Int, k_size: Int,
    block_rows: Int, item_panels: Int, private: U8Pointer, private_bytes: Int,
    *, micro: MicroKernel, shape: Shape, a_format: InputFormat, epilogue: Epilogue, weight: str,
) -> None:  # fmt: skip
    """out[r] = a[r] · b[g] for the rows r from ends[g - 1], or 0, to before ends[g].

    a, out: [rows, k_size] and float32 [rows, n], contiguous; ends: ascending. b: the panels of a
    packed matrix [k_size, experts · n], of which each expert has n columns, a multiple of 16. Row
    arrays are scratch: an entry for each row, or for each of its groups, see `Rows`; packed: whole
    steps of the rows of each expert.
    """
    zero, wide = k.index(0), n // PANEL
    across = ceil(wide, item_panels)
    own = private + k.thread() * private_bytes
    columns, a = (column_sum, column_zero, column_scale), a.cast(a_format.element)
    routed = _Routed(k, epilogue, a_format, a, row_zero, row_sum, row_scale, columns, out, n,
                     k_size, block_rows, ends, packed, shape.row_blocks)  # fmt: skip
    for expert in k.parallel(experts):
        for part in routed.parts(expert, experts):
            for block in k.range(0, ceil(part.rows.count, part.rows.block_outputs)):
                target = part.packed + block * part.rows.block_bytes
                part.rows.pack(k, block * part.rows.block_outputs, target)
    session = micro.begin(k, shape, block_rows, a_format.grouping)
    for item in k.parallel(experts * across):
        expert, number = item // across, item % across
        for part in routed.parts(expert, experts):
            items = Items(micro, shape, weight, False, part.rows, part.packed, own, panels,
                          (panels, zero), experts * n, part.output)  # fmt: skip
            begin = expert * wide + number * item_panels
            end = minimum(begin + item_panels, (expert + 1) * wide)
            items.run(k, session, (zero, part.rows.steps(shape)), (begin, end), None, None)
    micro.end(k)


class _Part(NamedTuple):
    """The rows of an expert, where they are packed, and its part of the output."""

    rows: Rows
    packed: Value
    output: Output


@dataclass(frozen=True)
class _Routed:
    """The operands of all experts. columns: the sums, zero points and scales of the right one."""

    k: Builder
    epilogue: Epilogue
    format: InputFormat
    a: Value
    zero: Value
    sum: Value
    scale: Value
    columns: tuple[Value, Value, Value]
    out: Value
    n: Value
    k_size: Value
    block_rows: Value
    ends: Value
    packed: Value
    row_blocks: int

    def parts(self, expert: Value, experts: Value) -> Iterator[_Part]:
        """Emit what follows for an expert, if it has rows."""
        k = self.k
        before = (self.ends + maximum(expert - 1, k.index(0))).load()
        first = select(expert > 0, before, k.index(0))
        count = (self.ends + expert).load() - first
        for _ in k.when(count > 0):
            yield self._part(expert, first, count, experts)

    def _part(self, expert: Value, first: Value, count: Value, experts: Value) -> _Part:
        """Of so many rows from `first` on; columns are counted from the first expert's on."""
        k, n, grouping, none = self.k, self.n, self.format.grouping, self.k.index(0)
        sums, zeros, scales = self.columns
        groups, row_zero = None, self.zero + first
        row_sum, row_scale = self.sum + first, self.scale + first
        if grouping:
            each = ceil(self.k_size, grouping.size)
            row_sum = self.sum + first * each
            row_scale = self.scale + first * each if grouping.by_group else row_scale
            groups = Groups(grouping, scales, zeros.cast(u8), row_scale, row_sum.cast(f32), count,
                            each)  # fmt: skip
        left = LeftOperand(self.a + first * self.k_size, self.k_size, k.index(1), self.k_size,
                           row_zero, row_zero, none)  # fmt: skip
        rows = Rows(self.format, self.epilogue.b_zero, groups, left, row_scale, row_sum, count,
                    self.block_rows)  # fmt: skip
        place = (self.out + (first - expert) * n).cast(u8)
        # There is no bias, no residual and no number of an output.
        operands = Operands(row_zero, row_sum, row_scale, sums, zeros, scales, scales, scales, none,
                            scales, place, n, experts * n)  # fmt: skip
        # As if each expert before had a step that is not full.
        step = rows.block_outputs * self.row_blocks
        steps = first // step + expert
        packed = self.packed + steps * self.row_blocks * rows.block_bytes
        return _Part(rows, packed, Output(k, self.epilogue, operands))
