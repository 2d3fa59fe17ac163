"""The frame of every 8-bit matrix product: pack the left operand, multiply, finish, store.

The output is cut into items of some blocks of rows times some panels of columns. In an item the
panels are the inner loop: the rows stay in the nearest cache while panels stream past them from the
next, and the output is written row by row. What happens inside, along K, is the micro-kernel's.

Packing brings each row of the left operand into lines of 64 bytes, and quantizes it where it comes
as float32. Where that is done once for all (`fused` false), it is a parallel region of its own,
with a barrier behind it. Otherwise each thread packs the rows of a step just before it multiplies
them, or in the course of their first products, into memory of its own that never leaves the nearest
caches; rows are then packed once for each item beside them, which is cheaper than the way through
memory. Panels of nibbles become panels of bytes in such memory too, once for each item. Where the
shape says so, rows are not packed at all: the micro-kernel reads them where they lie (in_place.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from lowbit.isa.generic import minimum, select
from lowbit.isa.types import F32Pointer, Int, S32Pointer, U8Pointer, f32, s32, u8
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.integer.micro_kernel import Columns, Fetch, MicroKernel, Shape, Span, Step
from lowbit.kernels.cpu.rows.input_format import InputFormat, LeftOperand, Row, RowFacts
from lowbit.kernels.cpu.shared.epilogue import Epilogue, columns
from lowbit.kernels.cpu.shared.groups import Groups
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, PANEL_LINE, QUAD
from lowbit.kernels.cpu.shared.nibbles import unpack_nibbles
from lowbit.kernels.cpu.shared.post_op import Operands

Range = tuple[Value, Value]
_MOST_FETCHED = 16  # lines for each 64 k
_UNROLLED = 2  # blocks of rows of a step whose packing is emitted one by one


def _ceil(a: Value, b: Value | int) -> Value:
    return (a + b - 1) // b


@kernel
def product(
    k: Builder,
    a: U8Pointer,
    a_row_stride: Int,
    a_stride: Int,
    windows: S32Pointer,
    first_row: Int,
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
    k_size: Int,
    block_rows: Int,
    item_steps: Int,
    item_panels: Int,
    threads: Int,
    private: U8Pointer,
    private_bytes: Int,
    *,
    micro: MicroKernel,
    shape: Shape,
    a_format: InputFormat,
    epilogue: Epilogue,
    weight: str = "s8",
    fused: bool = False,
) -> None:
    """out[m, n] = epilogue(a[m, k_size] · b[k_size, n]); _Rows and _Items say what is where."""
    grouping = a_format.grouping
    groups = Groups(grouping, column_scale, column_zero.cast(u8), row_scale, row_sum.cast(f32), m,
                    _ceil(k_size, grouping.size)) if grouping else None  # fmt: skip
    operand = LeftOperand(a.cast(a_format.element), a_row_stride, a_stride, k_size, row_zero,
                          windows, first_row)  # fmt: skip
    rows = _Rows(a_format, epilogue.b_zero, groups, operand, row_scale, row_sum, m, block_rows)
    if not fused:
        rows.pack_all(k, packed)
    n = k.index(shape.columns) if shape.columns else n
    operands = Operands(row_zero, row_sum, row_scale, column_sum, column_zero, column_scale, bias,
                        residual, residual_stride, parameters, out, out_stride, n)  # fmt: skip
    if _keeps_something(shape, weight, fused):
        private = private + k.thread() * private_bytes
    items = _Items(
        micro, shape, weight, fused, rows, packed, private, panels, n,
        lambda panel, at, *some: columns(k, epilogue, operands, panel * PANEL + at, *some),
    )  # fmt: skip
    counts = _ceil(m, rows.block_outputs * shape.row_blocks), _ceil(n, PANEL)
    session = micro.begin(k, shape, block_rows, grouping)
    items.run_all(k, session, counts, (item_steps, item_panels), threads)
    micro.end(k)


def _keeps_something(shape: Shape, weight: str, fused: bool) -> bool:
    """Whether threads need memory of their own."""
    assert not (fused and shape.span) or shape.ring, "rows of spans are packed in passing or before"
    unpacks = weight != "s8" and not shape.nibbles
    return bool((fused and not shape.in_place) or shape.span or shape.summed or unpacks)


@dataclass(frozen=True)
class _Rows:
    """The left operand, and how its rows are packed: `block_rows` rows of bytes in a block, for
    `block_outputs` rows of the operand.

    Arrays over the rows have an entry for each; of sums, float32, with groups, one for each group,
    and of scales too if rows have several digits. What nobody asks for is not touched.
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
        return _ceil(self.k_size, LINE)

    @property
    def block_outputs(self) -> Value:
        return self.block_rows // self.format.digits

    def by_lines(self, k: Builder) -> bool:
        """Whether lines are made one by one: without facts, by vectors with masks for bytes."""
        return self.format.by_lines and not self.wants_sums and k.isa.vector_bytes == LINE

    @property
    def block_bytes(self) -> Value:
        """Of a packed block."""
        return self.k_blocks * self.block_rows * LINE

    def pack_all(self, k: Builder, target: Value) -> None:
        """Pack all blocks, in a parallel region."""
        for block in k.parallel(_ceil(self.count, self.block_outputs)):
            self.pack(k, block * self.block_outputs, target + block * self.block_bytes)

    def pack(self, k: Builder, first: Value, target: Value) -> None:
        """Pack the block of rows that begins with row `first`, as far as there are rows."""
        if self.by_lines(k):
            self._pack_whole_lines(k, first, target)
            for _ in k.when(self.k_size % LINE > 0):
                last = self.k_size // LINE
                place = target + last * (self.block_rows * LINE)
                self._pack_line(k, first, self.block_outputs, last, place, whole=False)
            return
        digits = self.format.digits
        for r in k.range(first, minimum(first + self.block_outputs, self.count)):
            lines = target + (r - first) * (digits * LINE)
            row = Row(self.operand, r, lines, self.block_rows * LINE)
            with k.scope():
                self.format.pack(k, row, self._facts(r))

    def _pack_whole_lines(self, k: Builder, first: Value, target: Value) -> None:
        for r in k.range(0, minimum(self.block_outputs, self.count - first)):
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
        scale = self.scale + (first if self.format.digits > 1 else r)
        return RowFacts(scale, self.operand.zero + r, self.groups.row_sum + first)


