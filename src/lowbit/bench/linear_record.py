"""What a benchmark of linear layers with 4-bit weights leaves behind."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from lowbit.bench.linear_problem import ACTIVATIONS
from lowbit.bench.peak import Ceiling
from lowbit.bench.problem import parse_shape
from lowbit.bench.record import Absent, Context, Spread, aggregate

MANY_ROWS = 128
"""From here on arithmetic decides, not the reading of weights."""


@dataclass(frozen=True)
class LinearRow:
    """One implementation on one shape with weights `warm` (in cache) or `cold` (in memory).

    activations: a key of `ACTIVATIONS` for lowbit's own rows, "" for the others. seconds and
    cpu_seconds are for one call. noise is half the 95 % interval of the median, relative, None
    from too few rounds; `rounds` samples of `calls` calls each. weight_bytes: what the call reads
    of the weight, scales included. error: the largest difference from float64 on the dequantized
    weight, as a share of its largest element; None for a plain read. peak_share: the operations
    a second over the int8 peak; None for a plain read, or where the peak was not measured well.
    read_share: how fast weight_bytes are read
    compared with a plain read of as many bytes as lowbit's packed weight, round by round; None
    for that one itself. ratios: by activations, this implementation's time over that of lowbit's
    row, round by round (above 1: lowbit is faster).
    """

    implementation: str
    activations: str
    shape: str
    threads: int
    weights: str
    library: str
    version: str
    note: str
    seconds: Spread
    cpu_seconds: float
    noise: float | None
    rounds: int
    calls: int
    operations: int
    weight_bytes: int
    error: float | None
    peak_share: float | None
    read_share: Spread | None
    ratios: Mapping[str, Spread]

    @property
    def ours(self) -> bool:
        """Whether others are compared with it."""
        return bool(self.activations)

    @property
    def gops(self) -> float:
        """Billions of operations a second, at the median."""
        return self.operations / self.seconds.median / 1e9

    @property
    def gbs(self) -> float:
        """10^9 bytes of the weight a second, at the median."""
        return self.weight_bytes / self.seconds.median / 1e9

    @property
    def name(self) -> str:
        """Unique within a record."""
        where = f"{self.shape}/{self.implementation}/{self.weights}/threads:{self.threads}"
        return f"linear/{where}"


@dataclass(frozen=True)
class LinearMean:
    """One of lowbit's rows against one other, over the shapes of one range of M.

    sizes: "M = 1", "M from 2 to 127" or "M from 128". geometric_mean and worst are of the ratios
    (above 1: lowbit is faster), worst_shape where the worst is.
    """

    threads: int
    weights: str
    sizes: str
    activations: str
    implementation: str
    rows: int
    geometric_mean: float
    worst: float
    worst_shape: str


def means(rows: Sequence[LinearRow]) -> Iterator[LinearMean]:
    """For each number of threads, state of the weights and range of M, each of lowbit's rows
    against everything that is compared with it and multiplies."""
    groups: dict[tuple[int, str, str, str, str], list[LinearRow]] = {}
    for row in rows:
        if row.ours or row.error is None:
            continue
        for activations in row.ratios:
            key = row.threads, row.weights, _sizes(row), activations, row.implementation
            groups.setdefault(key, []).append(row)
    order = list(ACTIVATIONS)

    def place(key: tuple[int, str, str, str, str]) -> tuple[int, bool, int, int]:
        threads, weights, _, activations, _ = key
        rows_of_x = parse_shape(groups[key][0].shape)["M"]
        return threads, weights == "cold", rows_of_x, order.index(activations)

    for key in sorted(groups, key=place):
        group, activations = groups[key], key[3]
        ratios = [row.ratios[activations].median for row in group]
        worst = min(range(len(group)), key=lambda index: ratios[index])
        mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
        yield LinearMean(*key, len(group), mean, ratios[worst], group[worst].shape)


def _sizes(row: LinearRow) -> str:
    m = parse_shape(row.shape)["M"]
    if m >= MANY_ROWS:
        return f"M from {MANY_ROWS}"
    return "M = 1" if m == 1 else f"M from 2 to {MANY_ROWS - 1}"


@dataclass(frozen=True)
class LinearRecord:
    """All rows of one run, and the limits of the machine as measured in it."""

    context: Context
    group_size: int
    zero_points: bool
    rows: tuple[LinearRow, ...]
    absent: tuple[Absent, ...]
    ceilings: tuple[Ceiling, ...]

    @cached_property
    def means(self) -> tuple[LinearMean, ...]:
        """The ratios brought together."""
        return tuple(means(self.rows))

    def to_json(self) -> str:
        """The record as JSON text in google/benchmark's layout, times in nanoseconds."""
        weights = {"group_size": self.group_size, "zero_points": self.zero_points}
        return json.dumps(
            {
                "context": {**asdict(self.context), **weights},
                "ceilings": [asdict(one) for one in self.ceilings],
                "benchmarks": [_benchmark(row, index) for index, row in enumerate(self.rows)],
                "absent": [asdict(one) for one in self.absent],
                "means": [asdict(one) for one in self.means],
            },
            indent=2,
            allow_nan=False,
        )


def _benchmark(row: LinearRow, index: int) -> dict[str, Any]:
    """A row as google/benchmark writes an aggregate, then the fields of lowbit's own."""
    calls = row.rounds * row.calls
    amounts = {"items": row.operations, "bytes": row.weight_bytes}
    return {
        **aggregate(row.name, row, calls, index, row.cpu_seconds, **amounts),
        "gops": row.gops,
        "gbs": row.gbs,
    }
