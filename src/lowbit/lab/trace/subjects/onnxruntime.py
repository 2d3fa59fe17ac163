"""ONNX files on ONNX Runtime, with the table of its own profile."""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.lab.trace.report import Operator
from lowbit.lab.trace.subject import Asked, Opened, engines
from lowbit.registry.extras import require

_CALLS = 5
_DTYPES = {"float": "float32", "double": "float64"}
_INTEGER = re.compile(r"Integer|QLinear|Quantize|QGemm|QAttention")


@engines.register("onnxruntime")
def onnx_file(asked: Asked) -> Opened:
    """`FILE`; `batch=` for sizes that the file leaves open."""
    require("onnxruntime:FILE", "peers", "onnxruntime")
    if not Path(asked.name).is_file():
        raise FileNotFoundError(2, "there is no such file", asked.name)
    batch = asked.take("batch", 1)
    asked.nothing_left()
    session = _session(asked)
    values = random_inputs(
        {one.name: (one.type[7:-1], one.shape) for one in session.get_inputs()}, batch
    )
    table = partial(_profile, asked, values)
    quantized = any(_INTEGER.search(row.name) for row in table())
    arithmetic = "int8" if quantized else "float32"
    title = f"ONNX Runtime {Path(asked.name).name}"
    return Opened(partial(session.run, None, values), title, arithmetic, operators=table)


def random_inputs(
    wanted: dict[str, tuple[str, list[Any]]], batch: int
) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays for inputs by name, of dtypes and shapes; an open size becomes `batch`."""
    random, values = np.random.default_rng(0), {}
    for name, (kind, shape) in wanted.items():
        sizes = [size if isinstance(size, int) and size > 0 else batch for size in shape]
        dtype = np.dtype(_DTYPES.get(kind, kind))
        drawn = random.standard_normal(sizes) if dtype.kind == "f" else random.integers(0, 2, sizes)
        values[name] = drawn.astype(dtype)
    return values


def _session(asked: Asked, profile: str = "") -> Any:
    import onnxruntime  # pyright: ignore[reportMissingImports]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = asked.threads
    options.log_severity_level = 3
    if profile:
        options.enable_profiling, options.profile_file_prefix = True, profile
    return onnxruntime.InferenceSession(asked.name, options, providers=["CPUExecutionProvider"])


def _profile(asked: Asked, values: dict[str, Any]) -> list[Operator]:
    """A row for each operator of the file's graph as ONNX Runtime runs it."""
    with tempfile.TemporaryDirectory() as folder:
        session = _session(asked, str(Path(folder) / "profile"))
        for _ in range(1 + _CALLS):
            session.run(None, values)
        events = json.loads(Path(session.end_profiling()).read_text())
    taken = defaultdict[tuple[str, str], list[float]](list)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            node = event["name"].removesuffix("_kernel_time")
            taken[event["args"]["op_name"], node].append(event["dur"] * 1e-6)
    return Operator.table(
        {f"{kind} ({node})": seconds[1:] or seconds for (kind, node), seconds in taken.items()}
    )
