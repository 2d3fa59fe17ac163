"""Many rows in a few figures: how lowbit stands against the best peer of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lowbit.bench.core.peak import share
from lowbit.bench.core.record import Row, groups, standing

ALL = "all"
_LARGE = 1024


def summaries(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """One for each thread count, output and state of the weights, and where it has several of
    these, one for the whole thread count. Without peers there is none.

    The figures of `standing` are of the ratios to the best peer of each row, the time of that peer
    over lowbit's (above 1: lowbit is faster). worst_case, worst_peer: where the worst is.
    large_peak_share: the least share of the int8 peak among rows of which M, N and K are 1024 or
    more; read_share: the least share of a plain read's rate among those of M = 1; None without
    such rows.
    """
    for own in groups(rows, "threads"):
        parts = groups(own, "dtypes", "weights")
        for part in parts:
            yield from _summary(part, part[0].dtypes, part[0].weights)
        if len(parts) > 1:
            yield from _summary(own, ALL, ALL)


def _summary(rows: Sequence[Row], dtypes: str, weights: str) -> Iterator[dict[str, Any]]:
    best = [
        (ratio.median, row)
        for row in rows
        if row.best_peer and (ratio := row.speedup()) is not None
    ]
    if not best:
        return
    figures, where = standing(best)
    ours = [row for row in rows if row.ours]
    peaks = (row.peak_share for row in ours if min(row.sizes.values()) >= _LARGE)
    reads = (share(row.limit_share.median) for row in ours if row.limit_share is not None)
    yield {
        "threads": where.threads,
        "dtypes": dtypes,
        "weights": weights,
        **figures,
        "worst_case": f"{where.case} {where.dtypes} {where.weights}",
        "worst_peer": where.implementation,
        "large_peak_share": min((one for one in peaks if one is not None), default=None),
        "read_share": min((one for one in reads if one is not None), default=None),
    }
