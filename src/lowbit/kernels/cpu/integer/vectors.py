"""What the micro-kernels of vector registers share: rows times panels of accumulators.

      panel 0   panel 1   panel 2       Every row meets every panel: for each 4 k, a line of
a0 |  sum       sum       sum           each panel is loaded once and 4 bytes of each row are
a1 |  sum       sum       sum           broadcast. How many rows and panels fit, and what
..                                      instructions multiply, is each kernel's own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, product
from typing import Any

from lowbit.isa import host
from lowbit.isa.generic import minimum, prefetch
from lowbit.isa.types import f32, s32, u32
from lowbit.isa.value import Register, Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.integer.in_place import (
    ROWS,
    may_be_read_again,
    multiply_in_place,
    read_again,
    shape_in_place,
)
from lowbit.kernels.cpu.integer.micro_kernel import KernelQuery, MicroKernel, Shape, Step, span
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, QUAD, QUADS, blocks
from lowbit.kernels.cpu.shared.pack import unpacked
from lowbit.kernels.cpu.shared.panel_format import NIBBLES

_PAIRS = QUADS // 2
_STREAMS, _LONG = 4, 16  # panels read side by side, if they have so many times 64 k
_FEW_QUADS = 4  # that need no loop
_PACKED = 1  # products that take as long as to pack 4 k of a row
_STEP_OVERHEAD = 4  # loads and loop control of a step, in units of one product


# (row, number of a vector) -> what its sum begins with; None: 0.
Begin = Callable[[int, int], Value | None]


def from_zero(row: int, which: int) -> None:
    """Sums begin with 0."""


class VectorKernel(MicroKernel):
    """Some rows by some panels, of vectors of `lanes` columns each.

    `most_rows`, `panels`: what the registers hold; `nibble_rows`: the rows for one panel of
    nibbles, or with groups. `chains`: accumulators that the products need in order not to wait for
    each other; where a step has fewer, each gets partial sums.
    """

    fetches = 32
    shortest_line = 8
    quads = 1  # times 4 k that are multiplied in a turn of the loop: 1 or 2
    reads_in_place = False  # whether rows need not be packed, however many columns there are
    any_pairs = True  # whether any two bytes may be neighbours; else b's, from an even k on

    def __init__(
        self, isa: str, lanes: int, most_rows: int, panels: int, nibble_rows: int, chains: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(isa)
        self.lanes, self.most_rows, self.panels = lanes, most_rows, panels
        self.nibble_rows, self.chains = nibble_rows, chains
        self.offsets = range(0, PANEL, lanes)

    def refuses(self, query: KernelQuery) -> str:
        return ""

    @abstractmethod
    def multiply(
        self, k: Builder, lanes: int, rows: Iterable[Value], columns: list[Value],
        sums: list[list[Register]], signed: bool = False,
    ) -> None:  # fmt: skip
        """Emit the products of 4 k in each of `lanes` dwords. `rows`: a vector for each row;
        `columns`: a vector of bytes for each vector of accumulators; `sums`: for each row one
        register for each of them. Bytes are u8 on the left and s8 on the right; if `signed`, s8 on
        the left and u8 on the right."""

    def shape(self, query: KernelQuery) -> tuple[Shape, int]:
        most = self.most_rows * self.panels * len(self.offsets)
        cut = shape_in_place(query, self.lanes, self.panels, most, self.any_pairs)
        if cut:
            return cut, cut.rows
        digits = query.digits
        bytes_rows = query.together * digits
        if query.weight != "s8":
            # Nibbles are unpacked on their way from memory, and what belongs to a group is loaded
            # for all rows: one stream of panels, for more rows; or some, where they are long and
            # all rows meet them at once.
            count = blocks(bytes_rows, max(self.nibble_rows // digits, 1) * digits)
            rows = blocks(query.m, count) * digits
            long = count == 1 and query.k_blocks >= _LONG
            many = long and rows * _STREAMS <= self.most_rows * self.panels
            ahead = host.read_ahead() if count == 1 else 0
            panels = _STREAMS if many else 1
            nibbles = query.weight if query.weight in NIBBLES else ""
            return Shape(rows, 1, panels, nibbles=nibbles, ahead=ahead), rows
        wide = blocks(query.n, PANEL)

        def cost(cut: tuple[int, int]) -> tuple[int, int]:
            panels, rows = cut
            cycles = sum(
                count * (max(rows * each, rows + each) + _STEP_OVERHEAD)
                for count, each in (
                    (wide // panels, panels * len(self.offsets)),
                    (wide % panels, len(self.offsets)),
                )
            )
            # A line is cut once, so the better of two alike has fewer loads; else fewer steps.
            loads = rows + panels * len(self.offsets)
            return blocks(bytes_rows, rows) * cycles, loads if query.line else -rows

        cuts: list[tuple[int, int]] = []
        # Columns of single panels are written in pieces that lie rows apart, which takes longer.
        least = min(2, self.panels, wide) if not query.line else 1
        for panels in range(least, min(self.panels, wide) + 1):
            most = self.most_rows * self.panels // panels  # in the registers that panels leave
            cuts += [(panels, rows) for rows in range(digits, max(most, digits) + 1, digits)]
        panels, rows = min(cuts, key=cost)
        quads = blocks(query.k, QUAD)
        few_quads = quads <= _FEW_QUADS and query.grouping is None
        if self.reads_in_place and not few_quads and may_be_read_again(query):
            few = min((cut for cut in cuts if cut[1] <= min(ROWS, query.m)), key=cost)
            if cost(few)[0] <= cost((panels, rows))[0] + _PACKED * query.m:
                panels, rows = few
                return read_again(query, rows, panels, self.lanes), rows
        short = quads if few_quads else 0
        return Shape(rows, 1, panels, span=span(query, rows), quads=short), rows

    def step(self, k: Builder, session: Any, shape: Shape, step: Step, panels: int) -> None:
        if shape.in_place:
            multiply_in_place(k, self.multiply, shape, step, panels)
            return
        places = [(p, at) for p in range(panels) for at in self.offsets]
        parts = self._parts(shape, step, len(places))
        pairs = (step.k_size + (2 * QUAD - 1)) // (2 * QUAD)
        if step.groups is None:
            columns, begin = step.columns.begun()
            with k.scope():
                firsts = [begin(step.panel + p, at, self.lanes) for p, at in places]
                one = replace(step, columns=columns)
                self._span(k, shape, one, places, parts, pairs, lambda _, which: firsts[which])
            return
        groups, digits = step.groups, step.groups.grouping.digits
        rows = shape.rows // digits
        totals = k.local(f32, rows * len(places) * self.lanes)
        for i in range(rows * len(places)):
            (totals + i * self.lanes).store(k.zeros(f32, self.lanes))
        for group in k.range(0, groups.count):
            first = group * groups.group_pairs
            span = first, minimum(first + groups.group_pairs, pairs)
            with k.scope():
                sums = self._sums(k, shape, step, places, parts, span)
                for i, (p, at) in enumerate(places):
                    add = groups.columns(k, step.panel + p, group, at, self.lanes)
                    for row in range(rows):
                        each = [sums[row * digits + digit][i] for digit in range(digits)]
                        place = totals + (i * rows + row) * self.lanes
                        entry = groups.place(step.row + row, group)
                        place.store(add(entry, each, place.load(self.lanes)))
        each = [(totals + i * self.lanes).load(self.lanes) for i in range(rows * len(places))]
        self._finish(k, step, places, [each[row::rows] for row in range(rows)])

    def _span(
        self, k: Builder, shape: Shape, step: Step, places: list[tuple[int, int]], parts: int,
        pairs: Value, begin: Begin,
    ) -> None:  # fmt: skip
        """Multiply over all of K, or over a span of it and leave the sums for the next."""
        if step.span is None:
            sums = self._sums(k, shape, step, places, parts, (k.index(0), pairs), begin)
            self._finish(k, step, places, sums)
            return
        first, last, _ = step.span
        part = first * _PAIRS, minimum(last * _PAIRS, pairs)
        sums = self._sums(k, shape, step, places, parts, part, begin)
        for _ in k.when(last < step.k_blocks):
            for at, value in enumerate(chain(*sums)):
                (step.span.sums + at * self.lanes).store(value)
        for _ in k.when(last.equals(step.k_blocks)):
            self._finish(k, step, places, sums)

    def _parts(self, shape: Shape, step: Step, vectors: int) -> int:
        """Into how many partial sums each is cut, lest products wait for each other."""
        quads = step.groups.grouping.size // QUAD if step.groups else QUADS
        if shape.quads:
            return 1
        fitting = self.chains // (shape.rows * vectors)
        return max(p for p in (1, 2, 4, 8) if p <= max(fitting, 1) and quads % p == 0)

    def _finish(
        self, k: Builder, step: Step, places: list[tuple[int, int]], sums: list[list[Value]]
    ) -> None:
        """Store the sums of the rows that exist."""
        rows, lanes = len(sums), self.lanes
        wide = (places[-1][0] + 1 + step.panel) * PANEL
        all_columns = wide < step.n + 1
        masks = k.isa.vector_bytes == LINE  # without, ends of so many rows are too much code
        fast = (step.row + rows < step.rows + 1) & (all_columns | int(masks))
        for ends in (False, True)[: 1 + masks]:
            for _ in k.when(fast & all_columns.equals(int(not ends))):
                store = step.columns.whole(step.panel, len(places), lanes, ends)
                store([(step.row + row, values) for row, values in enumerate(sums)])
        for _ in k.when(fast.equals(0)):
            held = k.local(f32 if step.groups else s32, rows * len(places) * lanes)
            for at, value in enumerate(chain(*sums)):
                (held + at * lanes).store(value)
            stores = [step.columns(step.panel + p, at, lanes) for p, at in places]
            for row in k.range(0, minimum(k.index(rows), step.rows - step.row)):
                for at, store in enumerate(stores):
                    store(step.row + row, (held + (row * len(places) + at) * lanes).load(lanes))

    def _sums(
        self, k: Builder, shape: Shape, step: Step, places: list[tuple[int, int]], parts: int,
        span: tuple[Value, Value], begin: Begin = from_zero,
    ) -> list[list[Value]]:  # fmt: skip
        """For each row its vectors of sums, over some times 8 k."""
        panels = len(places) // len(self.offsets)
        each = shape.rows, len(places)
        sums = [self._begun(k, *each, begin if part == 0 else from_zero) for part in range(parts)]
        self._resume(k, step, sums[0])
        together = shape.quads or max(parts, 2 if shape.nibbles else self.quads)
        signed, pitch = step.groups is not None, shape.pitch or LINE
        size = LINE // 2 if shape.nibbles else LINE  # of 4 k
        for a, quad in self._turns(k, shape, step, span, together):
            if shape.ahead:
                for panel, line in product(range(panels), range(0, together * size, LINE)):
                    place = step.b + (step.panel_bytes * panel + quad * size)
                    prefetch(place + (shape.ahead + line))
            for which in range(together):
                columns = [self._bytes(shape, step, quad, place, which) for place in places]
                fours = (
                    (a + (which * QUAD + row * pitch)).cast(u32).load().splat(self.lanes)
                    for row in range(shape.rows)
                )
                self.multiply(k, self.lanes, fours, columns, sums[which % parts], signed)
        totals = [[register.value for register in row] for row in sums[0]]
        for part in sums[1:]:
            for row, more in zip(totals, part, strict=True):
                row[:] = [a + b.value for a, b in zip(row, more, strict=True)]
        return totals

    def _begun(self, k: Builder, rows: int, vectors: int, begin: Begin) -> list[list[Register]]:
        """Registers for the sums of so many rows, of so many vectors each."""
        zero = k.zeros(s32, self.lanes)
        firsts = [[begin(row, which) for which in range(vectors)] for row in range(rows)]
        return [[k.register(zero if one is None else one) for one in row] for row in firsts]

    def _resume(self, k: Builder, step: Step, sums: list[list[Register]]) -> None:
        """Begin with the sums over the spans before, if there were any."""
        if step.span:
            for _ in k.when(step.span.first > 0):
                for at, register in enumerate(chain(*sums)):
                    register.value = (step.span.sums + at * self.lanes).load(self.lanes)

    @staticmethod
    def _turns(
        k: Builder, shape: Shape, step: Step, span: tuple[Value, Value], together: int
    ) -> Iterator[tuple[Value, Value]]:
        """The turns of the loop over K, each of some times 4 k: where the first row has them, and
        which they are."""
        if shape.quads:
            step.fetch_share(k, k.index(0))
            yield step.a, k.index(0)
            return
        first, last = span[0] * 2, span[1] * 2
        lines = shape.rows * LINE
        if shape.nibbles or step.groups:
            for quad in k.range(first, last, together):
                yield step.a + (quad // QUADS * lines + quad % QUADS * QUAD), quad
            return
        # Finding the place in each turn would take a fifth of what a core of four instructions a
        # cycle can start. Spans begin at a whole block.
        for block in k.range(first // QUADS, (last + (QUADS - 1)) // QUADS):
            step.fetch_share(k, block)
            begin = block * QUADS
            for quad in k.range(0, minimum(last - begin, k.index(QUADS)), together):
                yield step.a + (step.at(block) + quad * QUAD), begin + quad

    def _bytes(
        self, shape: Shape, step: Step, quad: Value, place: tuple[int, int], which: int
    ) -> Value:
        """A vector of some columns: 4 k in each dword, `which` times 4 behind those of `quad`."""
        size, (panel, at) = self.lanes * QUAD, place
        base = step.b + (step.panel_bytes * panel + at * QUAD)
        if shape.nibbles:
            both = (base + (quad + which // 2 * 2) * (LINE // 2)).load(size)
            return unpacked(both, shape.nibbles)[which % 2]
        return (base + (quad + which) * LINE).load(size)
