"""Many rows in a few figures: how lowbit stands against the best peer of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from lowbit.bench.core.peak import share
from lowbit.bench.core.record import Row, groups, standing
from lowbit.bench.core.table import format_known, new_table, three_digits

_ALL = "all"
_LARGE = 1024
_SHARES = {
    "large_peak_share": f"least % of peak, sizes from {_LARGE}",
    "read_share": "least % of read rate, M = 1",
}


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
            yield from _summary(own, _ALL, _ALL)


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
        "worst_case": f"{where.case} {where.dtypes} {where.weights}".strip(),
        "worst_peer": where.implementation,
        "large_peak_share": min((one for one in peaks if one is not None), default=None),
        "read_share": min((one for one in reads if one is not None), default=None),
    }


def summary_table(found: Sequence[dict[str, Any]]) -> Table:
    """`summaries` as text, with the shares of limits that some of them know."""
    shares = [name for name in _SHARES if any(one[name] is not None for one in found)]
    left = ("threads", "dtypes", "weights", "rows", "a peer leads")
    left = (*left, "geometric mean", "p10", "worst", "which")
    made = new_table(
        "lowbit against the best peer of each row",
        [*((heading, False) for heading in left), *((_SHARES[name], True) for name in shares)],
    )
    for one in found:
        made.add_row(
            *(str(one[name]) for name in ("threads", "dtypes", "weights", "rows", "behind")),
            *(three_digits(one[name]) for name in ("geometric_mean", "p10", "worst")),
            f"{one['worst_case']}, {one['worst_peer']}",
            *("" if one[name] is None else format_known(one[name]) for name in shares),
            style="bold" if one["dtypes"] == _ALL else None,
        )
    return made
