"""What became of a network: sizes, layers, accuracy, operations, as data that JSON can hold."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lowbit import isa
from lowbit.graph import Graph, Session, save
from lowbit.graph.evaluate import evaluate
from lowbit.graph.passes.quantize import Decision
from lowbit.graph.sensitivity import sqnr
from lowbit.models.model import Array
from lowbit.models.quantize import Method, quantized_graph
from lowbit.models.source import NETWORK, RANDOM, Source, few, padded
from lowbit.models.work import multiply_adds
from lowbit.registry.extras import versions
from lowbit.registry.files import write_text
from lowbit.report.text import format_seconds, new_table, three_digits

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lowbit.report.page import Figure

REPORT = "report.json"
NOISE = (
    "Calibrated with random numbers, for speed alone: the figures of accuracy say nothing of real "
    "inputs, and the network is not for use. Calibrate with --data FILE.npz."
)
_SAME = 200.0  # decibels from which values count as equal
_INSIDE = {"int8": "int8", "dynamic": "int8, rows", "int4": "int4", "float": "float32"}


def quantize(
    source: Source, method: Method, folder: Path, *, threads: int | None, samples: int
) -> dict[str, Any]:
    """Quantize a network, write it and its report to a folder, and return the report.

    samples: how many accuracy is measured on. ValueError: nothing could be quantized.
    """
    batches = source.batches
    mask = source.model.mask if source.model else None
    graph, decisions = quantized_graph(
        source.graph, batches, method, mask=mask, compute=source.compute
    )
    if all(one.choice == "float" for one in decisions):
        reasons = "; ".join(dict.fromkeys(one.why for one in decisions)) or "it has no product"
        raise ValueError(f"nothing to quantize in {source.name}: {reasons}")
    counts = _of_sample(source)
    found: dict[str, Any] = {
        "name": source.name,
        "method": str(method),
        "data": source.data,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": isa.report()["cpu"],
        "isa": isa.active().name,
        "versions": versions(),
        "operations": _operations(source.graph, counts, decisions),
        "latency": [],
    }
    found |= _layers(source, graph, counts, decisions, threads)
    found["accuracy"] = _accuracy(source, graph, threads, samples)
    folder.mkdir(parents=True, exist_ok=True)
    save(graph, folder / NETWORK)
    found["size"] = _size(source.graph, folder / NETWORK)
    write_text(folder / REPORT, json.dumps(found, indent=1, allow_nan=False) + "\n")
    return found


def read(folder: Path) -> dict[str, Any]:
    """The report in a folder, of a network or of a language model. ValueError: it is none."""
    path = folder / REPORT
    try:
        found = json.loads(path.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no report: {error}") from None
    fields = {"name", "method", "layers", "size", "accuracy"}, {"format", "layers", "written"}
    if not isinstance(found, dict) or not any(one <= found.keys() for one in fields):
        raise ValueError(f"{path} is no report that lowbit quantize wrote")
    return found


def with_latency(report: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """The report with the rows of its network in a record of `lowbit bench networks`. ValueError:
    there are none."""
    rows = [
        {
            "engine": row["implementation"],
            "case": row["case"],
            "threads": row["threads"],
            "milliseconds": row["seconds"]["median"] * 1e3,
            "p10": row["seconds"]["p10"] * 1e3,
            "p90": row["seconds"]["p90"] * 1e3,
            "sqnr_db": row["extra"].get("sqnr_db"),
        }
        for row in record.get("benchmarks", ())
        if record.get("suite") == "networks" and row.get("work") == report["name"]
    ]
    if not rows:
        raise ValueError(f"the record has no times of {report['name']}: see lowbit bench networks")
    return {**report, "latency": rows}


def _size(floats: Graph, path: Path) -> dict[str, int]:
    before = sum(one.nbytes for one in floats.constants.values() if isinstance(one, np.ndarray))
    return {"before": before, "after": path.stat().st_size}


def _of_sample(source: Source) -> dict[str, int]:
    """By product, the multiply-adds of one sample, of the size that the data have."""
    graph = source.graph
    shapes = {name: one.shape for name, one in few(graph, source.sample).items()}
    return multiply_adds(graph.bound(graph.sizes(shapes)))


def _operations(
    floats: Graph, counts: Mapping[str, int], decisions: Sequence[Decision]
) -> dict[str, dict[str, int]]:
    """Multiply-adds of one sample, by operator and what it computes in, before and after."""
    choices = {one.output: one.choice for one in decisions}
    operators = {node.outputs[0]: node.op for node in floats.nodes}
    before, after = defaultdict[str, int](int), defaultdict[str, int](int)
    for name, count in counts.items():
        before[f"{operators[name]} float32"] += count
        after[f"{operators[name]} {_INSIDE[choices.get(name, 'float')]}"] += count
    return {"before": dict(before), "after": dict(after)}


def _layers(
    source: Source, graph: Graph, counts: Mapping[str, int], decisions: Sequence[Decision],
    threads: int | None,
) -> dict[str, Any]:  # fmt: skip
    """Every node that a run has, or without a run every product; and the outputs' noise."""
    times, untimed = _times(graph, source, threads)
    chosen = {one.output: one for one in decisions}
    noise, output = _noise(source, graph, {*chosen})
    known: dict[str, dict[str, Any]] = {}
    for node in graph.nodes:
        name, made = node.name or node.outputs[0], node.outputs[0]
        row = known.setdefault(name, {"layer": name, "op": node.op, "multiply_adds": 0})
        row["multiply_adds"] += counts.get(made, 0)
        if made in chosen:
            row |= {"op": node.op, "choice": chosen[made].choice, "why": chosen[made].why}
            row["sqnr_db"] = noise.get(made)
    total = sum(seconds for _, seconds in times.values()) or math.inf
    for name, (kernels, seconds) in times.items():
        row = known.setdefault(name, {"layer": name, "op": "", "multiply_adds": 0})
        row |= {"kernels": kernels, "seconds": seconds, "time_share": seconds / total}
    whole = sum(counts.values()) or 1
    for row in known.values():
        row["operation_share"] = row["multiply_adds"] / whole
    rows = [row for row in known.values() if "choice" in row or "seconds" in row]
    return {"layers": rows, "untimed": untimed, "output_sqnr_db": output}


