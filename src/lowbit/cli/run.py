"""The command `lowbit run`."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowbit.cli.application import JsonFile, Threads, command, output

if TYPE_CHECKING:
    from rich.text import Text

    from lowbit.graph import Graph, NodeTime

_SECONDS, _LEAST, _MOST = 1.0, 3, 100


@command("run", example="run resnet34-int8 --input images.npy --threads 1 --profile")
def run(
    network: Annotated[
        Path,
        typer.Argument(
            help="What lowbit quantize wrote, a file of lowbit.graph.save, or FILE.onnx.",
            metavar="DIR|FILE",
            show_default=False,
        ),
    ],
    input_file: Annotated[
        str | None,
        typer.Option(
            "--input",
            metavar="FILE",
            help="FILE.npy, or FILE.npz with all inputs by their names.",
            show_default="random, one sample",
        ),
    ] = None,
    output_file: Annotated[
        str | None, typer.Option("--output", metavar="FILE.npz", help="Where outputs are written.")
    ] = None,
    threads: Threads = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Show the time of every node.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Run a network without PyTorch, and time it."""
    from statistics import median

    from rich.console import Group

    from lowbit.graph import Session
    from lowbit.models.source import compiled

    graph = compiled(network)
    session = Session(graph, threads=threads)
    inputs = _inputs(graph, input_file)
    outputs = session.run(*inputs.values())
    taken: list[float] = []
    while len(taken) < _LEAST or (sum(taken) < _SECONDS and len(taken) < _MOST):
        begin = time.perf_counter()
        session.run(*inputs.values())
        taken.append(time.perf_counter() - begin)
    nodes = session.profile(*inputs.values()) if profile else []
    found = {
        "outputs": {name: _described(one) for name, one in outputs.items()},
        "seconds": {"median": median(taken), "least": min(taken)},
        "calls": len(taken),
        "arena_bytes": session.plan(inputs).peak_bytes,
        "nodes": [asdict(node) for node in nodes],
    }
    shown = Group(*_lines(found), *[_table(nodes)] * profile)
    with output(json_file) as show:
        show(shown, json.dumps(found, indent=1, allow_nan=False))
    if output_file is not None:
        _write(output_file, outputs)


def _write(file: str, outputs: dict[str, Any]) -> None:
    """Arrays as FILE.npz, whole or not at all."""
    import numpy as np

    from lowbit.registry.files import replacing

    file = f"{file.removesuffix('.npz')}.npz"  # as NumPy has it
    with replacing(file) as stream:
        np.savez(stream, **outputs)
    print(f"outputs written to {file}", file=sys.stderr)


def _described(one: Any) -> dict[str, Any]:
    """dtype, shape, and from which to which value."""
    ends = [float(one.min()), float(one.max())] if one.size else []
    known = ends if all(map(math.isfinite, ends)) else None
    return {"dtype": one.dtype.name, "shape": list(one.shape), "range": known}


def _lines(found: dict[str, Any]) -> Iterator[Text]:
    from rich.text import Text

    for name, one in found["outputs"].items():
        spread = ", not finite" if one["range"] is None else ""
        if one["range"]:
            spread = ", from {:.4g} to {:.4g}".format(*one["range"])
        yield Text(f"{name}: {one['dtype']} {one['shape']}{spread}")
    middle, least = (found["seconds"][name] * 1e3 for name in ("median", "least"))
    arena = found["arena_bytes"] / 1e6
    yield Text(f"{middle:.3f} ms a call, the median of {found['calls']}; at least {least:.3f} ms; "
               f"{arena:.1f} MB between inputs and outputs")  # fmt: skip


def _inputs(graph: Graph, file: str | None) -> dict[str, Any]:
    from lowbit.models.source import Samples, random_inputs

    if file is None:
        return random_inputs(graph)
    arrays = Samples.read(file).ordered(graph.inputs)
    return dict(zip(graph.inputs, arrays, strict=True))


def _table(times: list[NodeTime]) -> Any:
    from lowbit.report.text import new_table, three_digits

    made = new_table("", [("node", False), ("kernels", False), ("µs", True), ("share", True)])
    total = sum(one.seconds for one in times)
    for one in times:
        share = f"{one.seconds / total:.1%}" if total else ""
        kernels = ", ".join(dict.fromkeys(one.kernels))
        made.add_row(one.node, kernels, three_digits(one.seconds * 1e6), share)
    return made
