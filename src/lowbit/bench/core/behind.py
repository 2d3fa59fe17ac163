"""The page of every row in which a peer is ahead of lowbit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from lowbit.bench.core import table
from lowbit.bench.core.record import Record, Row, Spread, groups, standing

_TOP = """# Where a peer is ahead

Every product in which another library is faster than lowbit, on each machine that was measured.
`lowbit bench behind RECORD.json ... --page docs/behind.md` writes this page from records of
`lowbit bench`; [benchmark.md](benchmark.md) says how they are measured and what a peer leaves out.
Ratios are the time of the best peer over lowbit's: below 1 the peer is ahead. In brackets stand
the 10th and 90th percentile over the rounds.
"""
_FIGURES = ("rows", "geometric mean", "tenth percentile", "worst", "rows behind")
_HEAD = [(name, name in _FIGURES) for name in ("which", *_FIGURES)]
_TIMES = ("lowbit's time", "the peer's time", "times as fast")
_BEHIND = [(name, name in _TIMES) for name in ("case", _TIMES[0], "best peer", *_TIMES[1:])]


def page(records: Mapping[str, Record]) -> str:
    """The page in Markdown: for each record, by the link to it, the figures over all of its rows,
    then those behind, the worst first."""
    return "\n".join([_TOP, *(part for link in records for part in _section(link, records[link]))])


def _section(link: str, record: Record) -> Iterator[str]:
    where = record.context
    title = " ".join(filter(None, (record.suite, where.get("set"))))
    yield f"## {where.get('cpu') or where['gpu']}: {title}\n"
    measured = f"{where['date']}, seed {where['seed']}, commit {where['commit'] or 'not known'}"
    yield f"[Record]({link}) of {measured}: {table.header(record)[0]}.\n"
    head, parts, time = [], [], table.TIME.cell
    several = map(_paired, groups(record.rows, "operation", "dtypes", "weights", "threads"))
    for pairs in chain.from_iterable(several):
        place = table.heading(pairs[0][1], "implementation", "operation", "dtypes")
        figures, _ = standing([(ratio.median, own) for ratio, own, _ in pairs])
        told = (table.three_digits(x) if isinstance(x, float) else str(x) for x in figures.values())
        head.append([place, *told])
        lines = [
            [own.case, time(own), peer.implementation, time(peer), table.format_ratio(ratio)]
            for ratio, own, peer in pairs
            if ratio.median < 1
        ]
        if lines:
            parts += [f"### {place}\n", table.markdown(_BEHIND, lines)]
    yield table.markdown(_HEAD, head)
    yield from parts


def _paired(rows: Sequence[Row]) -> list[list[tuple[Spread, Row, Row]]]:
    """For each of lowbit's own, how many times as fast it is as the best peer, and both rows; the
    slowest first."""
    best = {row.case: row for row in rows if row.best_peer}
    found: dict[str, list[tuple[Spread, Row, Row]]] = {}
    for own in rows:
        name, peer = own.implementation, best.get(own.case)
        if own.ours and peer is not None and name in peer.ratios:
            found.setdefault(name, []).append((peer.ratios[name], own, peer))
    return [sorted(pairs, key=lambda pair: pair[0].median) for pairs in found.values()]
