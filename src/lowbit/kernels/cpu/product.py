"""The frame of every 8-bit matrix product: pack the left operand, multiply, finish, store.

Two parallel regions. The first brings each row of the left operand into packed lines (quantizing it
from float32 where it comes as such). The second cuts the output into items of some blocks of rows
times some panels of columns; in an item the panels are the inner loop, so the rows stay in the
nearest cache while panels stream past them from the next, and the output is written row by row.
What happens inside, along K, is the micro-kernel's.
"""

from __future__ import annotations

from lowbit.isa.generic import minimum
from lowbit.isa.types import F32Pointer, Int, S32Pointer, U8Pointer, f32, u8
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.jit.value import Value
from lowbit.kernels.cpu import activation
from lowbit.kernels.cpu.activation import Row, Source
from lowbit.kernels.cpu.epilogue import Epilogue, Operands, columns
from lowbit.kernels.cpu.layout import LINE, PANEL
from lowbit.kernels.micro_kernel import MicroKernel, Shape, Step, Store


def _ceil(a: Value, b: Value | int) -> Value:
    return (a + b - 1) // b


@kernel
def product(
    k: Builder,
    a: U8Pointer,
    a_row_stride: Int,
    a_stride: Int,
    packed: U8Pointer,
    row_scale: F32Pointer,
    row_zero: S32Pointer,
    row_sum: S32Pointer,
    panels: U8Pointer,
    column_sum: S32Pointer,
    column_zero: S32Pointer,
    column_scale: F32Pointer,
    bias: F32Pointer,
    residual: F32Pointer,
    residual_stride: Int,
    requantize: F32Pointer,
    out: U8Pointer,
    out_stride: Int,
    m: Int,
    n: Int,
    depth: Int,
    block_rows: Int,
    item_steps: Int,
    item_panels: Int,
    *,
    micro: MicroKernel,
    shape: Shape,
    source: Source,
    epilogue: Epilogue,
) -> None:
    """out[m, n] = epilogue(a[m, depth] · b[depth, n]).

    Strides count elements. `packed` is scratch for a: lines of 64 bytes for every row of every
    block of every step. Row arrays have an entry for each row, column arrays for each column of
    each panel; those that the epilogue does not name are not touched.
    """
    lines = _ceil(depth, LINE)
    block_bytes = lines * block_rows * LINE

    for block in k.parallel(_ceil(m, block_rows)):
        first = block * block_rows
        for r in k.range(first, minimum(first + block_rows, m)):
            row = Row(
                source=_row_start(a, source, r * a_row_stride),
                stride=a_stride,
                length=depth,
                lines=packed + (block * block_bytes + (r - first) * LINE),
                line_stride=block_rows * LINE,
            )
            sums = row_sum + r if epilogue.b_zero else None
            with k.scope():
                if source.kind == "f32":
                    activation.quantize(k, source, row, (row_scale + r, row_zero + r), sums)
                else:
                    activation.pack_bytes(k, source, row, sums)

    operands = Operands(
        row_zero, row_sum, row_scale, column_sum, column_zero, column_scale, bias,
        residual, residual_stride, requantize, out, out_stride, n,
    )  # fmt: skip
    step_rows = block_rows * shape.depth
    steps, all_panels = _ceil(m, step_rows), _ceil(n, PANEL)
    panel_bytes = lines * (LINE * LINE // 4)
    items_across = _ceil(all_panels, item_panels)

    def one_step(index: Value, panel: Value, count: int) -> None:
        def columns_of(which: int, offset: int = 0, lanes: int = PANEL) -> Store:
            return columns(k, epilogue, operands, (panel + which) * PANEL + offset, lanes)

        step = Step(
            a=packed + index * shape.depth * block_bytes,
            b=panels + panel * panel_bytes,
            row=index * step_rows,
            rows=m,
            lines=lines,
            block_rows=block_rows,
            block_bytes=block_bytes,
            panel_bytes=panel_bytes,
            columns=columns_of,
        )
        with k.scope():
            micro.step(k, shape, step, count)

    micro.begin(k, shape, block_rows)
    for item in k.parallel(_ceil(steps, item_steps) * items_across):
        first_step = item // items_across * item_steps
        last_step = minimum(first_step + item_steps, steps)
        first_panel = item % items_across * item_panels
        last_panel = minimum(first_panel + item_panels, all_panels)
        whole = (last_panel - first_panel) // shape.panels * shape.panels + first_panel
        for index in k.range(first_step, last_step):
            for panel in k.range(first_panel, whole, shape.panels):
                one_step(index, panel, shape.panels)
            if shape.panels > 1:
                for panel in k.range(whole, last_panel):
                    one_step(index, panel, 1)
    micro.end(k)


def _row_start(a: Value, source: Source, offset: Value) -> Value:
    """Where a row begins; offsets count elements of the operand's own type."""
    return a.cast(f32 if source.kind == "f32" else u8) + offset
