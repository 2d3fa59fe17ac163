"""What a benchmark leaves behind: figures with the context that they were measured in.

As JSON a record has the layout of google/benchmark (`context` and `benchmarks`), whose tools read
it; lowbit's own fields stand beside theirs.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from lowbit.bench.peak import Ceiling
from lowbit.bench.summary import Summary, summarize


@dataclass(frozen=True)
class Context:
    """Where and how a record was measured. `cpu` is LLVM's name; caches are in bytes."""

    date: str
    cpu: str
    features: tuple[str, ...]
    num_cpus: int
    caches: Mapping[str, int]
    isa: str
    kernels: Mapping[str, str]
    threads: tuple[int, ...]
    thread_runtime: str
    versions: Mapping[str, str]
    commit: str | None
    seed: int
    distribution: str
    noise_limit: float
    time_limit_seconds: float


@dataclass(frozen=True)
class Spread:
    """A median with its 10th and 90th percentile."""

    p10: float
    median: float
    p90: float


@dataclass(frozen=True)
class Row:
    """One implementation on one problem with weights `warm` (in cache) or `cold` (in memory).

    work says what the product is part of, "" if that was not said.
    seconds and cpu_seconds are for one call. noise is half the 95 % interval of the median,
    relative, None from too few rounds; `rounds` samples of `calls` calls each. error is the
    largest difference from the ideal result as a share of its largest element. lowbit_speedup
    is this implementation's time over lowbit's, round by round (above 1: lowbit is faster),
    None for lowbit itself. peak_share is gops over the int8 peak of lowbit's instruction set with
    as many threads, as measured in this run, None where that was not measured well. read_share,
    for M = 1, is the time of a plain read of N·K bytes, warm or cold like the weights, over this
    implementation's, round by round.
    """

    operation: str
    work: str
    shape: str
    dtypes: str
    threads: int
    implementation: str
    ours: bool
    weights: str
    library: str
    version: str
    isa: str | None
    note: str
    seconds: Spread
    cpu_seconds: float
    noise: float | None
    rounds: int
    calls: int
    operations: int
    bytes_moved: int
    error: float
    lowbit_speedup: Spread | None
    best_peer: bool
    peak_share: float | None = None
    read_share: Spread | None = None

    @property
    def gops(self) -> float:
        """Billions of operations a second, at the median."""
        return self.operations / self.seconds.median / 1e9

    @property
    def name(self) -> str:
        """The benchmark's name, unique within a record."""
        threads = f"threads:{self.threads}"
        parts = (self.operation, self.dtypes, self.shape, self.implementation, self.weights)
        return "/".join((*parts, threads))


COLD = "cold weights"


@dataclass(frozen=True)
class Absent:
    """An implementation that was not run on a problem, and why. Where it is `COLD`, nobody was
    timed with cold weights."""

    shape: str
    dtypes: str
    implementation: str
    reason: str


@dataclass(frozen=True)
class Record:
    """All rows of one run, and the limits of the machine as measured in it."""

    context: Context
    rows: tuple[Row, ...]
    absent: tuple[Absent, ...] = ()
    ceilings: tuple[Ceiling, ...] = ()

    @cached_property
    def summaries(self) -> tuple[Summary, ...]:
        """lowbit against the best peer of each row, brought together."""
        return summarize(self.rows)

    def to_json(self) -> str:
        """The record as JSON text in google/benchmark's layout, times in nanoseconds."""
        return json.dumps(
            {
                "context": asdict(self.context),
                "ceilings": [asdict(one) for one in self.ceilings],
                "benchmarks": [_benchmark(row, index) for index, row in enumerate(self.rows)],
                "absent": [asdict(one) for one in self.absent],
                "summaries": [asdict(one) for one in self.summaries],
            },
            indent=2,
            allow_nan=False,
        )

    def to_csv(self) -> str:
        """The rows as CSV text with a line of headings; times in seconds, nothing where a row has
        no such figure."""
        lines = [_flat(row) for row in self.rows]
        text = io.StringIO()
        writer = csv.DictWriter(text, list(lines[0]) if lines else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        return text.getvalue()


def _flat(row: Row) -> dict[str, Any]:
    """The fields of a row, a spread as three."""
    fields: dict[str, Any] = {}
    for name, value in {**asdict(row), "gops": row.gops}.items():
        if name in ("seconds", "lowbit_speedup", "read_share"):
            for part in ("p10", "median", "p90"):
                fields[f"{name}_{part}"] = None if value is None else value[part]
        else:
            fields[name] = value
    return fields


def _benchmark(row: Row, index: int) -> dict[str, Any]:
    """A row as google/benchmark writes an aggregate, then the fields of lowbit's own."""
    calls = row.rounds * row.calls
    amounts = {"items": row.operations, "bytes": row.bytes_moved}
    return {
        **aggregate(row.name, row, calls, index, row.cpu_seconds, **amounts),
        "gops": row.gops,
    }


def aggregate(
    name: str,
    row: Any,
    calls: int,
    index: int | None = None,
    cpu_seconds: float | None = None,
    **amounts: int,
) -> dict[str, Any]:
    """A row with `seconds` and `rounds` as google/benchmark writes an aggregate, then the fields of
    lowbit's own. `amounts` are of one call, and become rates."""
    median = row.seconds.median
    theirs: dict[str, Any] = {
        "name": f"{name}_median",
        "family_index": index,
        "run_name": name,
        "run_type": "aggregate",
        "aggregate_name": "median",
        "repetitions": row.rounds,
        "iterations": calls,
        "real_time": median * 1e9,
        "cpu_time": None if cpu_seconds is None else cpu_seconds * 1e9,
        "time_unit": "ns",
        **{f"{what}_per_second": amount / median for what, amount in amounts.items()},
    }
    return {key: value for key, value in theirs.items() if value is not None} | asdict(row)
