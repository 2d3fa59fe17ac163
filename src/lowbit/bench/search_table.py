"""A record of search as text."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lowbit.bench.search_record import SearchRecord, SearchRow
from lowbit.bench.table import format_ratio, format_seconds, format_spread, three_digits


def render(record: SearchRecord) -> RenderableType:
    """The context, a table for each number of queries, and what did not run."""
    where = record.context
    versions = ", ".join(f"{name} {version}" for name, version in where.versions.items())
    threads = where.threads[0]
    parts: list[RenderableType] = [
        Text(f"{where.cpu}, {where.isa}, threads: {threads} ({where.thread_runtime}); {versions}"),
        Text(f"vectors: {where.distribution}; seed {where.seed}"),
        "",
    ]
    for batch in dict.fromkeys(row.batch for row in record.rows):
        parts += [_table(record, [row for row in record.rows if row.batch == batch]), ""]
    parts += [Text(f"not run: {name}: {why}", style="dim") for name, why in record.absent]
    return Group(*parts)


def _table(record: SearchRecord, rows: list[SearchRow]) -> Table:
    title = (
        f"the {record.k} nearest ({record.metric}) of {record.vectors:,} x {record.dim}, "
        f"{record.bits} bits, queries together: {rows[0].batch}"
    )
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("implementation")
    headings = ("time", "p10 to p90", "rounds", "queries/s", f"recall@{record.k}", "size, MB")
    for heading in (*headings, "filled in", "time / lowbit's"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.implementation,
            format_seconds(row.seconds.median),
            format_spread(row.seconds),
            str(row.rounds),
            three_digits(row.batch / row.seconds.median),
            f"{row.recall:.4f}",
            three_digits(row.nbytes / 1e6),
            format_seconds(row.build_seconds),
            "" if row.lowbit_speedup is None else format_ratio(row.lowbit_speedup),
            style="bold" if row.ours else None,
        )
    return table
