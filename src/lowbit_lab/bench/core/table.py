"""A record as text: tables with declared columns, and what stands around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lowbit.report.text import format_seconds, new_table, three_digits, unit_of
from lowbit_lab.bench.core.case import LIMIT
from lowbit_lab.bench.core.peak import PRODUCTS, Ceiling, share
from lowbit_lab.bench.core.record import Record, Row, Spread, groups, standing, thread_text


@dataclass(frozen=True)
class Column:
    """A column: its heading, and the text of a row. when: whether a table of these rows has it."""

    heading: str
    cell: Callable[[Row], str]
    right: bool = True
    when: Callable[[Sequence[Row]], bool] = lambda rows: True


def table(
    title: str, rows: Sequence[Row], columns: Sequence[Column], *, by_time: bool, bold: bool = True
) -> Table:
    """A line for each row. by_time: the fastest first. bold: whether lowbit's own are."""
    shown = [column for column in columns if column.when(rows)]
    made = new_table(title, [(column.heading, column.right) for column in shown])
    for row in sorted(rows, key=lambda row: row.seconds.median) if by_time else rows:
        style = "bold" if bold and row.ours else None
        made.add_row(*(column.cell(row) for column in shown), style=style)
    return made


def facts_table() -> Table:
    """An empty table of facts, each with its name before it."""
    made = Table(show_header=False, box=None, pad_edge=False)
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    return made


def markdown(columns: Sequence[tuple[str, bool]], lines: Sequence[Sequence[str]]) -> str:
    """A table for a page; for each column its heading, and whether it is set to the right."""
    rule = ["--:" if right else "---" for _, right in columns]
    whole = ([heading for heading, _ in columns], rule, *lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in whole)


def tables(
    rows: Sequence[Row], columns: Sequence[Column], *, by_time: bool = True
) -> Iterator[RenderableType]:
    """A table for each case, number of threads and state of the weights, with its notes."""
    for group in groups(rows, "operation", "case", "dtypes", "threads", "weights"):
        title = heading(group[0], "operation", "dtypes", "case")
        yield table(title, group, columns, by_time=by_time)
        yield from notes(group)
        yield ""


def heading(row: Row, *names: str) -> str:
    """These fields of a row, the state of its weights and the number of threads."""
    what = " ".join(filter(None, (getattr(row, name) for name in names)))
    weights = f"{row.weights} weights" if row.weights else ""
    threads = thread_text(row.threads) if row.threads is not None else ""
    return ", ".join(filter(None, (what, weights, threads)))


def ratio_columns(rows: Sequence[Row], name: Callable[[str], str] = str) -> list[Column]:
    """For each that others are compared with, the times over its time."""
    several = dict.fromkeys(reference for row in rows for reference in row.ratios)

    def column(reference: str) -> Column:
        return Column(
            f"time / {name(reference)}'s",
            lambda row: format_ratio(row.ratios[reference]) if reference in row.ratios else "",
            when=lambda rows: any(reference in row.ratios for row in rows),
        )

    return [column(reference) for reference in several]


def figure(title: str, name: str, form: str, factor: float = 1) -> Column:
    """A column of what only some suites measure, a field of `extra`, where a row has it."""

    def cell(row: Row) -> str:
        shown = name in row.extra and row.kind != LIMIT
        return form.format(factor * row.extra[name]) if shown else ""

    return Column(title, cell, when=lambda rows: any(name in row.extra for row in rows))


def limit_share(row: Row) -> str:
    """How fast bytes are moved, as a share of a limit."""
    return "" if row.limit_share is None else format_known(share(row.limit_share.median))


def peak_share(row: Row) -> str:
    """Of the operations a second; "" where nothing is computed."""
    return "" if row.kind == LIMIT else format_known(row.peak_share)


IMPLEMENTATION = Column("implementation", lambda row: row.implementation, right=False)
RUNS_ON = Column("runs on", lambda row: row.runs_on or "not told", right=False)
TIME = Column("time", lambda row: format_seconds(row.seconds.median))
SPREAD = Column(
    "p10 to p90", lambda row: format_spread(row.seconds) if row.rounds > 1 else "one run"
)
MICROSECONDS = (
    Column("µs", lambda row: f"{row.seconds.median * 1e6:,.1f}"),
    Column("±", lambda row: "" if row.noise is None else f"{row.noise:.1%}"),
)
GOPS = Column("GOP/s", lambda row: "" if row.kind == LIMIT else three_digits(row.gops))
GBS = Column("GB/s", lambda row: three_digits(row.gbs))
PEAK = Column("% of peak", peak_share)
ERROR = Column("error", lambda row: "" if row.error is None else format_error(row.error))
READ = Column(
    "% of read rate",
    limit_share,
    when=lambda rows: any(row.limit_share is not None for row in rows),
)


def page(record: Record, *parts: RenderableType) -> Group:
    """All of a record as text: the machine, the suite's own parts, and what did not run."""
    texts = (Text(part) if isinstance(part, str) else part for part in parts)
    return Group(*header(record), *texts, *left_out(record))


