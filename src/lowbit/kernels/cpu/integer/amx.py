"""The micro-kernel for AMX: two by two tiles of sums, or one by four for few rows or few panels.

           b0 (6)  b1 (7)          For each 64 k: four loads and four products, and each product
    a0 (4)  c 0     c 1            takes as many cycles as a block has rows. With up to 16 rows a
    a1 (5)  c 2     c 3            single block of a would leave products waiting for each other,
                                   so it meets four panels at once.

Every line of an operand is one cache line, and 16 of them a contiguous kilobyte, which is what the
tile loads need to run at full speed. Tiles cannot be read lane by lane: sums go through scratch, a
kilobyte each. Storing a tile waits for the last of its products; so the tiles of a step are stored
in the course of the next one, each just before its own first product there, while those of the
others go on. The rows are finished after that, a few of them for each 64 k. Rows are packed before,
one after another. Only those that meet all panels in one step are read where they lie, if their
bytes are unsigned; and those of spans, and long ones that must be made unsigned, are packed in the
course of their first products. Panels pass by once for each step: those that the nearest cache
cannot hold are loaded so that they do not push the rows, which stay, out of it; steps take turns in
which end of K they begin with, since it holds but a part of long rows. A long K is cut into spans,
between which sums wait in memory. Where long rows are few, it is they that pass by panels.

Where up to 64 rows meet panels that lie beyond the second-level cache, four blocks meet one panel:
all panels then come from afar once, at an even pace, and are fetched some way ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from lowbit.isa import host
from lowbit.isa.amx import ROWS, TILES, tdpbusd, tileloadd, tileloaddt1, tilestored, tilezero
from lowbit.isa.generic import minimum, prefetch, prefetch_far, select
from lowbit.isa.types import f32, s32, u8
from lowbit.isa.value import Register, Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.integer.in_place import cycles_in_place
from lowbit.kernels.cpu.integer.micro_kernel import (
    KernelQuery,
    MicroKernel,
    Shape,
    Step,
    micro_kernel,
    span,
)
from lowbit.kernels.cpu.integer.vnni import Vnni
from lowbit.kernels.cpu.shared.epilogue import Output
from lowbit.kernels.cpu.shared.groups import Grouping, Groups
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, blocks
from lowbit.kernels.cpu.shared.post_op import WAITING
from lowbit.kernels.cpu.shared.tiles import configure, release, turns

_TILE = ROWS * LINE  # bytes
FEW = 8  # rows of bytes for which vector registers unpack nibbles in passing
# Cycles to configure tiles and release them; to load one, as long as to multiply it by so many
# rows. And k of one row by 16 columns that vectors multiply in a cycle.
SETUP, _LOAD, _PER_CYCLE = 1000, 8, 8
# Cycles to pack a line of a row, or to load it where it lies, and to begin with it; to finish and
# store it, for each panel.
_PACK, _ROW, _STORE = 3, 2, 3
_VECTORS = Vnni("avx512_vnni")  # which serves what tiles refuse
_FETCHED = 1 << 13  # bytes ahead of products that lines of a panel are fetched
_AHEAD, _RING = 2, 8  # blocks of 64 k that lines are made ahead of their products; that are kept
_SHORT = 2  # times 64 k, whose products are made faster than their sums are written
_MOST_IN_PASSING = 8  # rows finished for each 64 k; more would outlast the products
_FEW_IMAGES, _IN_COMMON = 3, 3  # for which panels come from afar; times that windows hold bytes
_PACE = 1 << 16  # parts of a row, in which those due are counted


@dataclass
class _Part:
    """Where in the output the sums of a step lie, and how many of its rows are to be finished;
    `whole`: all of its columns exist."""

    row: Register
    panel: Register
    count: Register
    whole: Register

    def become(self, row: Value, panel: Value, count: Value, whole: Value) -> None:
        self.row.value, self.panel.value = row, panel
        self.count.value, self.whole.value = count, whole

    def values(self) -> tuple[Value, Value, Value, Value]:
        return self.row.value, self.panel.value, self.count.value, self.whole.value


@dataclass
class _Session:
    """Two steps: one whose sums tiles hold, and the one before, whose rows are finished.

    scratch: for each panel the rows of all blocks, one after another. leave: where the sums in
    tiles will go, scratch or the memory where they wait for the next span. done: rows that are
    finished of those in scratch; due: those that should be, in parts of `_PACE`, and `pace`, how
    many more for each 64 k. waiting: what is made of the numbers of their columns.
    """

    block_rows: Value
    scratch: Value
    leave: Register
    in_tiles: _Part
    in_scratch: _Part
    done: Register
    due: Register
    pace: Register
    waiting: Value

    def hold(
        self, k: Builder, columns: Output, panels: int, leave: Value, blocks: Value, *part: Value
    ) -> None:
        """Tiles hold the sums of this part now, scratch those of the one before, whose rows, of so
        many panels, are to be finished in the course of so many blocks of 64 k."""
        self.in_scratch.become(*self.in_tiles.values())
        self.in_tiles.become(*part)
        self.leave.value, self.done.value, self.due.value = leave, k.index(0), k.index(0)
        even = (self.in_scratch.count.value * _PACE + (blocks - 1)) // blocks
        self.pace.value = minimum(even, k.index(_MOST_IN_PASSING * _PACE))
        columns.make(self.in_scratch.panel.value, panels, PANEL, self.waiting)

    def finish_due(self, k: Builder, shape: Shape, columns: Output, panels: int) -> None:
        """Finish as many rows as are due after another 64 k."""
        self.due.value = self.due.value + self.pace.value
        rows, together = self.due.value // _PACE, self._together(shape, columns, panels)
        self.finish(k, shape, columns, panels, (rows + (together - 1)) // together * together)

    def finish(self, k: Builder, shape: Shape, columns: Output, panels: int, rows: Value) -> None:
        """Finish rows until so many are, or all."""
        row, panel, count, all_columns = self.in_scratch.values()
        end = minimum(rows, count)
        for _ in k.when(self.done.value < end):
            together = self._together(shape, columns, panels)
            for ends in (False, True) if shape.ragged else (False,):
                for _ in k.when(all_columns.equals(int(not ends))) if shape.ragged else (None,):
                    store_rows = columns.whole(panel, panels, PANEL, ends, self.waiting)
                    for first in k.range(self.done.value, end, together):
                        # What is behind the last row is that row again.
                        some = [first, *(minimum(first + i, end - 1) for i in range(1, together))]
                        for out in _outputs(k, shape, row + first):
                            outs = [out, *(row + r for r in some[1:])]
                            sums = ([self._sums(shape, p, r) for p in range(panels)] for r in some)
                            store_rows(list(zip(outs, sums, strict=True)))
            self.done.value = end

    @staticmethod
    def _together(shape: Shape, columns: Output, panels: int) -> int:
        """How many rows are finished at once."""
        return 1 if shape.gap[0] > shape.gap[1] else columns.together(panels, PANEL)

    def _sums(self, shape: Shape, panel: int, row: Value) -> Value:
        return (self.scratch + panel * _panel_sums(shape) + row * PANEL).load(PANEL)


def _tiles_of_a(shape: Shape) -> int:
    """Tiles for blocks of rows; what is left is for panels, at least one."""
    return min(shape.row_blocks, TILES - shape.row_blocks * shape.panels - 1)


def _outputs(k: Builder, shape: Shape, row: Value) -> Iterator[Value]:
    """Emit what follows for the row of the output that a row is, if it is one."""
    together, stored = shape.gap
    if stored == together:
        yield row
        return
    at = row % together
    for _ in k.when(at < stored):
        yield row // together * stored + at


def _panel_sums(shape: Shape) -> int:
    """Room for the sums of a step over one panel."""
    return shape.row_blocks * ROWS * PANEL


def _sums_at(shape: Shape, block_rows: Value, d: int, p: int) -> Value:
    """Of a tile of sums, in scratch and where they wait."""
    return block_rows * (d * PANEL) + p * _panel_sums(shape)


@micro_kernel("amx")
class Amx(MicroKernel):
    """Two blocks of up to 16 rows by two panels, or one block by four panels."""

    name = "amx"
    per_cycle = 512
    shortest_line = 12  # shorter ones would leave tiles waiting for those of b
    leaves_gaps = True
    fetches, in_part = 4, 2

    def refuses(self, query: KernelQuery) -> str:
        why = super().refuses(query)
        if why:
            return why
        rows = query.m
        if query.weight != "s8":
            few = f"tiles read nibbles from memory only, and {rows} rows are few to share that"
            return few if rows <= FEW else ""
        panels = blocks(query.n, PANEL)
        tiles = SETUP + panels * (rows + query.k_blocks * max(rows, _LOAD))
        vectors = panels * rows * blocks(query.k, _PER_CYCLE)
        cut, _ = _VECTORS.shape(query)
        if cut.in_place:  # without what tiles need beside products
            tiles += rows * (_PACK * query.k_blocks + _ROW + _STORE * panels)
            vectors = int(rows * cycles_in_place(query, cut))
        if vectors <= tiles:
            return f"tiles would take some {tiles:,} cycles, and vectors {vectors:,}"
        return ""

    def shape(self, query: KernelQuery) -> tuple[Shape, int]:
        k_blocks, wide = query.k_blocks, blocks(query.n, PANEL)
        # To load rows that begin within a line takes two for each; so these meet more panels.
        few = not query.aligned if query.line else query.m <= ROWS
        plain = query.in_place and not query.signed
        # One step for all panels reads rows once, and writes them from end to end.
        few |= plain and (wide == 3 or (wide == 4 and k_blocks <= _SHORT))
        row_blocks, panels = (1, min(4, wide)) if few else (2, min(2, wide))
        far = query.n * query.k_blocks * LINE > host.caches()["L2"] // 2
        far &= query.m <= _FEW_IMAGES * query.line  # of more, all but the first meet near ones
        once = far and query.aligned and 2 * ROWS < query.line <= 4 * ROWS
        if once:
            row_blocks, panels = 4, 1
        short = 0 < query.line <= ROWS and query.aligned  # lines of the output are blocks
        each = 1 if short else row_blocks
        rows = blocks(query.together, each * blocks(query.together, each * ROWS))
        # Windows that are neighbours have most of their bytes in common.
        own = row_blocks * rows // (_IN_COMMON if query.line and query.aligned else 1)
        nearest = k_blocks * LINE * (query.n + own)
        nearest_cache = host.caches()["L1d"]
        shape = Shape(0, row_blocks, panels, ragged=query.n % (panels * PANEL) > 0,
                      stays=nearest <= nearest_cache, ahead=_FETCHED * once)  # fmt: skip
        if query.line:
            return replace(shape, lines=row_blocks * short), rows
        # Rows that meet all panels in one step are not read again. Unpacked panels lie behind rows.
        large = k_blocks * LINE * row_blocks * rows > nearest_cache // 2
        once_across = wide == panels and query.weight == "s8"
        ring = _RING if once_across and large else 0
        # Lines that are packed in passing are kept for a span, with half as much streaming past.
        spans = span(query, (3 if query.in_place else 2) * ROWS)
        if spans and query.in_place:
            ring = 1 << (spans - 1).bit_length()
        if not once_across and not spans and self._panels_stay(query, row_blocks):
            longest = nearest_cache * 2 // 3 // (panels * PANEL * LINE)
            each = blocks(k_blocks, blocks(k_blocks, longest))
            return replace(shape, span=each, panels_stay=True), rows
        if once_across and plain and not spans and query.m > rows * row_blocks:
            return replace(shape, in_place=True), rows
        return replace(shape, span=spans, ring=ring), rows

    @staticmethod
    def _panels_stay(query: KernelQuery, row_blocks: int) -> bool:
        """Whether long rows are so few, and panels so many, that rows had better stay in the
        second-level cache, and panels come from afar a few times, fetched ahead. Several threads
        gained nothing by it."""
        nearest, near = (host.caches()[name] for name in ("L1d", "L2"))
        row, step = query.k_blocks * LINE, row_blocks * ROWS
        long = 2 * nearest <= row * step < row * query.m <= near < row * query.n
        return long and query.alone and query.weight == "s8"

    def begin(
        self, k: Builder, shape: Shape, block_rows: Value, grouping: Grouping | None = None
    ) -> _Session:
        """Shape the tiles: those of b have 16 rows, the others as many as a block."""
        first_b = shape.row_blocks * shape.panels + _tiles_of_a(shape)
        configure(k, [(block_rows, LINE)] * first_b + [(ROWS, LINE)] * (TILES - first_b))
        scratch = k.local(s32, shape.panels * _panel_sums(shape))
        none = [k.register(k.index(0)) for _ in range(11)]
        leave, parts = k.register(scratch), (_Part(*none[:4]), _Part(*none[4:8]))
        waiting = k.local(f32, shape.panels * WAITING * PANEL)
        return _Session(block_rows, scratch, leave, *parts, none[8], none[9], none[10], waiting)

    def end(self, k: Builder) -> None:
        release(k)

    def step(self, k: Builder, session: _Session, shape: Shape, step: Step, panels: int) -> None:
        """Multiply over some blocks of K, and finish the step before meanwhile."""
        whole = panels == shape.panels
        if not whole:  # what comes now has fewer panels than the step before
            self.drain(k, session, shape, step.columns, None)
        first, last = (
            (step.span.first, step.span.last) if step.span else (k.index(0), step.k_blocks)
        )
        if step.make_lines:
            for ahead in k.range(0, _AHEAD):
                step.make_lines(first + ahead)
        nth = self._order(k, shape, step, first, last)
        self._begin(k, session, shape, step, panels, nth(first))
        for at in k.range(first + 1, last):
            block = nth(at)
            if step.make_lines:
                step.make_lines(block + _AHEAD)
            self._fetch_sums(k, shape, step, panels, block - first - 1)
            step.fetch_share(k, block)
            self._multiply(k, shape, step, panels, block)
            if whole:  # otherwise nothing is left of the step before
                session.finish_due(k, shape, step.columns, panels)
        if whole:
            session.finish(k, shape, step.columns, panels, session.in_scratch.count.value)
        else:
            self._drain(k, session, shape, step.columns, panels)

    @staticmethod
    def _order(
        k: Builder, shape: Shape, step: Step, first: Value, last: Value
    ) -> Callable[[Value], Value]:
        """Which block of 64 k comes at a place. Every second step takes them from the last to the
        first: of rows that are too long for the nearest cache, what it still holds is met again."""
        if shape.stays or shape.ahead or shape.ring or step.span:
            return lambda at: at
        start, sign = (first + last - 1) * step.turned, k.index(1) - step.turned - step.turned
        return lambda at: start + at * sign

    @staticmethod
    def _fetch_sums(k: Builder, shape: Shape, step: Step, panels: int, block: Value) -> None:
        """Fetch, a share for each 64 k but the first, the sums that the next step begins with."""
        if step.span is None:
            return
        size = panels * shape.step_sums
        each = blocks(blocks(size, LINE), max(1, shape.span - 1))
        place = step.span.sums.cast(u8) + size + block * (each * LINE)
        for line in range(each):
            prefetch(place + line * LINE)

    def _begin(
        self, k: Builder, session: _Session, shape: Shape, step: Step, panels: int, block: Value,
    ) -> None:  # fmt: skip
        """The first 64 k. One after another, tiles give up the sums of the step before. To store a
        tile waits for the last of its products; those of the other tiles fill that time."""
        span, leave, none = step.span, session.leave.value, k.index(0)
        count = minimum(step.block_rows * shape.row_blocks, step.rows - step.row)
        whole = select((step.panel + panels) * PANEL < step.n + 1, k.index(1), none)
        if step.make_lines:
            step.make_lines(block + _AHEAD)
        step.fetch_share(k, block)

        def begin(again: bool) -> None:
            def renew(d: int, p: int) -> None:
                tile, at = k.tile(d * panels + p), _sums_at(shape, step.block_rows, d, p)
                tilestored(tile, leave + at, k.index(LINE))
                if again:
                    assert span is not None
                    tileloadd(tile, span.sums + at, k.index(LINE))
                else:
                    tilezero(tile)

            self._multiply(k, shape, step, panels, block, renew)

        part = step.row, step.panel, count, whole
        how = step.columns, panels
        if span is None:
            begin(again=False)
            session.hold(k, *how, session.scratch, step.k_blocks, *part)
        else:
            for _ in k.when(span.first.equals(0)):
                begin(again=False)
            for _ in k.when(span.first > 0):
                begin(again=True)
            of_span = span.last - span.first
            for _ in k.when(span.last.equals(step.k_blocks)):
                session.hold(k, *how, session.scratch, of_span, *part)
            for _ in k.when(span.last < step.k_blocks):
                session.hold(k, *how, span.sums, of_span, step.row, step.panel, none, whole)
        if panels == shape.panels:
            session.finish_due(k, shape, step.columns, panels)

    def drain(
        self, k: Builder, session: _Session, shape: Shape, columns: Output, groups: Groups | None,
    ) -> None:  # fmt: skip
        self._drain(k, session, shape, columns, shape.panels)

    @staticmethod
    def _drain(k: Builder, session: _Session, shape: Shape, columns: Output, panels: int) -> None:
        """Finish the step whose sums tiles hold."""
        for d, p in turns(shape.row_blocks, panels):
            at = _sums_at(shape, session.block_rows, d, p)
            tilestored(k.tile(d * panels + p), session.leave.value + at, k.index(LINE))
        session.hold(k, columns, panels, session.scratch, k.index(1), *(k.index(0),) * 4)
        session.finish(k, shape, columns, panels, session.in_scratch.count.value)

    @staticmethod
    def _multiply(
        k: Builder, shape: Shape, step: Step, panels: int, block: Value,
        before: Callable[[int, int], None] = lambda d, p: None,
    ) -> None:  # fmt: skip
        """Add the products of 64 k. `before`: emits what comes before that of a tile of sums."""
        first_a = shape.row_blocks * shape.panels
        first_b = first_a + _tiles_of_a(shape)
        a_tiles = [k.tile(t) for t in range(first_a, first_b)]
        b_tiles = [k.tile(t) for t in range(first_b, TILES)]
        stride = k.index(LINE)
        row_stride = k.index(shape.pitch or LINE) if step.row_stride is None else step.row_stride
        # What passes by must not push what stays out of the nearest cache.
        load = tileloadd if shape.stays or shape.panels_stay else tileloaddt1
        load_row = tileloaddt1 if shape.panels_stay else tileloadd

        def load_panel(p: int) -> None:
            place = step.b + (step.panel_bytes * p + block * _TILE)
            load(b_tiles[p % len(b_tiles)], place, stride)
            for line in range(ROWS if shape.ahead else 0):
                prefetch_far(place + (shape.ahead + line * LINE))

        rows = step.a + step.at(block)

        def load_rows(d: int) -> None:
            load_row(a_tiles[d % len(a_tiles)], rows + step.block_bytes * d, row_stride)

        for d in range(len(a_tiles)):
            load_rows(d)
        for p in range(min(panels, len(b_tiles))):
            load_panel(p)
        for d, p in turns(shape.row_blocks, panels):
            before(d, p)
            tdpbusd(k.tile(d * panels + p), a_tiles[d % len(a_tiles)], b_tiles[p % len(b_tiles)])
            if d + len(a_tiles) < shape.row_blocks:
                load_rows(d + len(a_tiles))
            if shape.row_blocks == 1 and p + len(b_tiles) < panels:
                load_panel(p + len(b_tiles))
