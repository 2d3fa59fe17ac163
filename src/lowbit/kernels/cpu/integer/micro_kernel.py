"""The part of a matrix product that differs between instruction sets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

from lowbit.isa import host, named
from lowbit.isa.generic import prefetch_far
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.shared.epilogue import Output
from lowbit.kernels.cpu.shared.groups import Grouping, Groups
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, QUAD, blocks
from lowbit.kernels.cpu.shared.panel_format import UNPROVEN, SplitFormat
from lowbit.registry import Registry

_FEWEST_COLUMNS = 128  # that rows, which come from far, should be multiplied with
_APART = 512  # bytes
_FEW_ROWS = 32  # for which panels are not worth cutting along K


class KernelQuery(NamedTuple):
    """A product [m, k] by [k, n], as far as it decides which micro-kernel serves it and how.

    `largest_pair`: of b's stored values, the largest magnitude that two neighbours along K of one
    sign sum to (see PackedMatrix.largest_pair). `weight`: what panels hold in memory, bytes ("s8",
    with groups "u8") or nibbles. `grouping`: of weights with groups. `in_place`: rows are bytes,
    contiguous along K, of which nothing but their products is wanted, so they need not be packed;
    `signed` ones, which somebody must make unsigned. `split`: of weights that are split besides.
    `line`: rows lie a fixed distance apart, and so many, windows of an output line, belong
    together; `aligned`: they begin at multiples of 64 bytes. `alone`: one thread serves it.
    """

    m: int
    n: int
    k: int
    largest_pair: int = UNPROVEN
    weight: str = "s8"
    grouping: Grouping | None = None
    in_place: bool = False
    signed: bool = False
    split: SplitFormat | None = None
    line: int = 0
    aligned: bool = True
    alone: bool = False

    @property
    def together(self) -> int:
        """Rows that are cut into steps."""
        return self.line or self.m

    @property
    def k_blocks(self) -> int:
        """The blocks of 64 that K takes."""
        return blocks(self.k, LINE)

    @property
    def digits(self) -> int:
        """The rows of bytes that a row of the left operand has: its digits, or itself."""
        return self.grouping.digits if self.grouping else 1


@dataclass(frozen=True)
class Step:
    """What a micro-kernel is given: one block of rows times a few panels.

    `a` points to the block of the packed left operand, `b` to the first panel, which is number
    `panel`; `panel_bytes` lie between panels, `block_bytes` between two blocks of rows (of
    `block_rows` rows each), and a block of 64 k lies `at(block)` bytes behind the first. K,
    `k_size`, takes `k_blocks` blocks of 64. Of the rows from `row` on, those before `rows` exist,
    and `n` columns. `columns(panel, offset, lanes)` returns how to store the accumulators of one
    panel, 16 columns, or of the part of it that starts at `offset`; `columns.whole` of several.
    With `groups`, a row of the output has a row of bytes for each digit in the block, and what is
    stored are totals, float32.
    `span`, where the shape has one: the blocks of K that are multiplied now, and where sums wait
    for the next span. `make_lines(block)`, where lines are made in passing: emits the making of
    those of one block of 64 k, if there is such a block and they are not made yet. `row_stride`,
    where the shape is in place: `a` points to rows as they lie, so many bytes apart, all of which
    exist, and `flip` makes their bytes unsigned. `fetch`: what the next item will read. `behind`:
    the address behind all panels; `scratch`: what `begin_rows` was given. `turned`: 1 for every
    second step of a row of them, which may take K from its end, else 0.
    """

    a: Value
    b: Value
    row: Value
    rows: Value
    n: Value
    panel: Value
    k_size: Value
    k_blocks: Value
    block_rows: Value
    block_bytes: Value
    panel_bytes: Value
    columns: Output
    at: Callable[[Value], Value]
    turned: Value
    groups: Groups | None = None
    span: Span | None = None
    make_lines: Callable[[Value], None] | None = None
    row_stride: Value | None = None
    flip: int = 0
    behind: Value | None = None
    fetch: Fetch | None = None
    scratch: Value | None = None

    def fetch_share(self, k: Builder, block: Value) -> None:
        """Emit the fetching of what a block of 64 k has part in."""
        if self.fetch:
            place, count = self.fetch
            for line in k.range(0, count):
                prefetch_far(place + (block * count + line) * LINE)


class Fetch(NamedTuple):
    """What is fetched into the second-level cache in the course of a step: from `place` on, some
    lines for each 64 k."""

    place: Value
    lines: Value


class Span(NamedTuple):
    """Part of K: blocks of 64 from `first` to before `last`; `sums`: memory for each panel of the
    step, s32 [rows, 16], where sums over what came before are, and are left. rows: those of the
    shape, or 16 for each block."""

    first: Value
    last: Value
    sums: Value


@dataclass(frozen=True)
class Shape:
    """How a micro-kernel cuts the output. It keys the code.

    `rows` is the rows of a block as far as the code fixes them (0: told at run time), `row_blocks`
    the blocks of rows in a step, `panels` the panels in a step (a step of one serves what remains).
    `ragged`: not all steps of so many panels have all their columns, which matters to a kernel that
    finishes them together. `nibbles`: panels are of nibbles, "u4" or "s4", which the kernel unpacks
    on their way into the registers; "": of bytes. `ahead`: how many bytes before they are needed
    panels are fetched, 0 to leave that to the machine. `span`: of how many blocks of 64 k all steps
    of an item are multiplied before the next span; 0: of all, step by step. `stays`: all panels fit
    into the nearest cache beside the rows of a step; or, of rows in place, those of two steps do.
    `ring`: lines of rows are made in the course of their first products, where they can be, and of
    so many blocks of 64 k they are kept; 0: they are made before. `centred`: nibbles that are
    unpacked beforehand lose 8 and become signed bytes. `in_place`: rows are not packed. Tiles meet
    all panels in one step and read whole blocks of 64 k, so rows are packed nevertheless where
    memory behind them may not be other rows, as in the last steps; with pieces that step begins
    earlier if rows are missing. `lanes`: columns in a vector, where that is not the kernel's own
    number. `columns`: of the output, where rows are in place and they are one panel or meet long
    pieces. `piece`: bytes of a row in place that are multiplied at once, of each column. `summed`:
    panels are split, with lists behind them, so that so many products can be summed in 16 bits
    (shared/panel_format.py); 0: they are not. `chunk`: k that a list is for. `pitch`: rows are of a
    strip (rows/windows.py), so many bytes apart; whole blocks can be read, and whole 64 k; 0:
    packed lines are read. `panels_stay`: the panels of a step, of one span if there are such, stay
    in the nearest cache while all rows of an item pass by; otherwise those of an item stay near,
    and pass by the rows of a step. `lines`: blocks of a step are whole output lines, one each; 0:
    they are not. `quads`: K takes so many times 4, a few, without a loop; 0:
    more. `gap`: of so many rows, from row 0 on, only the first so many are rows of the output.
    """

    rows: int
    row_blocks: int
    panels: int
    ragged: bool = False
    nibbles: str = ""
    ahead: int = 0
    span: int = 0
    stays: bool = False
    ring: int = 0
    centred: bool = False
    in_place: bool = False
    lanes: int = 0
    columns: int = 0
    piece: int = 0
    summed: int = 0
    chunk: int = 0
    pitch: int = 0
    lines: int = 0
    quads: int = 0
    gap: tuple[int, int] = (0, 0)
    panels_stay: bool = False

    @property
    def step_sums(self) -> int:
        """Bytes of the sums of a step over one panel, which wait between spans. Those of two steps
        lie no page apart, or loads of one would wait for stores of the other."""
        return 4 * PANEL * max(self.rows, self.row_blocks * PANEL) + _APART

    def kept(self, block: Value) -> Value:
        """Where lines of a block of 64 k that are made in passing are kept, counted in blocks."""
        return block & (self.ring - 1)

    @property
    def column_vectors(self) -> int:
        """Vectors of b that a long piece of a row in place meets."""
        return blocks(self.columns * self.piece, self.lanes * QUAD)

    @property
    def held(self) -> int:
        """Columns for which these vectors have room."""
        return self.column_vectors * self.lanes * QUAD // self.piece


def span(query: KernelQuery, rows: int) -> int:
    """How many blocks of 64 k are multiplied before the next, in steps of so many rows; 0: all.

    Sums that wait for the next span cost some 100 cycles a step, so spans are for a K of which half
    of the second-level cache holds few of the columns, and for rows enough to share them. The rows
    of a step then fill the nearest cache.
    """
    caches = host.caches()
    columns = min(_FEWEST_COLUMNS, blocks(query.n, PANEL) * PANEL)
    long = caches["L2"] // 2 // columns < query.k
    if not long or query.weight != "s8" or query.m <= _FEW_ROWS or query.line:
        return 0
    most = max(1, caches["L1d"] // (rows * LINE))
    return blocks(query.k_blocks, blocks(query.k_blocks, most))


class MicroKernel(ABC):
    """The inner loops over K, for one instruction set.

    Of several for one set, the one of the highest `preference` that does not refuse serves.
    """

    name: str
    preference = 0
    per_cycle = 128  # multiply-adds, about, where nothing is waited for
    fetches = 0  # lines for each 64 k that it can fetch for what comes next (`Step.fetch`)
    in_part = 1  # times that: of so many it still fetches some; where there are more, none
    shortest_line = 0  # from which on it multiplies rows of strips (`KernelQuery.line`); 0: none
    leaves_gaps = False  # whether it can (`Shape.gap`)

    def __init__(self, isa: str) -> None:
        self.isa = named(isa)

    @property
    def outruns_vectors(self) -> bool:
        """Whether its products are so fast that they wait for memory where vectors do not."""
        return self.per_cycle > MicroKernel.per_cycle

    def __repr__(self) -> str:
        return f"{self.name}/{self.isa.name}"

    def refuses(self, query: KernelQuery) -> str:
        """ "" if it can serve the query, else why not: the one place that says so."""
        return "" if query.grouping is None else "it does not multiply weights with groups"

    @abstractmethod
    def shape(self, query: KernelQuery) -> tuple[Shape, int]:
        """How the output is best cut for this kernel, and how many rows of bytes a block then
        has."""

    def begin(  # noqa: B027
        self, k: Builder, shape: Shape, block_rows: Value, grouping: Grouping | None = None
    ) -> Any:
        """Emit what must happen once in each thread before the first step: as a rule, nothing.
        What it returns is given to every step."""

    def scratch_bytes(self, shape: Shape, k_blocks: int) -> int:
        """Of a thread, for what `begin_rows` makes."""
        return 0

    def begin_rows(  # noqa: B027
        self, k: Builder, shape: Shape, a: Value, block_bytes: Value, k_blocks: Value, memory: Value
    ) -> None:
        """Emit what must happen once for the packed rows of a step, before it meets any panel: as a
        rule, nothing. `memory`: `scratch_bytes` of this thread."""

    @abstractmethod
    def step(self, k: Builder, session: Any, shape: Shape, step: Step, panels: int) -> None:
        """Emit the product of `shape.row_blocks` blocks of rows with `panels` panels."""

    def drain(  # noqa: B027
        self, k: Builder, session: Any, shape: Shape, columns: Output, groups: Groups | None
    ) -> None:
        """Emit what completes the steps so far: as a rule, nothing."""

    def end(self, k: Builder) -> None:  # noqa: B027
        """Emit what must happen once in each thread after the last step: as a rule, nothing."""


M = TypeVar("M", bound=MicroKernel)
_known: Registry[MicroKernel] = Registry("micro-kernel", "lowbit.kernels.cpu.integer")


def micro_kernel(*instruction_sets: str) -> Callable[[type[M]], type[M]]:
    """Register a MicroKernel class for the instruction sets that it is written for."""

    def register(cls: type[M]) -> type[M]:
        for one in map(cls, instruction_sets):
            _known.add(repr(one), one)
        return cls

    return register


@cache
def micro_kernels() -> tuple[MicroKernel, ...]:
    """All micro-kernels, the preferred first."""
    return tuple(sorted(_known, key=lambda kernel: -kernel.preference))
