"""The frame of every 8-bit matrix product: pack the left operand, multiply, finish, store.

The output is cut into items of some blocks of rows times some panels of columns. In an item the
panels are the inner loop: the rows stay in the nearest cache while panels stream past them from the
next, and the output is written row by row. Where the shape says that panels stay, it is the other
way round. What happens inside, along K, is the micro-kernel's.

Packing brings each row of the left operand into lines of 64 bytes, and quantizes it where it comes
as float32. Where that is done once for all (`fused` false), it is a parallel region of its own,
with a barrier behind it. Otherwise each thread packs the rows of a step just before it multiplies
them, or in the course of their first products, into memory of its own that never leaves the nearest
caches; rows are then packed once for each item beside them, which is cheaper than the way through
memory. Panels of nibbles become panels of bytes in such memory too, once for each item. Where the
shape says so, rows are not packed at all: the micro-kernel reads them where they lie (in_place.py);
and where they are windows of images, an item makes what they have in common (rows/windows.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from lowbit.isa.generic import minimum, select
from lowbit.isa.types import F32Pointer, Int, S32Pointer, U8Pointer, f32, s32, u8
from lowbit.isa.value import Value
from lowbit.jit.builder import RUNS, Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.integer.left import Place, Rows, ceil
from lowbit.kernels.cpu.integer.micro_kernel import Fetch, MicroKernel, Shape, Span, Step
from lowbit.kernels.cpu.rows.input_format import InputFormat, LeftOperand
from lowbit.kernels.cpu.rows.windows import Strip, Strips
from lowbit.kernels.cpu.shared.epilogue import Epilogue, Output
from lowbit.kernels.cpu.shared.groups import Groups
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, PANEL_LINE, QUAD
from lowbit.kernels.cpu.shared.pack import unpack_nibbles
from lowbit.kernels.cpu.shared.panel_format import NIBBLES
from lowbit.kernels.cpu.shared.post_op import Operands

Range = tuple[Value, Value]
_UNROLLED = 2  # blocks of rows of a step whose packing is emitted one by one


@kernel
def product(
    k: Builder, a: U8Pointer, a_row_stride: Int, a_stride: Int, windows: S32Pointer, first_row: Int,
    packed: U8Pointer, row_scale: F32Pointer, row_zero: S32Pointer, row_sum: S32Pointer,
    panels: U8Pointer, column_sum: S32Pointer, column_zero: S32Pointer, column_scale: F32Pointer,
    bias: F32Pointer, residual: F32Pointer, residual_stride: Int, parameters: F32Pointer,
    out: U8Pointer, out_stride: Int, m: Int, n: Int, k_size: Int, block_rows: Int, item_steps: Int,
    item_panels: Int, threads: Int, private: U8Pointer, private_bytes: Int, next_panels: U8Pointer,
    next_bytes: Int,
    *, micro: MicroKernel, shape: Shape, a_format: InputFormat, epilogue: Epilogue,
    weight: str = "s8", fused: bool = False,
) -> None:  # fmt: skip
    """out[m, n] = epilogue(a[m, k_size] · b[k_size, n]); Rows and Items say what is where."""
    grouping = a_format.grouping
    groups = Groups(grouping, column_scale, column_zero.cast(u8), row_scale, row_sum.cast(f32), m,
                    ceil(k_size, grouping.size)) if grouping else None  # fmt: skip
    operand = LeftOperand(a.cast(a_format.element), a_row_stride, a_stride, k_size, row_zero,
                          windows, first_row)  # fmt: skip
    rows = Rows(a_format, epilogue.b_zero, groups, operand, row_scale, row_sum, m, block_rows)
    if not fused:
        rows.pack_all(k, packed)
    n = k.index(shape.columns) if shape.columns else n
    operands = Operands(row_zero, row_sum, row_scale, column_sum, column_zero, column_scale, bias,
                        residual, residual_stride, parameters, out, out_stride, n)  # fmt: skip
    private = _own(k, shape, weight, fused, private, private_bytes)
    items = Items(
        micro, shape, weight, fused, rows, packed, private, panels, (next_panels, next_bytes), n,
        Output(k, epilogue, operands),
    )  # fmt: skip
    session = micro.begin(k, shape, block_rows, grouping)
    items.run_all(k, session, (item_steps, item_panels), threads)
    micro.end(k)


def _own(
    k: Builder, shape: Shape, weight: str, fused: bool, private: Value, private_bytes: Value
) -> Value:
    """Memory of this thread, if threads need any."""
    assert not (fused and shape.span) or shape.ring, "rows of spans are packed in passing or before"
    unpacks = weight in NIBBLES and not shape.nibbles
    if (fused and not shape.piece) or shape.span or shape.summed or unpacks:
        return private + k.thread() * private_bytes
    return private


@dataclass(frozen=True)
class Items:
    """What the items of a product share, and how one is computed.

    `packed`: scratch for the rows, lines of 64 bytes for each of every block of every step. With
    `fused` it is not used: `private`, memory of this thread, holds the lines of one step; then an
    item's panels as bytes, where they are nibbles ("u4" or "s4", see layout.py) and the shape does
    not take them so, or its sums between spans, or what the micro-kernel makes of a step's rows.
    following: what is read after all of them, and its bytes. The output has `n` columns. Column
    arrays have an entry for each column of each panel; with groups, zeros and scales have 16 for
    each group of each panel.
    """

    micro: MicroKernel
    shape: Shape
    weight: str
    fused: bool
    rows: Rows
    packed: Value
    private: Value
    panels: Value
    following: Range
    n: Value
    columns: Output

    def run_all(self, k: Builder, session: Any, sizes: Range, threads: Value) -> None:
        """All items, each of so many steps and panels, for so many threads."""
        (steps, panels), (item_steps, item_panels) = self._counts, sizes
        counts = self.rows.images(k), ceil(steps, item_steps), ceil(panels, item_panels)
        every = counts[0] * counts[1] * counts[2]
        run = ceil(every, minimum(threads, k.index(RUNS)))  # of neighbours, for a thread
        for item in k.parallel(every):
            image, part, column = self._which(item, counts)
            panel, step = column * item_panels, part * item_steps
            some = step, minimum(step + item_steps, steps)
            last = ((item + 1) % run).equals(0) | (item + 2 > every)
            self.run(
                k,
                session,
                some,
                (panel, minimum(panel + item_panels, panels)),
                self._read_next(k, item + 1, last, column, counts, sizes),
                self._strip(k, image, some),
            )

    def _which(self, item: Value, counts: tuple[Value, ...]) -> tuple[Value, Value, Value]:
        """An item's image, its part of that, and its place across. Counts: of each. Rows change
        faster than panels, which stay near."""
        images, down, _ = counts
        rows = images * down
        return item % rows // down, item % down, item // rows

    def _strip(self, k: Builder, image: Value, steps: Range) -> Strip | None:
        """The rows of an item, where they are made together."""
        rows = self.rows
        if not isinstance(rows.format, Strips):
            return None
        lines = self._lines(steps)
        assert self.weight == "s8"
        assert not self.shape.span, "memory of this thread holds nothing but the strip"
        each, pitch = rows.block_rows * self.shape.row_blocks, self.shape.pitch
        return rows.format.make(k, rows.operand, image, lines, self.private, pitch, each)

    def _lines(self, steps: Range) -> Range:
        """The lines of the output that steps of an image are, which are whole ones."""
        rows, many = self.rows, self.shape.lines
        assert isinstance(rows.format, Strips)
        facts = rows.format.facts(rows.operand)
        if many > 1:
            return steps[0] * many, minimum(steps[1] * many, facts.lines)
        of_line = ceil(facts.length, rows.block_rows * self.shape.row_blocks)
        return steps[0] // of_line, steps[1] // of_line

    def run(
        self, k: Builder, session: Any, steps: Range, panels: Range, following: Range | None,
        strip: Strip | None,
    ) -> None:  # fmt: skip
        """The rows of some steps times some panels, from the first to before the last. `following`:
        what this thread will probably read after that, and its bytes."""
        b = self._bytes(k, panels)
        k_blocks = self.rows.k_blocks
        if self.shape.panels_stay:
            self._run_by_panels(k, session, steps, panels, b)
            return
        fetching = self._fetching(k, panels, steps[1] - steps[0], following)
        length = self.shape.span or k_blocks
        for first in k.range(0, k_blocks, length) if self.shape.span else (k.index(0),):
            span = first, minimum(first + length, k_blocks)
            for index in k.range(*steps):
                place = self._place(k, index, strip)
                size = self.rows.block_bytes
                self.micro.begin_rows(k, self.shape, place.a, size, k_blocks, self._behind_rows(k))
                at = index, index - steps[0]
                self._row(k, session, place, b, at, fetching, panels, span)
        self.micro.drain(k, session, self.shape, self.columns, self.rows.groups)

    def _row(
        self, k: Builder, session: Any, place: Place, b: Value, index: Range,
        fetching: Callable[[Value, Value], Fetch | None], panels: Range, k_blocks: Range,
    ) -> None:  # fmt: skip
        """One step of rows, by its number and by its place in the item, times all panels."""
        first, last = panels
        for panel, count in self._across(k, panels):
            number = index[1] * (last - first) + panel - first
            span, fetch = self._span(k, k_blocks, number), fetching(index[1], panel)
            self._step(
                k, session, place, b, index[0], panel, first, count, k_blocks[1], span, fetch
            )

    def _run_by_panels(
        self, k: Builder, session: Any, steps: Range, panels: Range, b: Value
    ) -> None:
        """The same, but panels, a span of K of them, meet all rows before the next ones do."""
        k_blocks = self.rows.k_blocks
        for panel, count in self._across(k, panels):
            for first in k.range(0, k_blocks, self.shape.span):
                span = first, minimum(first + self.shape.span, k_blocks)
                fetching = self._fetching_panels(k, steps, (panel, count), panels, b, span)
                for index in k.range(*steps):
                    place, nth = self._place(k, index, None), index - steps[0]
                    waits = self._span(k, span, nth * count)
                    self._step(k, session, place, b, index, panel, panels[0], count, span[1],
                               waits, fetching(nth))  # fmt: skip
        self.micro.drain(k, session, self.shape, self.columns, self.rows.groups)

    def _across(self, k: Builder, panels: Range) -> Iterator[tuple[Value, int]]:
        """Emit what follows for each of the panels that a step takes, and their number."""
        (first, last), count = panels, self.shape.panels
        whole = (last - first) // count * count + first
        for panel in k.range(first, whole, count):
            yield panel, count
        if count > 1 and not self.shape.columns:
            for panel in k.range(whole, last):
                yield panel, 1

    def _span(self, k: Builder, k_blocks: Range, number: Value) -> Span | None:
        """Part of K, with the memory of that number for sums, where there are spans."""
        if not self.shape.span:
            return None
        sums = self._behind_rows(k) + number * self.shape.step_sums
        return Span(*k_blocks, sums.cast(s32))

    def _read_next(
        self, k: Builder, item: Value, last: Value, column: Value, counts: tuple[Value, ...],
        sizes: Range,
    ) -> Range | None:  # fmt: skip
        """What a thread will probably read that has this `item` before it and was at `column`:
        other panels, or its part of another image; or, after its `last`, what follows all items.
        counts: of images, of items of one below and beside each other."""
        if not self.micro.fetches or self.shape.columns:
            return None
        (item_steps, item_panels), rows = sizes, self.rows
        image, part, other = self._which(item, counts)
        place = self.panels + other * item_panels * self._panel_bytes
        same, of_image = other.equals(column), (place, k.index(0))
        if isinstance(rows.format, Strips):
            step = part * item_steps
            lines = self._lines((step, step + item_steps))
            of_image = rows.format.source(rows.operand, image, lines)
        place = select(same, of_image[0], place)
        size = select(same, of_image[1], item_panels * self._panel_bytes)
        place, size = (
            select(last, far, one) for far, one in zip(self.following, (place, size), strict=True)
        )
        return place, size

    def _fetching(
        self, k: Builder, panels: Range, steps: Value, following: Range | None
    ) -> Callable[[Value, Value], Fetch | None]:
        """What a step should fetch of what follows, an equal share for each 64 k, by its place
        among the steps and its panel."""
        if following is None:
            return lambda step, panel: None
        begin, size = following
        across = ceil(panels[1] - panels[0], self.shape.panels)
        blocks = across * self.rows.k_blocks
        lines = self._fewer(k, ceil(size, steps * blocks * LINE))

        def fetch(step: Value, panel: Value) -> Fetch:
            before = step * blocks + (panel - panels[0]) // self.shape.panels * self.rows.k_blocks
            return Fetch(begin + before * lines * LINE, lines)

        return fetch

    def _fetching_panels(
        self, k: Builder, steps: Range, now: tuple[Value, int], panels: Range, b: Value,
        span: Range,
    ) -> Callable[[Value], Fetch]:  # fmt: skip
        """What steps should fetch, by their place, while some panels and a span of K stay: what
        stays next, one panel after the other."""
        (panel, count), (first, last), k_blocks = now, panels, self.rows.k_blocks
        again = span[1] < k_blocks  # the same panels
        panel, begin = (
            select(again, *ways) for ways in ((panel, panel + count), (span[1], k.index(0)))
        )
        turns = ceil(steps[1] - steps[0], count)  # steps for a panel
        blocks = minimum(k_blocks - begin, k.index(self.shape.span))
        lines = ceil(blocks * (PANEL_LINE // LINE), turns * (span[1] - span[0]))
        lines = select(panel < last, self._fewer(k, lines), k.index(0))
        place = b + ((panel - first) * self._panel_bytes + begin * PANEL_LINE)

        def fetch(nth: Value) -> Fetch:
            which = nth // turns
            before = (nth - which * turns) * (span[1] - span[0]) - span[0]
            return Fetch(place + (which * self._panel_bytes + before * lines * LINE), lines)

        return fetch

    def _fewer(self, k: Builder, lines: Value) -> Value:
        """So many lines for each 64 k, or those that the micro-kernel can fetch. Where more are to
        be fetched, memory sets the pace already: none."""
        most = self.micro.fetches
        return select(lines > self.micro.in_part * most, k.index(0), minimum(lines, k.index(most)))

    def _bytes(self, k: Builder, panels: Range) -> Value:
        """Where the item's panels are, as the micro-kernel reads them."""
        if self.shape.piece > QUAD:
            return self.panels
        if self.weight not in NIBBLES or self.shape.nibbles:
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
        kept = self.shape.ring if self._in_passing(k) else self.rows.k_blocks
        return self.private + self.rows.block_rows * (self.shape.row_blocks * LINE) * kept

    def _in_passing(self, k: Builder) -> bool:
        """Whether rows are packed in the course of their products, which pays only where a ring
        then keeps lines near: memory is read faster row by row than line by line of many rows."""
        return self.fused and self.shape.ring > 0 and self.rows.by_lines(k)

    def _make_lines(
        self, k: Builder, index: Value, first: Value, last: Value, block: Value
    ) -> None:
        """Pack 64 k of a step's rows, in the course of their products, if these are the first and
        the block comes before the last."""
        rows = self.rows.block_rows * self.shape.row_blocks
        target = self.private + self.shape.kept(block) * (rows * LINE)
        for _ in k.when(first & (block < last)):
            self.rows.pack_block(k, index * rows, rows, block, target)

    def _place(self, k: Builder, index: Value, strip: Strip | None) -> Place:
        rows, shape = self.rows, self.shape
        if strip is not None:
            where = strip.step(index, rows.block_rows * shape.row_blocks, shape.lines)
            next_block = strip.line_bytes if shape.lines > 1 else rows.block_rows * shape.pitch
            return Place(*where, next_block, strip.at)
        lines = rows.block_rows * LINE
        if self._in_passing(k):  # beside those of the other blocks, and maybe in a ring
            block_bytes, at = lines, lambda block: shape.kept(block) * (lines * shape.row_blocks)
        else:
            block_bytes, at = rows.block_bytes, lambda block: block * lines
        row = index * self.shape.row_blocks * rows.block_outputs
        stride = rows.operand.row_stride
        if self.shape.piece:
            row = minimum(row, rows.count - rows.block_outputs)
            return Place(rows.operand.row(row), row, rows.count, block_bytes, at, stride)
        if self.shape.in_place:
            # Behind the last line of a row must be other rows.
            apart = (stride < rows.k_size) | (stride > rows.k_size)
            over = rows.k_blocks * LINE - rows.k_size
            end = (row + rows.block_rows * shape.row_blocks) * rows.k_size + over
            packs = (end > rows.count * rows.k_size) | (apart & (over > 0))
            for _ in k.when(packs):
                self._packed_rows(k, index)
            stride = select(packs, k.index(LINE), stride)
            between = select(packs, lines, k.index(LINE))
            block_bytes = select(packs, block_bytes, stride * rows.block_rows)
            place = select(packs, self.private, rows.operand.row(row))
            return Place(place, row, rows.count, block_bytes, lambda b: b * between, stride)
        return Place(self._packed_rows(k, index), row, rows.count, block_bytes, at)

    def _packed_rows(self, k: Builder, index: Value) -> Value:
        """Where the packed rows of a step are, or will be."""
        count, size = self.shape.row_blocks, self.rows.block_bytes
        if not self.fused:
            return self.packed + index * count * size
        few = count <= _UNROLLED
        for block in () if self._in_passing(k) else range(count) if few else k.range(0, count):
            first = (index * count + block) * self.rows.block_outputs
            self.rows.pack(k, first, self.private + size * block)
        return self.private

    def _step(
        self, k: Builder, session: Any, place: Place, b: Value, index: Value, panel: Value,
        first_panel: Value, count: int, last: Value, span: Span | None, fetch: Fetch | None,
    ) -> None:  # fmt: skip
        make_lines = partial(self._make_lines, k, index, panel.equals(first_panel), last)
        step = Step(
            a=place.a,
            b=b + (panel - first_panel) * self._panel_bytes,
            row=place.row,
            rows=place.end,
            n=self.n,
            panel=k.index(0) if self.shape.columns else panel,
            k_size=self.rows.k_size,
            k_blocks=self.rows.k_blocks,
            block_rows=self.rows.block_rows,
            block_bytes=place.block_bytes,
            at=place.at,
            panel_bytes=self._panel_bytes,
            columns=self.columns,
            groups=self.rows.groups,
            span=span,
            fetch=fetch,
            make_lines=make_lines if self._in_passing(k) else None,
            row_stride=place.row_stride,
            flip=self.rows.format.flip,
            behind=self.panels + ceil(self.n, PANEL) * self._panel_bytes,
            scratch=self._behind_rows(k),
            turned=(panel - first_panel) // count & 1,
        )
        with k.scope():
            self.micro.step(k, session, self.shape, step, count)

    @property
    def _counts(self) -> Range:
        """Steps, of an image where there are such, and panels."""
        return self.rows.steps(self.shape), ceil(self.n, PANEL)

    @property
    def _panel_bytes(self) -> Value:
        return self.rows.k_blocks * (PANEL_LINE // 2 if self.shape.nibbles else PANEL_LINE)
