"""The frame of every 8-bit matrix product: pack the left operand, multiply, finish, store.

The output is cut into items of some blocks of rows times some panels of columns. In an item the
panels are the inner loop: the rows stay in the nearest cache while panels stream past them from the
next, and the output is written row by row. What happens inside, along K, is the micro-kernel's.

Packing brings each row of the left operand into lines of 64 bytes, and quantizes it where it comes
as float32. Where that is done once for all (`fused` false), it is a parallel region of its own,
with a barrier behind it. Otherwise each thread packs the rows of a step just before it multiplies
them, into memory of its own that never leaves the nearest caches; rows are then packed once for
each item beside them, which is cheaper than the way through memory. Panels of nibbles become panels
of bytes in such memory too, once for each item.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowbit.isa.generic import minimum
from lowbit.isa.types import F32Pointer, Int, S32Pointer, U8Pointer, f32, u8
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.jit.value import Value
from lowbit.kernels.cpu import activation
from lowbit.kernels.cpu.activation import Row, Source
from lowbit.kernels.cpu.epilogue import Epilogue, Operands, columns
from lowbit.kernels.cpu.layout import LINE, PANEL, PANEL_LINE
from lowbit.kernels.cpu.nibbles import unpack_nibbles
from lowbit.kernels.micro_kernel import Columns, MicroKernel, Shape, Step


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
    private: U8Pointer,
    private_bytes: Int,
    *,
    micro: MicroKernel,
    shape: Shape,
    source: Source,
    epilogue: Epilogue,
    weight: str = "s8",
    fused: bool = False,
) -> None:
    """out[m, n] = epilogue(a[m, depth] · b[depth, n]).

    Strides count elements. `packed` is scratch for a: lines of 64 bytes for every row of every
    block of every step. Row arrays have an entry for each row, column arrays for each column of
    each panel; those that the epilogue does not name are not touched. `weight` is what the panels
    hold: "s8", or "u4" or "s4" (see layout.py). Of `private`, each thread uses `private_bytes`:
    for the lines of one step, if `fused`, in which case `packed` is not used; and for an item's
    panels as bytes, where they are not.
    """
    rows = _Rows(
        source, epilogue.b_zero, a, a_row_stride, a_stride, row_scale, row_zero, row_sum,
        m, depth, _ceil(depth, LINE), block_rows,
    )  # fmt: skip
    if not fused:
        for block in k.parallel(_ceil(m, block_rows)):
            rows.pack(k, block * block_rows, packed + block * rows.block_bytes)
    operands = Operands(
        row_zero, row_sum, row_scale, column_sum, column_zero, column_scale, bias,
        residual, residual_stride, requantize, out, out_stride, n,
    )  # fmt: skip
    mine = private
    if fused or weight != "s8":
        mine = private + k.thread() * private_bytes
    items = _Items(
        micro, shape, weight, fused, rows, packed, mine, panels,
        lambda panel, at, lanes: columns(k, epilogue, operands, panel * PANEL + at, lanes),
    )  # fmt: skip
    session = micro.begin(k, shape, block_rows)
    steps, all_panels = _ceil(m, block_rows * shape.depth), _ceil(n, PANEL)
    across = _ceil(all_panels, item_panels)
    for item in k.parallel(_ceil(steps, item_steps) * across):
        first_step, first_panel = item // across * item_steps, item % across * item_panels
        items.run(
            k,
            session,
            (first_step, minimum(first_step + item_steps, steps)),
            (first_panel, minimum(first_panel + item_panels, all_panels)),
        )
    micro.end(k)


Range = tuple[Value, Value]


@dataclass(frozen=True)
class _Rows:
    """The left operand, and how its rows are packed."""

    source: Source
    wants_sums: bool
    a: Value
    row_stride: Value
    stride: Value
    scale: Value
    zero: Value
    sum: Value
    count: Value
    depth: Value
    lines: Value
    block_rows: Value

    @property
    def block_bytes(self) -> Value:
        """Of a packed block."""
        return self.lines * self.block_rows * LINE

    def pack(self, k: Builder, first: Value, target: Value) -> None:
        """Pack the block of rows that begins with row `first`, as far as there are rows."""
        for r in k.range(first, minimum(first + self.block_rows, self.count)):
            kind = f32 if self.source.kind == "f32" else u8
            row = Row(
                source=self.a.cast(kind) + r * self.row_stride,
                stride=self.stride,
                length=self.depth,
                lines=target + (r - first) * LINE,
                line_stride=self.block_rows * LINE,
            )
            sums = self.sum + r if self.wants_sums else None
            with k.scope():
                if self.source.kind == "f32":
                    made = self.scale + r, self.zero + r
                    activation.quantize(k, self.source, row, made, sums)
                else:
                    activation.pack_bytes(k, self.source, row, sums)


@dataclass(frozen=True)
class _Items:
    """What the items of a product share, and how one is computed."""

    micro: MicroKernel
    shape: Shape
    weight: str
    fused: bool
    rows: _Rows
    packed: Value
    private: Value
    panels: Value
    columns: Columns

    def run(self, k: Builder, session: Any, steps: Range, panels: Range) -> None:
        """The rows of some steps times some panels, from the first to before the last."""
        b = self._bytes(k, panels)
        whole = (panels[1] - panels[0]) // self.shape.panels * self.shape.panels + panels[0]
        for index in k.range(*steps):
            a = self._rows_of(k, index)
            for panel in k.range(panels[0], whole, self.shape.panels):
                self._step(k, session, a, b, index, panel, panels[0], self.shape.panels)
            if self.shape.panels > 1:
                for panel in k.range(whole, panels[1]):
                    self._step(k, session, a, b, index, panel, panels[0], 1)
        self.micro.drain(k, session, self.shape, self.columns)

    def _bytes(self, k: Builder, panels: Range) -> Value:
        """Where the item's panels are, as bytes."""
        if self.weight == "s8":
            return self.panels + panels[0] * self._panel_bytes
        target = self.private
        if self.fused:
            target = target + self.rows.block_bytes * self.shape.depth
        for panel in k.range(*panels):
            half = self.panels + panel * self.rows.lines * (PANEL_LINE // 2)
            bytes_at = target + (panel - panels[0]) * self._panel_bytes
            unpack_nibbles(k, half, bytes_at, self.rows.lines, self.weight)
        return target

    def _rows_of(self, k: Builder, index: Value) -> Value:
        """Where the packed rows of a step are."""
        depth, size = self.shape.depth, self.rows.block_bytes
        if not self.fused:
            return self.packed + index * depth * size
        for block in range(depth):
            first = (index * depth + block) * self.rows.block_rows
            self.rows.pack(k, first, self.private + size * block)
        return self.private

    def _step(
        self,
        k: Builder,
        session: Any,
        a: Value,
        b: Value,
        index: Value,
        panel: Value,
        first_panel: Value,
        count: int,
    ) -> None:
        step = Step(
            a=a,
            b=b + (panel - first_panel) * self._panel_bytes,
            row=index * self.shape.depth * self.rows.block_rows,
            rows=self.rows.count,
            panel=panel,
            lines=self.rows.lines,
            block_rows=self.rows.block_rows,
            block_bytes=self.rows.block_bytes,
            panel_bytes=self._panel_bytes,
            columns=self.columns,
        )
        with k.scope():
            self.micro.step(k, session, self.shape, step, count)

    @property
    def _panel_bytes(self) -> Value:
        return self.rows.lines * PANEL_LINE