def header(record: Record) -> list[Text]:
    """Machine, versions, and the measured limits."""
    where = record.context
    machine = f"{where['cpu']}, {where['isa']}" if "cpu" in where else where["gpu"]
    if "cpu" in where:
        threads = " and ".join(thread_text(count) for count in where["threads"])
        machine += f", {threads} ({where['thread_runtime']})"
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    return [Text(f"{machine}; {versions}"), *map(limits_line, record.ceilings)]


def limits_line(ceiling: Ceiling) -> Text:
    """What the machine can do, as measured, and what of it was not measured well."""
    if not ceiling.threads:
        peaks = (f"{name} {three_digits(gops / 1e3)}" for name, gops in ceiling.ways.items())
        rates = f"{three_digits(ceiling.read_gbs['memory'] / 1e3)} TB/s read, TFLOP/s: "
        return Text(f"limits, as measured ({ceiling.way}): {rates}{', '.join(peaks)}")
    text = f"limits with {thread_text(ceiling.threads)}: "
    text += f"{three_digits(ceiling.gops)} GOP/s of {ceiling.dtype} ({ceiling.way})"
    if ceiling.read_gbs:
        reads = (f"{level} {three_digits(rate)}" for level, rate in ceiling.read_gbs.items())
        text += "; reading, GB/s: " + ", ".join(reads)
    if ceiling.disturbed:
        where = ", ".join(ceiling.dtype if one == PRODUCTS else one for one in ceiling.disturbed)
        text += f"; at least that much of {where}: not measured well, other work had the cores"
    return Text(text)


def notes(rows: Sequence[Row]) -> list[Text]:
    """The best peer, how well the medians are known, and what the rows have to say."""
    lines = []
    best = next((row for row in rows if row.best_peer), None)
    if best is not None and (ratio := best.speedup()) is not None:
        name = next(iter(best.ratios))
        lines.append(
            f"best peer: {best.implementation}; {name} is {format_ratio(ratio)} times as fast"
        )
    noise = [row.noise for row in rows if row.noise is not None]
    known = f"; medians known to within {max(noise):.1%}" if noise else ""
    lines.append(f"{max(row.rounds for row in rows)} rounds in random order{known}")
    few: dict[int, list[str]] = {}
    for row in rows:
        if row.noise is None:
            few.setdefault(row.rounds, []).append(row.implementation)
    for count, names in few.items():
        lines.append(f"only {count} rounds in the time limit: {', '.join(names)}")
    remarks = dict.fromkeys(f"{row.implementation}: {row.note}" for row in rows if row.note)
    return [*map(Text, lines), *(Text(note, style="dim") for note in remarks)]


def left_out(record: Record) -> list[Text]:
    """What did not run, and why; where some cases are run, with the names of the others."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for one in record.absent:
        reasons.setdefault((one.implementation, one.reason), []).append(one.case)
    cases = {row.case for row in record.rows}
    lines = []
    for (name, reason), several in reasons.items():
        where = list(dict.fromkeys(several))
        at = f" at {', '.join(where)}" if set(where) < cases and len(where) <= 6 else ""
        lines.append(Text(f"not run: {name}{at}: {reason}", style="dim"))
    return lines


def best_lines(record: Record) -> Iterator[str]:
    """The summary of `suite.best_of`, a line for each table."""
    for one in record.summary:
        yield (
            f"{one['case']}, {thread_text(one['threads'])}: {one['lowbit']} is {one['ratio']:.2f} "
            f"times as fast as the best other, {one['best_peer']}"
        )


def format_spread(spread: Spread) -> str:
    """The 10th and 90th percentile of a duration, in the unit of its median."""
    size = unit_of(spread.median)[1]
    return f"{three_digits(spread.p10 / size)} to {three_digits(spread.p90 / size)}"


def format_error(error: float) -> str:
    """An error relative to the largest element of the result."""
    return "exact" if error == 0 else f"{error:.1e}"


def format_known(part: float | None) -> str:
    """A share of a measured limit in per cent; None is one that was not measured well."""
    if part is None:
        return "not known"
    return f"{part:.1%}" if part < 0.1 else f"{part:.0%}"


def format_ratio(ratio: Spread) -> str:
    """A ratio with its spread."""
    middle, low, high = (three_digits(x) for x in (ratio.median, ratio.p10, ratio.p90))
    return f"{middle} ({low} to {high})"


# Many rows in a few figures: how lowbit stands against the best peer of each.

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


def summary_table(rows: Sequence[dict[str, Any]]) -> Table:
    """`summaries` as text, with the shares of limits that some of them know."""
    shares = [name for name in _SHARES if any(one[name] is not None for one in rows)]
    left = ("threads", "dtypes", "weights", "rows", "a peer leads")
    left = (*left, "geometric mean", "p10", "worst", "which")
    made = new_table(
        "lowbit against the best peer of each row",
        [*((heading, False) for heading in left), *((_SHARES[name], True) for name in shares)],
    )
    for one in rows:
        made.add_row(
            *(str(one[name]) for name in ("threads", "dtypes", "weights", "rows", "behind")),
            *(three_digits(one[name]) for name in ("geometric_mean", "p10", "worst")),
            f"{one['worst_case']}, {one['worst_peer']}",
            *("" if one[name] is None else format_known(one[name]) for name in shares),
            style="bold" if one["dtypes"] == _ALL else None,
        )
    return made