@dataclass(frozen=True)
class _Items:
    """What the items of a product share, and how one is computed.

    `packed`: scratch for the rows, lines of 64 bytes for each of every block of every step. With
    `fused` it is not used: `private`, memory of this thread, holds the lines of one step; then an
    item's panels as bytes, where they are nibbles ("u4" or "s4", see layout.py) and the shape does
    not take them so, or its sums between spans, or what the micro-kernel makes of a step's rows.
    The output has `n` columns. Column arrays have an entry for each column of
    each panel; with groups, zeros and scales have 16 for each group of each panel.
    """

    micro: MicroKernel
    shape: Shape
    weight: str
    fused: bool
    rows: _Rows
    packed: Value
    private: Value
    panels: Value
    n: Value
    columns: Columns

    def run_all(
        self, k: Builder, session: Any, counts: Range, sizes: Range, threads: Value
    ) -> None:
        """All items: of so many steps and panels in all, so many in each. `threads` enter, so a
        thread that has taken an item will probably take that so many further."""
        (steps, panels), (item_steps, item_panels) = counts, sizes
        across = _ceil(panels, item_panels)
        for item in k.parallel(_ceil(steps, item_steps) * across):
            step, panel = item // across * item_steps, item % across * item_panels
            self.run(
                k,
                session,
                (step, minimum(step + item_steps, steps)),
                (panel, minimum(panel + item_panels, panels)),
                (item + threads) % across * item_panels,
            )

    def run(self, k: Builder, session: Any, steps: Range, panels: Range, following: Value) -> None:
        """The rows of some steps times some panels, from the first to before the last. `following`:
        the panel that this thread will probably begin with after that."""
        b = self._bytes(k, panels)
        k_blocks = self.rows.k_blocks
        fetching = self._fetching(k, panels, steps[1] - steps[0], following)
        length = self.shape.span or k_blocks
        for first in k.range(0, k_blocks, length) if self.shape.span else (k.index(0),):
            span = first, minimum(first + length, k_blocks)
            for index in k.range(*steps):
                a = self._rows_of(k, index)
                size = self.rows.block_bytes
                self.micro.begin_rows(k, self.shape, a, size, k_blocks, self._behind_rows(k))
                at = index, index - steps[0]
                self._row(k, session, (a, b), at, fetching, panels, span)
        self.micro.drain(k, session, self.shape, self.columns, self.rows.groups)

    def _row(
        self,
        k: Builder,
        session: Any,
        ab: Range,
        index: Range,
        fetching: Callable[[Value, Value], Fetch | None],
        panels: Range,
        k_blocks: Range,
    ) -> None:
        """One step of rows, by its number and by its place in the item, times all panels."""
        first, last = panels
        whole = (last - first) // self.shape.panels * self.shape.panels + first

        def step(panel: Value, count: int) -> None:
            span = None
            if self.shape.span:
                place = index[1] * (last - first) + panel - first
                sums = self._behind_rows(k) + place * self.shape.step_sums
                span = Span(*k_blocks, sums.cast(s32))
            fetch = fetching(index[1], panel)
            self._step(k, session, *ab, index[0], panel, first, count, k_blocks[1], span, fetch)

        for panel in k.range(first, whole, self.shape.panels):
            step(panel, self.shape.panels)
        if self.shape.panels > 1 and not self.shape.in_place:
            for panel in k.range(whole, last):
                step(panel, 1)

    def _fetching(
        self, k: Builder, panels: Range, steps: Value, following: Value
    ) -> Callable[[Value, Value], Fetch | None]:
        """What a step should fetch of the panels from `following` on, an equal share for each 64 k,
        by its place among the steps and its panel."""
        if not self.micro.fetches or self.shape.in_place:
            return lambda step, panel: None
        first, last = panels
        across = _ceil(last - first, self.shape.panels)
        blocks = across * self.rows.k_blocks
        lines = _ceil((last - first) * self._panel_bytes, steps * blocks * LINE)
        # With more than that, memory sets the pace.
        other = (following < first) | (following > first)
        lines = select(other & (lines < _MOST_FETCHED + 1), lines, k.index(0))
        begin = self.panels + following * self._panel_bytes

        def fetch(step: Value, panel: Value) -> Fetch:
            before = step * blocks + (panel - first) // self.shape.panels * self.rows.k_blocks
            return Fetch(begin + before * lines * LINE, lines)

        return fetch

    def _bytes(self, k: Builder, panels: Range) -> Value:
        """Where the item's panels are, as the micro-kernel reads them."""
        if self.shape.piece > QUAD:
            return self.panels
        if self.weight == "s8" or self.shape.nibbles:
            return self.panels + panels[0] * self._panel_bytes
        target = self._behind_rows(k)
        for panel in k.range(*panels):
            half = self.panels + panel * self.rows.k_blocks * (PANEL_LINE // 2)
            bytes_at = target + (panel - panels[0]) * self._panel_bytes
            kind = "s4" if self.shape.centred else self.weight
            unpack_nibbles(k, half, bytes_at, self.rows.k_blocks, kind)
        return target

    def _behind_rows(self, k: Builder) -> Value:
        """Memory of this thread that holds no lines."""
        if not self.fused:
            return self.private
        ring = self.shape.ring if self._in_passing(k) else 0
        line = self.rows.block_rows * (self.shape.row_blocks * LINE)
        return self.private + line * (ring or self.rows.k_blocks)

    def _in_passing(self, k: Builder) -> bool:
        """Whether rows are packed in the course of their products. To find a window takes longer
        than to copy a line. Beforehand it is found once for a row, in passing once for each line,
        which pays only where a ring then keeps lines near."""
        few = self.shape.ring > 0 or not self.rows.format.windows
        return self.fused and self.shape.passing and few and self.rows.by_lines(k)

    def _make_lines(
        self, k: Builder, index: Value, first: Value, last: Value, block: Value
    ) -> None:
        """Pack 64 k of a step's rows, in the course of their products, if these are the first and
        the block comes before the last."""
        rows = self.rows.block_rows * self.shape.row_blocks
        target = self.private + self.shape.kept(block) * (rows * LINE)
        for _ in k.when(first & (block < last)):
            self.rows.pack_block(k, index * rows, rows, block, target)

    def _rows_of(self, k: Builder, index: Value) -> Value:
        """Where the packed rows of a step are, or will be."""
        count, size = self.shape.row_blocks, self.rows.block_bytes
        if self.shape.in_place:
            return self.rows.operand.row(self._first_row(index))
        if not self.fused:
            return self.packed + index * count * size
        few = count <= _UNROLLED
        for block in () if self._in_passing(k) else range(count) if few else k.range(0, count):
            first = (index * count + block) * self.rows.block_outputs
            self.rows.pack(k, first, self.private + size * block)
        return self.private

    def _first_row(self, index: Value) -> Value:
        """The row of the output that a step begins with."""
        first = index * self.shape.row_blocks * self.rows.block_outputs
        if not self.shape.in_place:
            return first
        return minimum(first, self.rows.count - self.rows.block_outputs)

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
        last: Value,
        span: Span | None,
        fetch: Fetch | None,
    ) -> None:
        make_lines = partial(self._make_lines, k, index, panel.equals(first_panel), last)
        step = Step(
            a=a,
            b=b + (panel - first_panel) * self._panel_bytes,
            row=self._first_row(index),
            rows=self.rows.count,
            n=self.n,
            panel=k.index(0) if self.shape.columns else panel,
            k_size=self.rows.k_size,
            k_blocks=self.rows.k_blocks,
            block_rows=self.rows.block_rows,
            block_bytes=self.rows.block_bytes,
            panel_bytes=self._panel_bytes,
            columns=self.columns,
            groups=self.rows.groups,
            span=span,
            fetch=fetch,
            make_lines=make_lines if self._in_passing(k) else None,
            row_stride=self.rows.operand.row_stride if self.shape.in_place else None,
            flip=self.rows.format.flip,
            behind=self.panels + _ceil(self.n, PANEL) * self._panel_bytes,
            scratch=self._behind_rows(k),
        )
        with k.scope():
            self.micro.step(k, session, self.shape, step, count)

    @property
    def _panel_bytes(self) -> Value:
        return self.rows.k_blocks * (PANEL_LINE // 2 if self.shape.nibbles else PANEL_LINE)