def _times(
    graph: Graph, source: Source, threads: int | None
) -> tuple[dict[str, tuple[list[str], float]], str]:
    """By node, its kernels and seconds for one sample; else why there are none."""
    try:
        profile = Session(graph, threads=threads).profile(*few(graph, source.sample).values())
    except NotImplementedError as error:
        return {}, str(error).splitlines()[0]
    return {one.node: (list(dict.fromkeys(one.kernels)), one.seconds) for one in profile}, ""


def _noise(
    source: Source, graph: Graph, wanted: set[str]
) -> tuple[dict[str, float], dict[str, float]]:
    """The signal-to-quantization-noise ratio of each of these values, and of the outputs, dB."""
    seen: list[dict[str, Array]] = []
    for each in (source.graph, graph):
        values: dict[str, Array] = {}

        def watch(name: str, value: Array, values: dict[str, Array] = values) -> None:
            if name in wanted:
                values[name] = value

        values |= evaluate(each, source.sample, watch, source.compute)
        seen.append(values)
    floats, integers = seen
    both = {
        name: max(-_SAME, min(_SAME, sqnr([{name: integers[name]}], [{name: value}])))
        for name, value in floats.items()
        if name in integers and value.dtype.kind == "f" and value.any()
    }
    return both, {name: both[name] for name in source.graph.outputs if name in both}


def _accuracy(source: Source, graph: Graph, threads: int | None, samples: int) -> dict[str, Any]:
    """By metric, value, standard error and count of the float and the quantized network."""
    if source.model is None or samples < 1:
        return {}
    try:
        session = Session(graph, threads=threads)
        shapes = [graph.tensors[name].shape for name in graph.inputs]

        def run(*arrays: Array) -> Array:
            return session(*padded(arrays, shapes))

        quantized = source.model.accuracy(run, samples, source.run)
    except (NotImplementedError, ValueError) as error:
        return {"not measured": {"why": str(error).splitlines()[0]}}
    floats = source.model.accuracy(source.run, samples)
    return {
        name: {
            "value": one.value,
            "error": one.error if math.isfinite(one.error) else None,
            "count": one.count,
            "float": floats[name].value if name in floats else None,
        }
        for name, one in quantized.items()
    }


# A report on a network as sections, which become text.

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
        yield _latency_section(report["latency"])
    yield _accuracy_section(report)
    yield _operations_section(report["operations"])
    yield _layers_section(report)


def _latency_section(rows: Sequence[Mapping[str, Any]]) -> Section:
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


def _accuracy_section(report: Mapping[str, Any]) -> Section:
    columns = [
        ("metric", False),
        ("float32", True),
        ("quantized", True),
        ("± standard error", True),
    ]
    columns.append(("samples", True))
    lines, notes = [], []
    if report["data"] == RANDOM:
        notes.append(NOISE)
    for name, value in report["output_sqnr_db"].items():
        lines.append([f"SQNR of {name}, sample", "", _decibels(value), "", ""])
    for name, one in report["accuracy"].items():
        if "why" in one:
            notes.append(f"Accuracy was not measured: {one['why']}")
            continue
        figures = (one["float"], one["value"], one["error"])
        lines.append([name, *("" if x is None else f"{x:.4g}" for x in figures), str(one["count"])])
    if not report["output_sqnr_db"]:
        notes.append("No SQNR of outputs: on the sample none is of floats that are not all zero.")
    if not report["accuracy"]:
        notes.append("No accuracy: there are no data with labels for this network.")
    return Section("Accuracy", columns, lines, " ".join(notes))


def _operations_section(found: Mapping[str, Mapping[str, int]]) -> Section:
    before, after = found["before"], found["after"]
    whole = max(1, sum(before.values()))
    lines = [
        [kind, *(_percent(part.get(kind, 0) / whole) for part in (before, after))]
        for kind in dict.fromkeys((*before, *after))
    ]
    columns = [("operation", False), ("before", True), ("after", True)]
    return Section("Multiply-adds", columns, lines, f"{whole:,} for one sample.")


def _layers_section(report: Mapping[str, Any]) -> Section:
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
    data = "random numbers, FOR SPEED ALONE" if report["data"] == RANDOM else report["data"]
    about = f"{report['method']}, data: {data}"
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
    from lowbit.report.charts import bars
    from lowbit.report.page import Figure

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
