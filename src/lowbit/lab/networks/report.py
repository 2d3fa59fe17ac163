"""What became of a network: sizes, layers, accuracy, operations, as data that JSON can hold."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from lowbit import isa
from lowbit.bench.core.context import versions
from lowbit.bench.models.model import Array
from lowbit.bench.networks.quantize import Method, quantized_graph
from lowbit.bench.networks.work import multiply_adds
from lowbit.graph import Graph, Session, save
from lowbit.graph.evaluate import evaluate
from lowbit.graph.passes.quantize import Decision
from lowbit.graph.sensitivity import sqnr
from lowbit.lab.networks.source import NETWORK, Source, few, padded

REPORT = "report.json"
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
    (folder / REPORT).write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", "utf-8")
    return found


def read(folder: Path) -> dict[str, Any]:
    """The report in a folder. ValueError: it is none."""
    path = folder / REPORT
    try:
        found = json.loads(path.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no report: {error}") from None
    if (
        not isinstance(found, dict)
        or not {"name", "method", "layers", "size", "accuracy"} <= found.keys()
    ):
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
