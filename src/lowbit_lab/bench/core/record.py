"""What a benchmark leaves behind: figures with the context that they were measured in.

As JSON a record has the layout of google/benchmark (`context` and `benchmarks`), whose tools read
it; lowbit's own fields stand beside theirs.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from lowbit_lab.bench.core.case import OURS
from lowbit_lab.bench.core.clock import quantiles
from lowbit_lab.bench.core.peak import Ceiling


class Spread(msgspec.Struct, frozen=True):
    """A median with its 10th and 90th percentile."""

    p10: float
    median: float
    p90: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One implementation on one case with some threads.

    work: what the case is part of, "" if that was not said. kind: one of `core.case`. weights:
    "warm" (in cache) or "cold" (in memory), "" where a case has none. runs_on: instruction set or
    kernel, None if the library does not tell. seconds and cpu_seconds are for one call. noise is
    half the 95 % interval of the median, relative, None from too few rounds; `rounds` samples of
    `calls` calls each. operations, bytes: the least that the case needs. weight_bytes: what the
    call reads of the weights. error: the largest difference from the ideal result as a share of its
    largest element, None where nothing is computed. ratios: by what others are compared with, this
    one's time over that one's, round by round (above 1: that one is faster). best_peer: whether it
    is the fastest of the other libraries. peak_share: its operations a second over the int8 peak of
    lowbit's instruction set with as many threads, as measured in this run, None where that was not
    measured well. limit_share: its bytes a second over those of a plain read of the weights, or of
    a copy, in the same rounds; None where memory is no limit. extra: what only its suite has.
    """

    operation: str
    case: str
    dtypes: str = ""
    work: str = ""
    sizes: dict[str, int] = {}
    threads: int | None = None
    weights: str = ""
    implementation: str
    kind: str
    library: str = ""
    version: str = ""
    runs_on: str | None = None
    note: str = ""
    seconds: Spread
    cpu_seconds: float | None = None
    noise: float | None
    rounds: int
    calls: int
    operations: int
    bytes: int
    weight_bytes: int = 0
    error: float | None
    ratios: dict[str, Spread] = {}
    best_peer: bool = False
    peak_share: float | None = None
    limit_share: Spread | None = None
    extra: dict[str, Any] = {}

    @property
    def ours(self) -> bool:
        """Whether it is lowbit's own."""
        return self.kind == OURS

    @property
    def gops(self) -> float:
        """Billions of operations a second, at the median."""
        return self.operations / self.seconds.median / 1e9

    @property
    def gbs(self) -> float:
        """10^9 bytes a second, at the median: of the weights where there are any."""
        return (self.weight_bytes or self.bytes) / self.seconds.median / 1e9

    @property
    def name(self) -> str:
        """The benchmark's name, unique within a record."""
        threads = "" if self.threads is None else f"threads:{self.threads}"
        parts = (self.operation, self.dtypes, self.case, self.implementation, self.weights, threads)
        return "/".join(filter(None, parts))

    def speedup(self) -> Spread | None:
        """The time over that of the first of lowbit's own; None for that one itself."""
        return next(iter(self.ratios.values()), None) if not self.ours else None


COLD = "cold weights"


class Absent(msgspec.Struct, frozen=True):
    """An implementation that was not run on a case, and why. Where it is `COLD`, nobody was timed
    with cold weights."""

    case: str
    dtypes: str
    implementation: str
    reason: str


class Record(msgspec.Struct, frozen=True):
    """All rows of one run, and the limits of the machine as measured in it. summary: what the suite
    makes of the rows."""

    suite: str
    context: dict[str, Any]
    rows: tuple[Row, ...]
    absent: tuple[Absent, ...] = ()
    ceilings: tuple[Ceiling, ...] = ()
    summary: tuple[dict[str, Any], ...] = ()

    def to_json(self) -> str:
        """The record as JSON text in google/benchmark's layout, times in nanoseconds."""
        plain = msgspec.to_builtins(self)
        rows = plain.pop("rows")
        pairs = enumerate(zip(self.rows, rows, strict=True))
        plain["benchmarks"] = [_benchmark(row, fields, index) for index, (row, fields) in pairs]
        return msgspec.json.format(msgspec.json.encode(plain), indent=2).decode()

    @classmethod
    def from_json(cls, text: str) -> Record:
        """What `to_json` made. msgspec.ValidationError, a ValueError, for anything else."""
        plain = msgspec.json.decode(text, type=dict[str, Any])
        return msgspec.convert({**plain, "rows": plain.get("benchmarks")}, cls)

    def to_csv(self) -> str:
        """The rows as CSV text with a line of headings; times in seconds, nothing where a row has
        no such figure."""
        lines = [_flat(row) for row in self.rows]
        names = dict.fromkeys(name for line in lines for name in line)
        text = io.StringIO()
        writer = csv.DictWriter(text, list(names), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        return text.getvalue()


def _flat(row: Row) -> dict[str, Any]:
    """The fields of a row, a spread as three, a ratio by what it is to."""
    plain = {**msgspec.structs.asdict(row), "gops": row.gops}
    for inner in ("sizes", "extra", "ratios"):
        prefix = "time_over_" if inner == "ratios" else ""
        plain |= {f"{prefix}{name}": value for name, value in plain.pop(inner).items()}
    fields: dict[str, Any] = {}
    for name, value in plain.items():
        if isinstance(value, Spread):
            fields |= {f"{name}_{part}": one for part, one in msgspec.structs.asdict(value).items()}
        else:
            fields[name] = value
    return fields


def _benchmark(row: Row, fields: dict[str, Any], index: int) -> dict[str, Any]:
    """A row as google/benchmark writes an aggregate, then the fields of lowbit's own."""
    median = row.seconds.median
    theirs = {
        "name": f"{row.name}_median",
        "family_index": index,
        "run_name": row.name,
        "run_type": "aggregate",
        "aggregate_name": "median",
        "repetitions": row.rounds,
        "iterations": row.rounds * row.calls,
        "real_time": median * 1e9,
        "cpu_time": None if row.cpu_seconds is None else row.cpu_seconds * 1e9,
        "time_unit": "ns",
        "items_per_second": row.operations / median,
        "bytes_per_second": (row.weight_bytes or row.bytes) / median,
    }
    known = {name: value for name, value in theirs.items() if value is not None}
    return {**known, **fields, "gops": row.gops}


def groups(rows: Sequence[Row], *names: str) -> list[list[Row]]:
    """The rows that agree in these fields together, in the order of their first."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(getattr(row, name) for name in names), []).append(row)
    return list(found.values())


def standing(pairs: Sequence[tuple[float, Row]]) -> tuple[dict[str, Any], Row]:
    """Ratios in a few figures: how many `rows`, `geometric_mean`, tenth percentile `p10`, `worst`
    and how many are `behind`, below 1; and whose the worst is."""
    worst, where = min(pairs, key=lambda pair: pair[0])
    ratios = np.array([ratio for ratio, _ in pairs])
    mean, behind = float(np.exp(np.log(ratios).mean())), int((ratios < 1).sum())
    figures = {"rows": len(pairs), "geometric_mean": mean, "p10": quantiles(ratios)[0]}
    return figures | {"worst": worst, "behind": behind}, where


def thread_text(threads: int | None) -> str:
    """A number of threads for people."""
    return f"{threads} thread{'s' if threads != 1 else ''}"
