"""Products of groups of rows, each with a part of a packed matrix of its own: a mixture of experts.

An item is a group by some of its panels. It packs the rows of a step just before it multiplies
them, as `product` does with `fused`, whose items these are; a group without rows is not read.
"""

from __future__ import annotations

from lowbit.isa.generic import maximum, minimum, select
from lowbit.isa.types import F32Pointer, Int, S32Pointer, S64Pointer, U8Pointer, f32, u8
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
    k: Builder,
    a: U8Pointer,
    ends: S64Pointer,
    row_scale: F32Pointer,
    row_zero: S32Pointer,
    row_sum: S32Pointer,
    panels: U8Pointer,
    column_sum: S32Pointer,
    column_zero: S32Pointer,
    column_scale: F32Pointer,
    out: F32Pointer,
    experts: Int,
    n: Int,
    k_size: Int,
    block_rows: Int,
    item_panels: Int,
    private: U8Pointer,
    private_bytes: Int,
    *,
    micro: MicroKernel,
    shape: Shape,
    a_format: InputFormat,
    epilogue: Epilogue,
    weight: str,
) -> None:
    """out[r] = a[r] · b[g] for the rows r from ends[g - 1], or 0, to before ends[g].

    a, out: [rows, k_size] and float32 [rows, n], contiguous; ends: ascending. b: the panels of a
    packed matrix [k_size, experts · n], of which each expert has n columns, a multiple of 16. Row
    arrays are scratch: an entry for each row, or for each of its groups, see `Rows`.
    """
    grouping = a_format.grouping
    zero, wide = k.index(0), n // PANEL
    across = ceil(wide, item_panels)
    own = private + k.thread() * private_bytes
    source, following = a.cast(a_format.element), (panels, zero)
    session = micro.begin(k, shape, block_rows, grouping)
    for item in k.parallel(experts * across):
        expert, part = item // across, item % across
        before = (ends + maximum(expert - 1, zero)).load()
        first = select(expert > 0, before, zero)
        count = (ends + expert).load() - first
        for _ in k.when(count > 0):
            groups, sums, scales = None, row_sum + first, row_scale + first
            if grouping:
                each = ceil(k_size, grouping.size)
                sums = row_sum + first * each
                if grouping.digits > 1:
                    scales = row_scale + first * each
                groups = Groups(grouping, column_scale, column_zero.cast(u8), scales,
                                sums.cast(f32), count, each)  # fmt: skip
            operand = LeftOperand(source + first * k_size, k_size, k.index(1), k_size,
                                  row_zero + first, row_zero, zero)  # fmt: skip
            rows = Rows(a_format, epilogue.b_zero, groups, operand, scales, sums, count, block_rows)
            # Columns of an expert are counted as those of the whole matrix.
            place = (out + (first - expert) * n).cast(u8)
            operands = Operands(row_zero + first, sums, scales, column_sum, column_zero,
                                column_scale, column_scale, column_scale, zero, column_scale,
                                place, n, experts * n)  # fmt: skip
            items = Items(micro, shape, weight, True, rows, own, own, panels, following,
                           experts * n, Output(k, epilogue, operands))  # fmt: skip
            begin = expert * wide + part * item_panels
            end = minimum(begin + item_panels, (expert + 1) * wide)
            items.run(k, session, (zero, rows.steps(shape)), (begin, end), None, None)
    micro.end(k)
