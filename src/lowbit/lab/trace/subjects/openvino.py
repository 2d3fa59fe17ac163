"""ONNX and OpenVINO files on OpenVINO, with the table of its own performance counters."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

from lowbit.lab.trace.report import Operator
from lowbit.lab.trace.subject import Asked, Opened, engines
from lowbit.lab.trace.subjects.onnxruntime import random_inputs
from lowbit.registry.extras import require

_CALLS = 5
_DTYPES = {"f32": "float32", "f64": "float64", "f16": "float16", "i32": "int32", "i64": "int64",
           "i8": "int8", "u8": "uint8", "boolean": "bool"}  # fmt: skip


@engines.register("openvino")
def model_file(asked: Asked) -> Opened:
    """`FILE`; `batch=` for sizes that the file leaves open."""
    require("openvino:FILE", "peers", "openvino")
    if not Path(asked.name).is_file():
        raise FileNotFoundError(2, "there is no such file", asked.name)
    import openvino  # pyright: ignore[reportMissingImports]

    batch = asked.take("batch", 1)
    asked.nothing_left()
    core = openvino.Core()
    model = core.read_model(asked.name)
    shapes = {
        one: [size.get_length() if size.is_static else batch for size in one.partial_shape]
        for one in model.inputs
    }
    model.reshape(shapes)
    wanted = {
        str(number): (_DTYPES[one.element_type.get_type_name()], shapes[one])
        for number, one in enumerate(model.inputs)
    }
    values = list(random_inputs(wanted, batch).values())
    options = {"INFERENCE_NUM_THREADS": asked.threads, "PERFORMANCE_HINT": "LATENCY"}
    request = core.compile_model(model, "CPU", options).create_infer_request()
    counted = core.compile_model(model, "CPU", {**options, "PERF_COUNT": True})
    table = partial(_counters, counted.create_infer_request(), values)
    quantized = any("_I8" in row.name or "_i8" in row.name for row in table())
    title = f"OpenVINO {Path(asked.name).name}"
    arithmetic = "int8" if quantized else ""
    return Opened(partial(request.infer, values), title, arithmetic, operators=table)


def _counters(request: Any, values: list[Any]) -> list[Operator]:
    """A row for each node that ran, with the kernel that OpenVINO names."""
    taken = defaultdict[str, list[float]](list)
    for number in range(1 + _CALLS):
        request.infer(values)
        for node in request.get_profiling_info():
            if number and node.real_time.total_seconds():
                name = f"{node.node_type} {node.exec_type} ({node.node_name})"
                taken[name].append(node.real_time.total_seconds())
    return Operator.table(taken)
