"""Products of two matrices, of 8-bit integers or quantized on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.console import RenderableType
from rich.text import Text

from lowbit_lab.bench.core import table
from lowbit_lab.bench.core.case import Implementation
from lowbit_lab.bench.core.clock import Limits
from lowbit_lab.bench.core.cpu import PlainRead
from lowbit_lab.bench.core.record import Record, Row, groups
from lowbit_lab.bench.core.suite import Suite, option, suite
from lowbit_lab.bench.core.table import Column, summaries, summary_table
from lowbit_lab.bench.suites.matmul.problem import (
    DISTRIBUTION,
    RANDOM,
    SHAPES,
    MatmulCase,
    MatmulProblem,
    product,
    works_of,
)

_INTEGERS = ("u8:s8:s32",)
_LAYERS = ("u8:s8:f32", "u8:s8:u8")


@suite
@dataclass(frozen=True)
class Matmul(Suite):
    """Time the product of two matrices: of the shapes given, of a set of shapes, or of both.

    All implementations get the same data and take turns in random order. Each is compared with
    the exact result first; the table shows the largest error, as a share of the largest element.
    """

    shapes: tuple[str, ...] = option((), "Shapes MxK:KxN.", argument=True)
    suite: str | None = option(None, f"A set of shapes: {', '.join(SHAPES)}.", shown="none")
    count: int = option(100, "How many shapes the set random draws, by the seed.")
    dtype: tuple[str, ...] = option(
        (),
        "Left, right and output: u8:s8:s32, u8:s8:f32, f32:s8:f32, ...; may be repeated.",
        shown="u8:s8:s32; for a set u8:s8:f32 and u8:s8:u8",
    )

    name: ClassVar[str] = "matmul"
    example: ClassVar[str] = "1x4096:4096x4096 256x512:512x256 --dtype u8:s8:s32 --threads 1"
    distribution: ClassVar[str] = DISTRIBUTION
    colds: ClassVar[bool] = True

    @property
    def cold_by_default(self) -> bool:
        return self.suite not in (None, RANDOM)

    @property
    def limits(self) -> Limits:
        # A single shape can have more time than a whole set.
        return Limits(seconds=4.0 if self.suite is None else 0.6)

    def cases(self, seed: int = 0) -> Sequence[MatmulCase]:
        if not self.shapes and self.suite is None:
            raise ValueError("give shapes MxK:KxN, or --suite NAME")
        wanted = dict.fromkeys(self.shapes, "")
        if self.suite is not None:
            wanted |= {work.shape: work.name for work in works_of(self.suite, seed, self.count)}
        dtypes = self.dtype or (_INTEGERS if self.suite is None else _LAYERS)
        return [product(shape, d, work) for d in dtypes for shape, work in wanted.items()]

    def settings(self) -> Mapping[str, Any]:
        return {} if self.suite is None else {"set": self.suite}

    def implementations(self) -> Sequence[Implementation]:
        return (*super().implementations(), PlainRead())

    def taking_part(
        self, problem: MatmulProblem, chosen: Sequence[Implementation]
    ) -> list[Implementation]:
        # More rows do more with the weights than to read them.
        limited = problem.case.sizes["M"] == 1
        return [one for one in chosen if limited or not isinstance(one, PlainRead)]

    def make(self, case: MatmulCase, seed: int) -> MatmulProblem:
        return MatmulProblem.make(case, seed)

    def summary(self, rows: Sequence[Row]) -> Sequence[dict[str, Any]]:
        return list(summaries(rows))

    def columns(self, rows: Sequence[Row]) -> Sequence[Column]:
        left = (table.IMPLEMENTATION, table.RUNS_ON, table.TIME, table.SPREAD)
        right = (table.GOPS, table.PEAK, table.ERROR)
        return (*left, *right, *table.ratio_columns(rows), table.READ)

    def render(self, record: Record) -> RenderableType:
        whole = self.suite is not None
        columns = self.columns(record.rows)
        parts = _overview(record.rows) if whole else table.tables(record.rows, columns)
        summed = [summary_table(record.summary), ""] if len(record.summary) > 1 or whole else []
        return table.page(record, "", *parts, *summed)


def _of(best: Mapping[str, Row], heading: str, cell: Callable[[Row], str], right: bool) -> Column:
    """A column that tells something of the best peer in lowbit's row."""
    return Column(heading, lambda own: cell(best[own.case]) if own.case in best else "", right)


def _speedup(row: Row) -> str:
    ratio = row.speedup()
    return "" if ratio is None else table.format_ratio(ratio)


def _overview(rows: Sequence[Row]) -> list[RenderableType]:
    """A table for all shapes of the same threads, dtypes and weights: a line of lowbit's beside
    the best peer's."""
    parts: list[RenderableType] = []
    for group in groups(rows, "threads", "dtypes", "weights"):
        title = table.heading(group[0], "dtypes")
        best = {row.case: row for row in group if row.best_peer}
        columns = (
            Column("work", lambda row: row.work, False),
            Column("shape", lambda row: row.case, False),
            *(table.TIME, table.GOPS, table.PEAK, table.ERROR, table.READ),
            _of(best, "best peer", lambda row: row.implementation, False),
            _of(best, "its GOP/s", table.GOPS.cell, True),
            _of(best, "its error", table.ERROR.cell, True),
            _of(best, "lowbit is times as fast", _speedup, True),
        )
        own = [row for row in group if row.ours]
        parts += [table.table(title, own, columns, by_time=False, bold=False), ""]
    notes = dict.fromkeys(f"{row.implementation}: {row.note}" for row in rows if row.note)
    return [*parts, *(Text(note, style="dim") for note in notes), ""]
