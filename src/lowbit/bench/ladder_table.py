"""The ladder's record as a table."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lowbit.bench.ladder import LadderRow
from lowbit.bench.problem import parse_shape
from lowbit.bench.record import Record
from lowbit.bench.table import (
    format_error,
    format_known,
    format_ratio,
    format_seconds,
    format_spread,
    limits_line,
    three_digits,
)


def render(record: Record) -> RenderableType:
    """The context, a line for each entry from the bottom of the ladder, and what did not run."""
    where, ceiling = record.context, record.ceilings[0]
    rows = [row for row in record.rows if isinstance(row, LadderRow)]
    versions = ", ".join(f"{name} {version}" for name, version in where.versions.items())
    threads = f"{ceiling.threads} thread{'s' if ceiling.threads > 1 else ''}"
    parts: list[RenderableType] = [
        Text(f"{where.cpu}, {where.isa}, {threads} ({where.thread_runtime}); {versions}"),
        limits_line(ceiling),
        "",
        _table(rows, threads),
        "",
        *map(Text, _notes(rows)),
    ]
    for one in record.absent:
        parts.append(Text(f"not run: {one.implementation}: {one.reason}", style="dim"))
    return Group(*parts)


def _table(rows: list[LadderRow], threads: str) -> Table:
    sizes = parse_shape(rows[0].shape)
    title = (
        f"exact uint4 product: {sizes['M']:,} queries, {sizes['N']:,} vectors, "
        f"{sizes['K']:,} dimensions; {threads}"
    )
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("rung", no_wrap=True)
    table.add_column("what is new on it, or what it is", overflow="fold")
    for heading in ("time", "p10 to p90", "GOP/s", "times as fast as BLAS", "% of peak", "error"):
        table.add_column(heading, justify="right")
    numbered = 0
    for row in rows:
        numbered += row.kind == "rung"
        label = f"{numbered}. {row.implementation}" if row.kind == "rung" else row.implementation
        table.add_row(
            label,
            row.idea,
            format_seconds(row.seconds.median),
            format_spread(row.seconds) if row.rounds > 1 else "one run",
            three_digits(row.gops),
            "" if row.blas_ratio is None else format_ratio(row.blas_ratio),
            format_known(row.peak_share),
            format_error(row.error),
            style="bold" if row.ours else None,
        )
    return table


def _notes(rows: list[LadderRow]) -> list[str]:
    noise = [row.noise for row in rows if row.noise is not None]
    known = f"; medians known to within {max(noise):.1%}" if noise else ""
    lines = [f"up to {max(row.rounds for row in rows)} rounds in random order{known}"]
    best = next((row for row in rows if row.best_peer), None)
    if best is not None and best.lowbit_speedup is not None:
        ratio = format_ratio(best.lowbit_speedup)
        lines.append(f"best peer: {best.implementation}; lowbit is {ratio} times as fast")
    return lines
