"""The micro-kernel for AMX and weights with groups: two by two tiles, or one by four for few rows.

A tile of sums is complete after every group, and is then stored to scratch. That waits for the last
of its products, and products of other tiles fill the time. So the tiles of sums take turns, in an
order in which neighbours share an operand:

    c 0   a0·b0, over a block of 64 k          Before its first product of a group a tile of sums
    c 2   a1·b0                                is stored, that of the group before, and becomes
    c 3   a1·b1                                zeros. Behind each of its first two products, half of
    c 1   a0·b1; then over the next block      these rows are scaled and added to their totals.

The last sums of a step are finished in the course of the next one, and its rows of the output
stored then. Tiles take 64 k at once, or 32 where groups are odd multiples of that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lowbit.isa import host
from lowbit.isa.amx import (
    ROWS,
    TILES,
    tdpbssd,
    tdpbsud,
    tileloadd,
    tileloaddt1,
    tilestored,
    tilezero,
)
from lowbit.isa.generic import maximum, minimum, select
from lowbit.isa.types import f32, s32
from lowbit.isa.value import Register, Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.integer.amx import FEW
from lowbit.kernels.cpu.integer.micro_kernel import (
    KernelQuery,
    MicroKernel,
    Shape,
    Step,
    micro_kernel,
)
from lowbit.kernels.cpu.shared.epilogue import Output
from lowbit.kernels.cpu.shared.groups import Grouping, Groups
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, QUAD, blocks
from lowbit.kernels.cpu.shared.panel_format import NIBBLES
from lowbit.kernels.cpu.shared.tiles import configure, release, turns

_HALF = LINE // 2  # the least k that tiles take at once
_TILE = ROWS * PANEL  # sums
_A, _B = 4, 6  # the first tile of each operand; those before are sums
_LEADING = 2  # blocks of K of a group, in whose course the sums before are added


def _width(grouping: Grouping) -> int:
    """How many k tiles take at once: no group begins or ends inside."""
    return LINE if grouping.size % LINE == 0 else _HALF


@dataclass
class _Session:
    """Two steps: one whose groups are multiplied, and one whose rows of the output are stored.

    scratch: s32 for each tile of sums; totals: float32, twice that, of which those of this step
    begin at `at`. outputs: rows of the output in a block, `most` at most. row, panel: where the
    step lies in the output that the sums in tiles belong to; count: how many of its rows there
    are; group: which one the sums are of; left: groups of the step still to come. stored: the rows
    of the step before of which the first `done` are stored.
    """

    shape: Shape
    scratch: Value
    totals: Value
    grouping: Grouping
    outputs: Value
    at: Register
    row: Register
    panel: Register
    count: Register
    group: Register
    left: Register
    done: Register
    stored_row: Register
    stored_panel: Register
    stored_count: Register

    @property
    def most(self) -> int:
        return ROWS // self.grouping.digits

    @property
    def size(self) -> int:
        """Sums of a step."""
        return self.shape.row_blocks * self.shape.panels * _TILE

    def place(self, d: int, p: int) -> int:
        """Of the tile of sums for a block of rows and a panel, in scratch and in totals."""
        return (p * self.shape.row_blocks + d) * _TILE

    def add(self, k: Builder, groups: Groups, at: tuple[int, int], rows: range) -> None:
        """Add some rows of a tile, whose sums lie in scratch, to their totals."""
        (d, p), digits = at, self.grouping.digits
        sums = self.scratch + self.place(d, p)
        totals = self.totals + (self.at.value + self.place(d, p))
        row, group = self.row.value + self.outputs * d, self.group.value
        first = row * groups.count + group
        add = groups.columns(k, self.panel.value + p, group, 0, PANEL, self.shape.centred)

        def one(r: Value | int) -> None:
            each = [(sums + (r * digits + i) * PANEL).load(PANEL) for i in range(digits)]
            place = totals + r * PANEL
            place.store(add(first + groups.count * r, each, place.load(PANEL)))

        # Rows of the next block, if there are some, do no harm and save counting.
        left = groups.rows - row
        for _ in k.when(left > self.most - 1):
            for r in rows:
                one(r)
        for _ in k.when(left < self.most):
            for r in k.range(rows.start, minimum(left, k.index(rows.stop))):
                one(r)

    def complete(self, k: Builder, columns: Output, panels: int) -> None:
        """The totals of a step are complete: store what is left of those before, then let these
        take their place."""
        self.store(k, columns, panels, self.stored_count.value)
        for _ in k.when(self.count.value.equals(0)):  # what was added belongs to no step
            self._forget(k, self.at.value)
        self.at.value = self.size - self.at.value
        self.stored_row.value, self.stored_panel.value = self.row.value, self.panel.value
        self.stored_count.value, self.done.value = self.count.value, k.index(0)

    def store(self, k: Builder, columns: Output, panels: int, rows: Value) -> None:
        """Store some rows more, as far as there are; their totals become zeros."""
        end = minimum(self.done.value + rows, self.stored_count.value)
        for _ in k.when(self.done.value < end):
            stores = [columns(self.stored_panel.value + p, 0, PANEL) for p in range(panels)]
            totals = self.totals + (self.size - self.at.value)
            for r in k.range(self.done.value, end):
                gap = select(r < self.outputs, k.index(0), self.outputs * -PANEL + _TILE)
                for p, store in enumerate(stores):
                    place = totals + (r * PANEL + gap + self.place(0, p))
                    store(self.stored_row.value + r, place.load(PANEL))
                    place.store(k.zeros(f32, PANEL))
            self.done.value = end

    def clear(self, k: Builder) -> None:
        """Nothing waits any more."""
        for at in (0, self.size):
            self._forget(k, k.index(at))
        for one in (self.row, self.panel, self.count, self.left, self.done, self.stored_count):
            one.value = k.index(0)

    def _forget(self, k: Builder, at: Value) -> None:
        """Totals become zeros."""
        for i in k.range(0, self.size, PANEL):
            (self.totals + at + i).store(k.zeros(f32, PANEL))


def _number(shape: Shape, at: tuple[int, int]) -> int:
    """Which tile has the sums for a block of rows and a panel."""
    return at[0] * shape.panels + at[1]


@dataclass
class _Operands:
    """Loads what products need, unless a tile holds it."""

    k: Builder
    shape: Shape
    step: Step
    width: int
    held: dict[int, tuple[int, int]] = field(default_factory=dict)

    def of(self, at: tuple[int, int], unit: Value, ahead: int = 0) -> tuple[Value, Value]:
        """A block of rows and a panel, `ahead` units of K behind `unit`."""
        return self._rows(at[0], unit, ahead), self._panel(at[1], unit, ahead)

    def _rows(self, which: int, unit: Value, ahead: int) -> Value:
        at, step = (unit + ahead) * self.width, self.step
        place = step.a + step.block_bytes * which
        place = place + (at // LINE * (step.block_rows * LINE) + at % LINE)
        return self._loaded(_A + which, (which, ahead), place, False)

    def _panel(self, which: int, unit: Value, ahead: int) -> Value:
        at = (unit + ahead) * (self.width * PANEL)
        place = self.step.b + self.step.panel_bytes * which + at
        return self._loaded(_B + which % 2, (which, ahead), place, not self.shape.stays)

    def _loaded(self, tile: int, what: tuple[int, int], place: Value, passing: bool) -> Value:
        if self.held.get(tile) != what:
            (tileloaddt1 if passing else tileloadd)(self.k.tile(tile), place, self.k.index(LINE))
            self.held[tile] = what
        return self.k.tile(tile)


@micro_kernel("amx")
class AmxGroups(MicroKernel):
    """Two blocks of up to 16 rows by two panels, or one block by four panels."""

    name = "amx_groups"
    per_cycle = 256

    def refuses(self, query: KernelQuery) -> str:
        grouping = query.grouping
        if grouping is None:
            return "it multiplies weights with groups"
        if grouping.size % _HALF:
            return f"a group has {grouping.size} k, and tiles take {_HALF} or {LINE} at once"
        rows = query.m * query.digits
        if rows <= FEW:
            return f"vectors read panels from afar in passing, and {rows} rows are few for tiles"
        return ""

    def shape(self, query: KernelQuery) -> tuple[Shape, int]:
        assert query.grouping is not None
        digits, wide = query.digits, blocks(query.n, PANEL)
        most = ROWS // digits  # rows of the output in a block
        row_blocks, panels = (1, min(4, wide)) if query.m <= most else (2, min(2, wide))
        rows = blocks(query.m, row_blocks * blocks(query.m, row_blocks * most)) * digits
        nearest = query.k_blocks * LINE * (query.n + row_blocks * rows)
        stays = nearest <= host.caches()["L1d"]
        centred = query.grouping.exact and query.weight in NIBBLES  # which items unpack anyway
        return Shape(0, row_blocks, panels, stays=stays, centred=centred), rows

    def begin(
        self, k: Builder, shape: Shape, block_rows: Value, grouping: Grouping | None = None
    ) -> _Session:
        """Shape the tiles: all but those of b have as many rows as a block."""
        assert grouping is not None
        width = _width(grouping)
        b_tiles = [(width // QUAD, LINE)] * (TILES - _B)
        configure(k, [(block_rows, LINE)] * _A + [(block_rows, width)] * (_B - _A) + b_tiles)
        size = shape.row_blocks * shape.panels * _TILE
        scratch, totals = k.local(s32, size), k.local(f32, 2 * size)
        for i in k.range(0, size, PANEL):
            (scratch + i).store(k.zeros(s32, PANEL))
        none = [k.register(k.index(0)) for _ in range(10)]
        outputs = block_rows // grouping.digits
        session = _Session(shape, scratch, totals, grouping, outputs, *none)
        session.clear(k)
        return session

    def end(self, k: Builder) -> None:
        release(k)

    def step(self, k: Builder, session: _Session, shape: Shape, step: Step, panels: int) -> None:
        groups = step.groups
        assert groups is not None
        if panels < shape.panels:
            self.drain(k, session, shape, step.columns, groups)
        width = _width(groups.grouping)
        each, units = groups.grouping.size // width, step.k_blocks * (LINE // width)
        whole = groups.count if each == 1 else units // each
        for group in k.range(0, whole):
            first = group * each
            self._group(k, session, step, panels, group, (first, first + each), min(each, _LEADING))
        for _ in k.when(whole < groups.count) if each > 1 else ():
            self._group(k, session, step, panels, whole, (whole * each, units), 1)
        if panels < shape.panels:
            self._finish(k, session, step.columns, groups, panels)

    def _group(
        self, k: Builder, session: _Session, step: Step, panels: int, group: Value,
        units: tuple[Value, Value], leading: int,
    ) -> None:  # fmt: skip
        """Multiply over some units of K, and finish what came before in the course of the first
        `leading` of them."""
        groups, shape = step.groups, session.shape
        assert groups is not None
        width, dot = _width(groups.grouping), tdpbssd if shape.centred else tdpbsud
        operands = _Operands(k, shape, step, width)
        # All rows of the step before in the course of all groups but the first.
        all_rows = session.outputs * shape.row_blocks
        rows = all_rows // (maximum(groups.count - 1, k.index(1)) * panels) + 1
        products = [(at, nth) for nth in range(leading) for at in turns(shape.row_blocks, panels)]
        loaded = operands.of(products[0][0], units[0])
        for (at, nth), following in zip(products, [*products[1:], None], strict=True):
            if nth == 0:
                self._leave(k, session, at)
                tilezero(k.tile(_number(shape, at)))
            dot(k.tile(_number(shape, at)), *loaded)
            if following:  # before other work, so that products need not wait
                loaded = operands.of(following[0], units[0], following[1])
            part = range(*(session.most * i // leading for i in (nth, nth + 1)))
            session.add(k, groups, at, part)
            if at[0] == 0 and nth == leading - 1 and panels == shape.panels:
                session.store(k, step.columns, panels, rows)
        for _ in k.when(session.left.value.equals(0)):
            session.complete(k, step.columns, panels)
        for unit in k.range(units[0] + leading, units[1]):
            operands = _Operands(k, shape, step, width)
            for at in turns(shape.row_blocks, panels):
                dot(k.tile(_number(shape, at)), *operands.of(at, unit))
        session.row.value, session.panel.value = step.row, step.panel
        session.group.value, session.left.value = group, groups.count - 1 - group
        session.count.value = minimum(all_rows, step.rows - step.row)

    @staticmethod
    def _leave(k: Builder, session: _Session, at: tuple[int, int]) -> None:
        """Bring a tile of sums to scratch."""
        tile = k.tile(_number(session.shape, at))
        tilestored(tile, session.scratch + session.place(*at), k.index(LINE))

    def drain(
        self, k: Builder, session: _Session, shape: Shape, columns: Output, groups: Groups | None,
    ) -> None:  # fmt: skip
        assert groups is not None
        self._finish(k, session, columns, groups, shape.panels)

    def _finish(
        self, k: Builder, session: _Session, columns: Output, groups: Groups, panels: int
    ) -> None:
        """Finish what waits; what tiles hold then counts no more."""
        for at in turns(session.shape.row_blocks, panels):
            self._leave(k, session, at)
            session.add(k, groups, at, range(session.most))
        session.complete(k, columns, panels)
        session.store(k, columns, panels, session.stored_count.value)
        session.clear(k)
