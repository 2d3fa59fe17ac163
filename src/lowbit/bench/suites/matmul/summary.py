"""Many rows in a few figures: how lowbit stands against the best peer of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowbit.bench.core.peak import share

if TYPE_CHECKING:
    from lowbit.bench.core.record import Row

ALL = "all"
_LARGE = 1024


@dataclass(frozen=True)
class Summary:
    """Rows of one thread count, of one output dtype and state of the weights, or of all of them.

    geometric_mean and worst are of the ratios to the best peer of each row, the time of that peer
    over lowbit's (above 1: lowbit is faster). worst_case, worst_peer: where the worst is.
    large_peak_share: the least share of the int8 peak among rows of which M, N and K are 1024 or
    more; read_share: the least share of a plain read's rate among those of M = 1; None without
    such rows.
    """

    threads: int
    dtypes: str
    weights: str
    rows: int
    geometric_mean: float
    worst: float
    worst_case: str
    worst_peer: str
    large_peak_share: float | None
    read_share: float | None


def summarize(rows: Sequence[Row]) -> tuple[Summary, ...]:
    """One summary for each thread count, output and state of the weights, and where it has
    several of these, one for the whole thread count. Without peers there is none."""
    found: list[Summary] = []
    for threads in dict.fromkeys(row.threads for row in rows if row.threads):
        own = [row for row in rows if row.threads == threads]
        keys = dict.fromkeys((row.dtypes, row.weights) for row in own)
        parts = [
            _one(key, [row for row in own if (row.dtypes, row.weights) == key]) for key in keys
        ]
        if len(keys) > 1:
            parts.append(_one((ALL, ALL), own))
        found.extend(part for part in parts if part is not None)
    return tuple(found)


def _one(key: tuple[str, str], rows: Sequence[Row]) -> Summary | None:
    best = [
        (ratio.median, row)
        for row in rows
        if row.best_peer and (ratio := row.speedup()) is not None
    ]
    if not best:
        return None
    worst, where = min(best, key=lambda pair: pair[0])
    ours = [row for row in rows if row.ours]
    large = [
        row.peak_share
        for row in ours
        if row.peak_share is not None and min(row.sizes.values()) >= _LARGE
    ]
    reads = [share(row.limit_share.median) for row in ours if row.limit_share is not None]
    return Summary(
        threads=where.threads or 1,
        dtypes=key[0],
        weights=key[1],
        rows=len(best),
        geometric_mean=math.exp(sum(math.log(ratio) for ratio, _ in best) / len(best)),
        worst=worst,
        worst_case=f"{where.case} {where.dtypes} {where.weights}",
        worst_peer=where.implementation,
        large_peak_share=min(large, default=None),
        read_share=min((one for one in reads if one is not None), default=None),
    )
