"""What a run leaves behind, in google/benchmark's layout, and as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from lowbit.bench.record import Spread, aggregate


@dataclass(frozen=True)
class Row:
    """One implementation of one case.

    seconds: of a call, as the GPU saw it, with cold caches. noise: half the 95 % interval of the
    median, relative. bytes, operations: the least that the case needs. error: the largest
    difference from the reference as a share of its largest element. copy_share: the case's bytes a
    second over those of a copy in the same rounds, None where memory is not the limit.
    lowbit_speedup: this one's median over lowbit's.
    """

    operation: str
    case: str
    sizes: Mapping[str, int]
    dtype: str
    implementation: str
    ours: bool
    seconds: Spread
    noise: float | None
    rounds: int
    bytes: int
    operations: int
    error: float
    copy_share: float | None
    lowbit_speedup: float

    @property
    def gigabytes(self) -> float:
        """Billions of bytes a second, at the median."""
        return self.bytes / self.seconds.median / 1e9

    @property
    def teraflops(self) -> float:
        """Trillions of operations a second, at the median."""
        return self.operations / self.seconds.median / 1e12


@dataclass(frozen=True)
class Absent:
    """An implementation that did not run a case, and why."""

    operation: str
    case: str
    implementation: str
    reason: str


@dataclass(frozen=True)
class OpsRecord:
    """All rows of a run; context: where and how it was measured."""

    context: Mapping[str, Any]
    rows: tuple[Row, ...]
    absent: tuple[Absent, ...]

    def to_json(self) -> str:
        """JSON text; times in nanoseconds where google/benchmark has its own fields."""
        return json.dumps(
            {
                "context": self.context,
                "benchmarks": [_benchmark(row) for row in self.rows],
                "absent": [asdict(one) for one in self.absent],
            },
            indent=2,
            allow_nan=False,
        )

    def to_table(self) -> Table:
        """For a terminal."""
        table = Table(title=f"{self.context['gpu']}, torch {self.context['versions']['torch']}")
        for name in ("operation", "case", "implementation"):
            table.add_column(name, no_wrap=True)
        for name in ("µs", "±", "GB/s", "of copy", "TFLOP/s", "lowbit ×", "error"):
            table.add_column(name, justify="right", no_wrap=True)
        last = None
        for row in self.rows:
            if (row.operation, row.case) != last:
                table.add_section()
            first = (row.operation, row.case) if (row.operation, row.case) != last else ("", "")
            last = (row.operation, row.case)
            table.add_row(*first, *_cells(row), style="bold" if row.ours else None)
        return table


def _cells(row: Row) -> list[str]:
    return [
        row.implementation,
        f"{row.seconds.median * 1e6:,.1f}",
        "" if row.noise is None else f"{row.noise:.1%}",
        f"{row.gigabytes:,.0f}",
        "" if row.copy_share is None else f"{row.copy_share:.2f}",
        f"{row.teraflops:,.1f}",
        "" if row.ours else f"{row.lowbit_speedup:.2f}",
        f"{row.error:.1e}",
    ]


def _benchmark(row: Row) -> dict[str, Any]:
    name = f"{row.operation}/{row.case}/{row.implementation}".replace(" ", ",")
    amounts = {"bytes": row.bytes, "items": row.operations}
    return aggregate(name, row, row.rounds, cpu_seconds=row.seconds.median, **amounts)
