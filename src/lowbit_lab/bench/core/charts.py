"""Charts of what the lab and the benchmark measure: rooflines, shares of the peak over sizes,
scaling with threads, times by kind, histories. What has no figures for a chart has no such
chart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lowbit.report.charts import altair_chart, bars
from lowbit.report.page import Figure
from lowbit_lab.bench.core.case import LIMIT
from lowbit_lab.bench.core.peak import Ceiling
from lowbit_lab.bench.core.record import Record, Row
from lowbit_lab.bench.core.table import heading

_FEW_CASES = 3  # a line over sizes wants so many
_MOST_LINES = 12  # of a legend


def points(
    values: Sequence[Mapping[str, Any]],
    axes: tuple[str, str],
    titles: tuple[str, str],
    *,
    log: bool = True,
    percent: bool = False,
) -> Any:
    """Points for each `name`, in a line unless it is `log`, across, where shapes of one size
    differ. axes: the fields across and up."""
    alt, chart = altair_chart(values)
    scale = alt.Scale(type="log") if log else alt.Undefined
    kind = "Q" if log else "O"
    marked = chart.mark_point(filled=True, size=50) if log else chart.mark_line(point=True)
    across = alt.Axis(format="~s") if log else alt.Undefined
    return marked.encode(
        x=alt.X(f"{axes[0]}:{kind}", title=titles[0], scale=scale, axis=across),
        y=alt.Y(f"{axes[1]}:Q", title=titles[1], axis=alt.Axis(format="%" if percent else "~g")),
        color=alt.Color("name:N", title=None, sort=None),
    )


def roofline(
    dots: Sequence[Mapping[str, Any]], peaks: Mapping[str, float], rates: Mapping[str, float]
) -> Any:
    """Operations a second over operations a byte. dots: `intensity`, `gops`, `name`; peaks: by
    name, 10^9 operations a second; rates: by level, 10^9 bytes a second."""
    highest = max(peaks.values())
    nearest = [one["intensity"] for one in dots] + [highest / rate for rate in rates.values()]
    left, right = min(nearest) / 2, max(nearest) * 4
    limits: list[dict[str, Any]] = []
    for level, rate in rates.items():
        for at in (left, highest / rate):
            limits.append({"intensity": at, "gops": at * rate, "limit": level})
    for name, peak in peaks.items():
        start = peak / max(rates.values()) if rates else left
        limits += [{"intensity": at, "gops": peak, "limit": name} for at in (start, right)]
    alt, drawn = altair_chart(limits)
    x = alt.X("intensity:Q", scale=alt.Scale(type="log"), title="operations a byte")
    y = alt.Y("gops:Q", scale=alt.Scale(type="log"), title="GOP/s")
    dash = alt.StrokeDash("limit:N", title="limit", sort=None)
    line = drawn.mark_line(color="gray").encode(x=x, y=y, strokeDash=dash)
    marked = altair_chart(dots)[1].mark_point(filled=True, size=50)
    return line + marked.encode(x=x, y=y, color=alt.Color("name:N", title=None, sort=None))


def of_record(record: Record) -> Iterator[Figure]:
    """The charts that the rows of a record have figures for."""
    rows = [row for row in record.rows if row.kind != LIMIT and row.operations]
    command = record.context.get("command", f"lowbit bench {record.suite}")
    machine = record.context.get("cpu") or record.context.get("gpu")
    for ceiling in record.ceilings:
        of_threads = [row for row in rows if row.threads == ceiling.threads and row.bytes]
        if of_threads:
            caption = (
                f"Roofline of {machine}, threads: {ceiling.threads}; limits measured in the run."
            )
            yield Figure(_roofline_of(of_threads, ceiling), caption, command)
    cases = dict.fromkeys((row.case, row.dtypes) for row in rows)
    if len(cases) < _FEW_CASES:
        for case, dtypes in cases:
            yield _one_case([r for r in rows if (r.case, r.dtypes) == (case, dtypes)], command)
    elif any(row.peak_share for row in rows):
        shares = [_point(row, "share", row.peak_share) for row in rows if row.peak_share]
        titles = "multiply-adds", "share of the measured peak"
        drawn = points(shares, ("multiply_adds", "share"), titles, percent=True)
        yield Figure(drawn, "Share of the measured peak over the size of the product.", command)
    else:
        speeds = [_point(row, "gops", row.gops) for row in rows]
        drawn = points(speeds, ("multiply_adds", "gops"), ("multiply-adds", "GOP/s"))
        yield Figure(drawn, "Speed over the size of the work.", command)
    if len({row.threads for row in rows}) > 1:
        titles = "threads", "GOP/s, geometric mean"
        drawn = points(_scaling(rows), ("threads", "gops"), titles, log=False)
        yield Figure(drawn, "Speed over threads, the geometric mean of the cases.", command)


def _label(row: Row) -> str:
    return f"{row.implementation}{', cold' if row.weights == 'cold' else ''}"


def _point(row: Row, name: str, value: float | None) -> dict[str, Any]:
    return {"multiply_adds": row.operations / 2, name: value, "name": _label(row)}


def _one_case(rows: Sequence[Row], command: str) -> Figure:
    values = [{"name": heading(row, "implementation"), "gops": row.gops} for row in rows]
    return Figure(bars(values, "name", "gops", "GOP/s"), f"{rows[0].case}: speed.", command)


def _roofline_of(rows: Sequence[Row], ceiling: Ceiling) -> Any:
    points = [
        {"intensity": row.operations / row.bytes, "gops": row.gops, "name": _label(row)}
        for row in rows
    ]
    return roofline(points, {f"{ceiling.dtype} peak": ceiling.gops}, ceiling.read_gbs)


def _scaling(rows: Sequence[Row]) -> list[dict[str, Any]]:
    logs: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        logs.setdefault((_label(row), row.threads or 1), []).append(math.log(row.gops))
    names = list(dict.fromkeys(name for name, _ in logs))[:_MOST_LINES]
    return [
        {"name": name, "threads": threads, "gops": math.exp(sum(all_) / len(all_))}
        for (name, threads), all_ in sorted(logs.items())
        if name in names
    ]


def of_history(records: Sequence[Record]) -> Iterator[Figure]:
    """For each suite, the times of lowbit's own rows over its runs, each over that of the first."""
    for suite in dict.fromkeys(one.suite for one in records):
        first: dict[str, float] = {}
        values: list[dict[str, Any]] = []
        runs = [one for one in records if one.suite == suite]
        for run in runs:
            for row in (row for row in run.rows if row.ours):
                base = first.setdefault(row.name, row.seconds.median)
                relative = row.seconds.median / base
                values.append({"date": run.context["date"], "time": relative, "name": row.name})
        names = list(dict.fromkeys(one["name"] for one in values))[:_MOST_LINES]
        shown = [one for one in values if one["name"] in names]
        titles = "date", "time / that of the first run"
        drawn = points(shown, ("date", "time"), titles, log=False)
        yield Figure(drawn, f"{suite}: lowbit's own rows.", runs[-1].context.get("command", ""))
