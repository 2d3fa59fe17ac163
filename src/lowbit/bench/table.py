"""A benchmark's record as text."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lowbit.bench.record import Context, Record, Row, Spread


def render(record: Record) -> RenderableType:
    """One table for each shape and state of the weights, between the context and the rest."""
    keys = dict.fromkeys((row.shape, row.dtypes, row.weights) for row in record.rows)
    parts: list[RenderableType] = [_context_line(record.context), ""]
    for key in keys:
        rows = [row for row in record.rows if (row.shape, row.dtypes, row.weights) == key]
        parts += [_table(rows), *_summary(rows), ""]
    reasons = dict.fromkeys((one.implementation, one.reason) for one in record.absent)
    parts += [Text(f"not run: {name}: {reason}", style="dim") for name, reason in reasons]
    return Group(*parts)


def _context_line(where: Context) -> Text:
    threads = f"{where.threads} thread{'s' if where.threads > 1 else ''}"
    versions = ", ".join(f"{name} {version}" for name, version in where.versions.items())
    return Text(f"{where.cpu}, {where.isa}, {threads} ({where.thread_runtime}); {versions}")


def _table(rows: list[Row]) -> Table:
    first = rows[0]
    title = f"{first.operation} {first.dtypes} {first.shape}, {first.weights} weights"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("implementation")
    table.add_column("runs on", overflow="fold")
    for heading in ("time", "p10 to p90", "GOP/s", "error", "time / lowbit's"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in sorted(rows, key=lambda row: row.seconds.median):
        table.add_row(
            row.implementation,
            row.isa or "not told",
            format_seconds(row.seconds.median),
            format_spread(row.seconds),
            three_digits(row.gops),
            format_error(row.error),
            "" if row.lowbit_speedup is None else format_ratio(row.lowbit_speedup),
            style="bold" if row.ours else None,
        )
    return table


def _summary(rows: list[Row]) -> list[Text]:
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
