"""A record of linear layers as text."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lowbit.bench.linear_problem import ACTIVATIONS
from lowbit.bench.linear_record import MANY_ROWS, LinearMean, LinearRecord, LinearRow
from lowbit.bench.peak import share
from lowbit.bench.problem import parse_shape
from lowbit.bench.table import (
    format_error,
    format_known,
    format_ratio,
    format_seconds,
    format_spread,
    limits_line,
    three_digits,
)


def render(record: LinearRecord) -> RenderableType:
    """The context, a table for each shape, threads and state of the weights, the geometric means,
    and what did not run."""
    where = record.context
    versions = ", ".join(f"{name} {version}" for name, version in where.versions.items())
    groups = f"groups of {record.group_size}" if record.group_size else "one scale a column"
    zeros = "with zero points" if record.zero_points else "symmetric"
    parts: list[RenderableType] = [
        Text(f"{where.cpu}, {where.isa} ({where.thread_runtime}); {versions}"),
        Text(f"4-bit weights, {groups}, {zeros}; seed {where.seed}"),
    ]
    parts += [*map(limits_line, record.ceilings), ""]
    tables: dict[tuple[str, str, int], list[LinearRow]] = {}
    for row in record.rows:
        tables.setdefault((row.shape, row.weights, row.threads), []).append(row)
    for rows in tables.values():
        parts += [_table(rows), _noise(rows), ""]
    notes = dict.fromkeys(f"{row.implementation}: {row.note}" for row in record.rows if row.note)
    parts += [Text(note, style="dim") for note in notes]
    if record.means:
        parts += ["", _means(record.means), ""]
    reasons: dict[tuple[str, str], list[str]] = {}
    for one in record.absent:
        reasons.setdefault((one.implementation, one.reason), []).append(one.shape)
    for (name, reason), shapes in reasons.items():
        parts.append(Text(f"not run: {name} at {', '.join(shapes)}: {reason}", style="dim"))
    return Group(*parts)


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _table(rows: Sequence[LinearRow]) -> Table:
    first = rows[0]
    title = f"linear {first.shape}, {first.weights} weights, {_threads(first.threads)}"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("implementation", no_wrap=True)
    many = parse_shape(first.shape)["M"] >= MANY_ROWS
    rates = ("GOP/s", "% of peak") if many else ("GB/s", "% of read")
    ours = [row.activations for row in rows if row.ours]
    ratios = [f"time / {ACTIVATIONS[each]}'s" for each in ours]
    for heading in ("time", "p10 to p90", *rates, "error", *ratios):
        table.add_column(heading, justify="right")
    for row in sorted(rows, key=lambda row: row.seconds.median):
        cells = [
            format_seconds(row.seconds.median),
            format_spread(row.seconds) if row.rounds > 1 else "one run",
            *(_work(row) if many else _reading(row)),
            "" if row.error is None else format_error(row.error),
            *(_ratio(row, each, many) for each in ours),
        ]
        table.add_row(row.implementation, *cells, style="bold" if row.ours else None)
    return table


def _ratio(row: LinearRow, activations: str, many: bool) -> str:
    # Where arithmetic decides, a plain read is nothing to be compared with.
    if activations not in row.ratios or (many and row.error is None):
        return ""
    return format_ratio(row.ratios[activations])


def _work(row: LinearRow) -> tuple[str, str]:
    if row.error is None:
        return "", ""
    return three_digits(row.gops), format_known(row.peak_share)


def _reading(row: LinearRow) -> tuple[str, str]:
    known = "" if row.read_share is None else format_known(share(row.read_share.median))
    return three_digits(row.gbs), known


def _noise(rows: Sequence[LinearRow]) -> Text:
    noise = [row.noise for row in rows if row.noise is not None]
    known = f"; medians known to within {max(noise):.1%}" if noise else ""
    return Text(f"{max(row.rounds for row in rows)} rounds in random order{known}")


def _means(means: Sequence[LinearMean]) -> Table:
    title = "times as fast as others: geometric mean over the shapes (least)"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for heading in ("threads", "weights", "sizes", "lowbit against"):
        table.add_column(heading, no_wrap=True)
    table.add_column("shapes", justify="right")
    ours = [one for one in ACTIVATIONS if any(mean.activations == one for mean in means)]
    for one in ours:
        table.add_column(ACTIVATIONS[one], justify="right", no_wrap=True)
    lines: dict[tuple[str, ...], dict[str, LinearMean]] = {}
    for mean in means:
        key = str(mean.threads), mean.weights, mean.sizes, mean.implementation, str(mean.rows)
        lines.setdefault(key, {})[mean.activations] = mean
    for key, each in lines.items():
        table.add_row(*key, *(_mean(each[one]) if one in each else "" for one in ours))
    return table


def _mean(mean: LinearMean) -> str:
    return f"{three_digits(mean.geometric_mean)} ({three_digits(mean.worst)})"
