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
from lowbit.isa.types import F32Pointer, Int, S32Pointer, U8Pointer, bf16, f32, s32, u8
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.jit.value import Value
from lowbit.kernels.cpu.integer.micro_kernel import Columns, MicroKernel, Shape, Span, Step
from lowbit.kernels.cpu.rows import activation, digits
from lowbit.kernels.cpu.rows.activation import Row, Source
from lowbit.kernels.cpu.shared.epilogue import Epilogue, Operands, columns
from lowbit.kernels.cpu.shared.groups import Grouping, Groups
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, PANEL_LINE
from lowbit.kernels.cpu.shared.nibbles import unpack_nibbles

_ELEMENTS = {"u8": u8, "s8": u8, "f32": f32, "bf16": bf16}  # of sources


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
    parameters: F32Pointer,
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
    grouping: Grouping | None = None,
) -> None:
    """out[m, n] = epilogue(a[m, depth] · b[depth, n]).

    Strides count elements. `packed` is scratch for a: lines of 64 bytes for every row of every
    block of every step. Row arrays have an entry for each row, column arrays for each column of
    each panel; those that the epilogue does not name are not touched. `weight` is what the panels
    hold: "s8", or "u4" or "s4" (see layout.py). With `grouping`, weights have groups (see
    groups.py): a block then has so many rows of bytes for each of a's, column zeros and scales have
    16 entries for each group of each panel, and row sums, float32, one for each group; if there
    are several digits, so have row scales. Of `private`, each thread uses `private_bytes`:
    for the lines of one step, if `fused`, in which case `packed` is not used; for an item's panels
    as bytes, where they are not; or for its sums between spans.
    """
    lines = _ceil(depth, LINE)
    planes = grouping.planes if grouping else 1
    groups = None
    if grouping:
        groups = Groups(
            grouping, column_scale, column_zero.cast(u8), row_scale, row_sum.cast(f32), m,
            _ceil(depth, grouping.size),
        )  # fmt: skip
    rows = _Rows(
        source, epilogue.b_zero, groups, a, a_row_stride, a_stride, row_scale, row_zero, row_sum,
        m, depth, lines, block_rows, block_rows // planes,
    )  # fmt: skip
    if not fused:
        for block in k.parallel(_ceil(m, rows.block_outputs)):
            rows.pack(k, block * rows.block_outputs, packed + block * rows.block_bytes)
    operands = Operands(
        row_zero, row_sum, row_scale, column_sum, column_zero, column_scale, bias,
        residual, residual_stride, parameters, out, out_stride, n,
    )  # fmt: skip
    mine = private
    unpacks = weight != "s8" and not shape.nibbles
    if fused or unpacks or shape.span:
        mine = private + k.thread() * private_bytes
    items = _Items(
        micro, shape, weight, fused, rows, packed, mine, panels,
        lambda panel, at, lanes: columns(k, epilogue, operands, panel * PANEL + at, lanes),
    )  # fmt: skip
    session = micro.begin(k, shape, block_rows, grouping)
    steps, all_panels = _ceil(m, rows.block_outputs * shape.depth), _ceil(n, PANEL)
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
    """The left operand, and how its rows are packed: `block_rows` rows of bytes in a block, for
    `block_outputs` rows of the operand."""

    source: Source
    wants_sums: bool
    groups: Groups | None
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
    block_outputs: Value

    @property
    def block_bytes(self) -> Value:
        """Of a packed block."""
        return self.lines * self.block_rows * LINE

    def pack(self, k: Builder, first: Value, target: Value) -> None:
        """Pack the block of rows that begins with row `first`, as far as there are rows."""
        planes = self.groups.grouping.planes if self.groups else 1
        for r in k.range(first, minimum(first + self.block_outputs, self.count)):
            row = Row(
                source=self.a.cast(_ELEMENTS[self.source.kind]) + r * self.row_stride,
                stride=self.stride,
                length=self.depth,
                lines=target + (r - first) * (planes * LINE),
                line_stride=self.block_rows * LINE,
            )
            with k.scope():
                self._pack(k, row, r)

    def _pack(self, k: Builder, row: Row, r: Value) -> None:
        """Pack one row."""
        sums = self.sum + r if self.wants_sums else None
        if self.groups is not None:
            self._pack_digits(k, self.groups, row, r)
        elif self.source.kind == "f32":
            activation.quantize(k, self.source, row, (self.scale + r, self.zero + r), sums)
        else:
            activation.pack_bytes(k, self.source, row, sums)

    def _pack_digits(self, k: Builder, groups: Groups, row: Row, r: Value) -> None:
        """Pack one row as signed bytes, with what belongs to its groups."""
        sums = groups.row_sum + r * groups.count
        if groups.grouping.planes > 1:
            digits.split(k, groups.grouping, row, self.scale + r * groups.count, sums)
            return
        activation.quantize(k, self.source, row, (self.scale + r, self.zero + r), None)
        digits.signed(k, groups.grouping, row, self.zero + r, sums)


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
        lines = self.rows.lines
        for first in k.range(0, lines, self.shape.span) if self.shape.span else (k.index(0),):
            span = first, minimum(first + self.shape.span, lines)
            for index in k.range(*steps):
                a = self._rows_of(k, index)
                self._row(k, session, (a, b), (index, index - steps[0]), panels, span)
        self.micro.drain(k, session, self.shape, self.columns, self.rows.groups)

    def _row(
        self, k: Builder, session: Any, ab: Range, index: Range, panels: Range, lines: Range
    ) -> None:
        """One step of rows, by its number and by its place in the item, times all panels."""
        first, last = panels
        whole = (last - first) // self.shape.panels * self.shape.panels + first

        def step(panel: Value, count: int) -> None:
            span = None
            if self.shape.span:
                place = index[1] * (last - first) + panel - first
                span = Span(*lines, (self.private + place * self.shape.step_sums).cast(s32))
            self._step(k, session, *ab, index[0], panel, first, count, span)

        for panel in k.range(first, whole, self.shape.panels):
            step(panel, self.shape.panels)
        if self.shape.panels > 1:
            for panel in k.range(whole, last):
                step(panel, 1)

    def _bytes(self, k: Builder, panels: Range) -> Value:
        """Where the item's panels are, as the micro-kernel reads them."""
        if self.weight == "s8" or self.shape.nibbles:
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
            first = (index * depth + block) * self.rows.block_outputs
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
        span: Span | None,
    ) -> None:
        step = Step(
            a=a,
            b=b + (panel - first_panel) * self._panel_bytes,
            row=index * self.shape.depth * self.rows.block_outputs,
            rows=self.rows.count,
            panel=panel,
            lines=self.rows.lines,
            block_rows=self.rows.block_rows,
            block_bytes=self.rows.block_bytes,
            panel_bytes=self._panel_bytes,
            columns=self.columns,
            groups=self.rows.groups,
            span=span,
        )
        with k.scope():
            self.micro.step(k, session, self.shape, step, count)

    @property
    def _panel_bytes(self) -> Value:
        return self.rows.lines * (PANEL_LINE // 2 if self.shape.nibbles else PANEL_LINE)
