"""A benchmark's record as text."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lowbit.bench.peak import PRODUCTS, Ceiling, share
from lowbit.bench.record import Context, Record, Row, Spread
from lowbit.bench.summary import ALL, Summary


def render(record: Record, *, detailed: bool = True) -> RenderableType:
    """The context, the rows, what they sum up to, and what did not run.

    `detailed` gives each shape a table with every implementation; otherwise each is one line, of
    lowbit and the best peer.
    """
    parts: list[RenderableType] = [
        _context_line(record.context),
        *map(limits_line, record.ceilings),
    ]
    parts += ["", *(_details(record.rows) if detailed else _overview(record.rows))]
    if len(record.summaries) > 1 or not detailed:
        parts += [_summaries(record.summaries), ""]
    reasons: dict[tuple[str, str], int] = {}
    for one in record.absent:
        key = one.implementation, one.reason
        reasons[key] = reasons.get(key, 0) + 1
    for (name, reason), count in reasons.items():
        times = f" ({count} rows)" if count > 1 else ""
        parts.append(Text(f"not run: {name}: {reason}{times}", style="dim"))
    return Group(*parts)


def _thread_text(threads: int) -> str:
    return f"{threads} thread{'s' if threads > 1 else ''}"


def _context_line(where: Context) -> Text:
    threads = " and ".join(_thread_text(threads) for threads in where.threads)
    versions = ", ".join(f"{name} {version}" for name, version in where.versions.items())
    return Text(f"{where.cpu}, {where.isa}, {threads} ({where.thread_runtime}); {versions}")


def limits_line(ceiling: Ceiling) -> Text:
    """What the machine can do, as measured, and what of it was not measured well."""
    text = f"limits with {_thread_text(ceiling.threads)}: "
    text += f"{three_digits(ceiling.gops)} GOP/s of int8 ({ceiling.way})"
    if ceiling.read_gbs:
        reads = (f"{level} {three_digits(rate)}" for level, rate in ceiling.read_gbs.items())
        text += "; reading, GB/s: " + ", ".join(reads)
    if ceiling.disturbed:
        where = ", ".join("int8" if one == PRODUCTS else one for one in ceiling.disturbed)
        text += f"; at least that much of {where}: not measured well, other work had the cores"
    return Text(text)


def _group(rows: Sequence[Row], *fields: str) -> list[list[Row]]:
    """The rows that agree in these fields together, in the order of their first."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(getattr(row, field) for field in fields), []).append(row)
    return list(groups.values())


def _details(rows: Sequence[Row]) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for group in _group(rows, "shape", "dtypes", "threads", "weights"):
        parts += [_table(group), *_notes(group), ""]
    return parts


def _table(rows: list[Row]) -> Table:
    first = rows[0]
    threads = _thread_text(first.threads)
    title = f"{first.operation} {first.dtypes} {first.shape}, {first.weights} weights, {threads}"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("implementation")
    table.add_column("runs on", overflow="fold")
    headings = ["time", "p10 to p90", "GOP/s", "% of peak", "error", "time / lowbit's"]
    if first.read_share is not None:
        headings.append("% of read rate")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in sorted(rows, key=lambda row: row.seconds.median):
        cells = [
            format_seconds(row.seconds.median),
            format_spread(row.seconds),
            three_digits(row.gops),
            format_known(row.peak_share),
            format_error(row.error),
            "" if row.lowbit_speedup is None else format_ratio(row.lowbit_speedup),
        ]
        if first.read_share is not None:
            cells.append(_read_share(row))
        style = "bold" if row.ours else None
        table.add_row(row.implementation, row.isa or "not told", *cells, style=style)
    return table


def _read_share(row: Row) -> str:
    return "" if row.read_share is None else format_known(share(row.read_share.median))


