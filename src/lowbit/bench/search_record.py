"""What a benchmark of search leaves behind."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from lowbit.bench.record import Context, Spread, aggregate


@dataclass(frozen=True)
class SearchRow:
    """One implementation with one number of queries together.

    seconds are for one call with all of these queries. noise is half the 95 % interval of the
    median, relative, None from too few rounds; `rounds` samples of `calls` calls each. recall is
    the share of the k nearest by exact float32 scores that it found. nbytes: what the index holds.
    build_seconds: to add all vectors. lowbit_speedup is this implementation's time over that of
    lowbit without rescoring, round by round (above 1: lowbit is faster), None for that one itself.
    """

    implementation: str
    ours: bool
    library: str
    version: str
    batch: int
    seconds: Spread
    noise: float | None
    rounds: int
    calls: int
    recall: float
    nbytes: int
    build_seconds: float
    lowbit_speedup: Spread | None

    @property
    def name(self) -> str:
        """Unique within a record."""
        return f"search/{self.implementation}/batch:{self.batch}"


@dataclass(frozen=True)
class SearchRecord:
    """All rows of one run; `absent` says of implementations that were not run why."""

    context: Context
    vectors: int
    dim: int
    bits: int
    k: int
    metric: str
    rows: tuple[SearchRow, ...]
    absent: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> str:
        """The record as JSON text in google/benchmark's layout, times in nanoseconds."""
        problem = {name: getattr(self, name) for name in ("vectors", "dim", "bits", "k", "metric")}
        return json.dumps(
            {
                "context": {**asdict(self.context), **problem},
                "benchmarks": [_benchmark(row, index) for index, row in enumerate(self.rows)],
                "absent": [{"implementation": n, "reason": why} for n, why in self.absent],
            },
            indent=2,
            allow_nan=False,
        )


def _benchmark(row: SearchRow, index: int) -> dict[str, Any]:
    """A row as google/benchmark writes an aggregate, then the fields of lowbit's own."""
    return aggregate(row.name, row, row.rounds * row.calls, index, items=row.batch)
