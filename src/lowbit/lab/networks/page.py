"""A report on a network as sections, which become text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowbit.bench.core.table import format_seconds, new_table, three_digits

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lowbit.lab.page import Figure

Line = Sequence[str]


@dataclass(frozen=True)
class Section:
    """A table with a title. columns: headings, and whether they are set to the right. note: stands
    below."""

    title: str
    columns: Sequence[tuple[str, bool]]
    lines: Sequence[Line]
    note: str = ""


def sections(report: Mapping[str, Any]) -> Iterator[Section]:
    """All that a report says."""
    size = report["size"]
    ratio = size["before"] / size["after"]
    lines = [[_megabytes(size["before"]), _megabytes(size["after"]), f"{ratio:.2f}"]]
    yield Section("Size", [("float32", True), ("quantized", True), ("times smaller", True)], lines)
    if report["latency"]:
        yield _latency(report["latency"])
    yield _accuracy(report)
    yield _operations(report["operations"])
    yield _layers(report)


def _latency(rows: Sequence[Mapping[str, Any]]) -> Section:
    columns = [("engine", False), ("case", False), ("threads", True), ("ms", True)]
    columns += [("p10 to p90", True), ("SQNR", True)]
    lines = [
        [
            row["engine"],
            row["case"],
            str(row["threads"]),
            three_digits(row["milliseconds"]),
            f"{three_digits(row['p10'])} to {three_digits(row['p90'])}",
            _decibels(row["sqnr_db"]),
        ]
        for row in sorted(rows, key=lambda row: (row["case"], row["threads"], row["milliseconds"]))
    ]
    note = "Engines as processes of their own, taking turns; medians."
    return Section("Latency", columns, lines, note)


def _accuracy(report: Mapping[str, Any]) -> Section:
    columns = [
        ("metric", False),
        ("float32", True),
        ("quantized", True),
        ("± standard error", True),
    ]
    columns.append(("samples", True))
    lines, notes = [], []
    for name, value in report["output_sqnr_db"].items():
        lines.append([f"SQNR of {name}, sample", "", _decibels(value), "", ""])
    for name, one in report["accuracy"].items():
        if "why" in one:
            notes.append(f"Accuracy was not measured: {one['why']}")
            continue
        figures = (one["float"], one["value"], one["error"])
        lines.append([name, *("" if x is None else f"{x:.4g}" for x in figures), str(one["count"])])
    if not report["accuracy"]:
        notes.append("No accuracy: there are no data with labels for this network.")
    return Section("Accuracy", columns, lines, " ".join(notes))


def _operations(found: Mapping[str, Mapping[str, int]]) -> Section:
    before, after = found["before"], found["after"]
    whole = max(1, sum(before.values()))
    lines = [
        [kind, *(_percent(part.get(kind, 0) / whole) for part in (before, after))]
        for kind in dict.fromkeys((*before, *after))
    ]
    columns = [("operation", False), ("before", True), ("after", True)]
    return Section("Multiply-adds", columns, lines, f"{whole:,} for one sample.")


def _layers(report: Mapping[str, Any]) -> Section:
    columns = [("layer", False), ("operator", False), ("became", False), ("kernel", False)]
    columns += [("µs", True), ("time", True), ("operations", True), ("SQNR", True), ("why", False)]
    lines = [
        [
            row["layer"],
            row["op"],
            row.get("choice", ""),
            ", ".join(row.get("kernels", ())),
            three_digits(row["seconds"] * 1e6) if row.get("seconds") else "",
            _percent(row["time_share"]) if "time_share" in row else "",
            _percent(row["operation_share"]) if row["multiply_adds"] else "",
            _decibels(row.get("sqnr_db")),
            row.get("why", "") if row.get("choice") == "float" else "",
        ]
        for row in report["layers"]
    ]
    total = sum(row.get("seconds", 0.0) for row in report["layers"])
    note = "SQNR: of the layer's output against the float network's, all layers before quantized."
    note += f" All nodes: {format_seconds(total)}." if total else ""
    note += f" Not timed: {report['untimed']}" if report["untimed"] else ""
    return Section("Layers", columns, lines, note)


def heading(report: Mapping[str, Any]) -> str:
    """What was quantized, how, and where."""
    about = f"{report['method']}, data: {report['data']}"
    return f"{about}; {report['cpu']}, {report['isa']}, {report['date']}"


def text(report: Mapping[str, Any]) -> RenderableType:
    """For a terminal."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(report["name"], "bold"), Text(heading(report)), Text("")]
    for one in sections(report):
        made = new_table(one.title, [(name, right) for name, right in one.columns])
        for line in one.lines:
            made.add_row(*line)
        parts += [made, Text(one.note, "dim")]
    return Group(*parts)


def figures(report: Mapping[str, Any]) -> Iterator[Figure]:
    """Where the time of the layers goes, by operator."""
    from lowbit.lab.charts import bars
    from lowbit.lab.page import Figure

    timed: dict[str, float] = defaultdict(float)
    for row in report["layers"]:
        timed[row["op"] or "other"] += row.get("seconds", 0.0) * 1e6
    values = [{"operator": op, "µs": spent} for op, spent in timed.items() if spent]
    if values:
        yield Figure(bars(values, "operator", "µs", "µs of one sample", "operator"), "Time split.")


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB"


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _decibels(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} dB"