def _notes(rows: list[Row]) -> list[Text]:
    lines = []
    best = next((row for row in rows if row.best_peer), None)
    if best is not None and best.lowbit_speedup is not None:
        ratio = format_ratio(best.lowbit_speedup)
        lines.append(Text(f"best peer: {best.implementation}; lowbit is {ratio} times as fast"))
    noise = [row.noise for row in rows if row.noise is not None]
    known = f"medians known to within {max(noise):.1%}" if noise else ""
    lines.append(Text("; ".join(filter(None, (f"{max(r.rounds for r in rows)} rounds", known)))))
    for row in rows:
        if row.noise is None:
            lines.append(Text(f"{row.implementation}: only {row.rounds} rounds in the time limit"))
    notes = [f"{row.implementation}: {row.note}" for row in rows if row.note]
    return lines + [Text(note, style="dim") for note in notes]


def _overview(rows: Sequence[Row]) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for group in _group(rows, "threads", "dtypes", "weights"):
        parts += [_lines(group), ""]
    notes = dict.fromkeys(f"{row.implementation}: {row.note}" for row in rows if row.note)
    return [*parts, *(Text(note, style="dim") for note in notes), ""]


def _lines(rows: list[Row]) -> Table:
    """One line for each shape."""
    first = rows[0]
    title = f"{first.dtypes}, {first.weights} weights, {_thread_text(first.threads)}"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for heading in ("work", "shape"):
        table.add_column(heading, overflow="fold")
    headings = ["time", "GOP/s", "% of peak", "error"]
    reads = any(row.read_share is not None for row in rows)
    for heading in [*headings, "% of read rate"] if reads else headings:
        table.add_column(heading, justify="right")
    table.add_column("best peer")
    for heading in ("its GOP/s", "its error", "lowbit is times as fast"):
        table.add_column(heading, justify="right")
    for group in _group(rows, "shape"):
        ours = next(row for row in group if row.ours)
        best = next((row for row in group if row.best_peer), None)
        cells = [
            format_seconds(ours.seconds.median),
            three_digits(ours.gops),
            format_known(ours.peak_share),
            format_error(ours.error),
        ]
        if reads:
            cells.append(_read_share(ours))
        if best is not None and best.lowbit_speedup is not None:
            cells += [best.implementation, three_digits(best.gops), format_error(best.error)]
            cells.append(format_ratio(best.lowbit_speedup))
        table.add_row(ours.work, ours.shape, *cells)
    return table


def _summaries(summaries: Sequence[Summary]) -> Table:
    title = "lowbit against the best peer of each row"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for heading in ("threads", "dtypes", "weights", "rows", "geometric mean", "worst", "which"):
        table.add_column(heading, overflow="fold")
    for heading in ("least % of peak, sizes from 1024", "least % of read rate, M = 1"):
        table.add_column(heading, justify="right")
    for one in summaries:
        table.add_row(
            str(one.threads),
            one.dtypes,
            one.weights,
            str(one.rows),
            three_digits(one.geometric_mean),
            three_digits(one.worst),
            f"{one.worst_case}, {one.worst_peer}",
            format_share(one.large_peak_share),
            format_share(one.read_share),
            style="bold" if one.dtypes == ALL else None,
        )
    return table


def format_seconds(seconds: float) -> str:
    """A duration with its unit, about three significant digits."""
    unit, size = _unit(seconds)
    return f"{three_digits(seconds / size)} {unit}"


def format_spread(spread: Spread) -> str:
    """The 10th and 90th percentile of a duration, in the unit of its median."""
    size = _unit(spread.median)[1]
    return f"{three_digits(spread.p10 / size)} to {three_digits(spread.p90 / size)}"


def _unit(seconds: float) -> tuple[str, float]:
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
    return next((unit for unit in units if seconds >= unit[1]), units[-1])


def format_error(error: float) -> str:
    """An error relative to the largest element of the result."""
    return "exact" if error == 0 else f"{error:.1e}"


def format_share(share: float | None) -> str:
    """A share in per cent, "" for none."""
    return "" if share is None else f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def format_known(share: float | None) -> str:
    """A share of a measured limit in per cent; None is one that was not measured well."""
    return "not known" if share is None else format_share(share)


def format_ratio(ratio: Spread) -> str:
    """A ratio with its spread."""
    middle, low, high = (three_digits(x) for x in (ratio.median, ratio.p10, ratio.p90))
    return f"{middle} ({low} to {high})"


def three_digits(value: float) -> str:
    """A positive number with two or three significant digits."""
    if value >= 100:
        return f"{value:.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"
