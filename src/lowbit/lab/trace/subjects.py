"""Engines that `lowbit trace` knows by name; a new one is added to this file."""

from __future__ import annotations

import json
import math
import re
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lowbit.lab.trace.report import Operator
from lowbit.lab.trace.subject import Asked, Opened, engines, matrix_product, product_sizes
from lowbit.registry.extras import require

if TYPE_CHECKING:
    import torch


@engines.register("numpy")
def numpy_function(asked: Asked) -> Opened:
    """`matmul MxK:KxN` or any other function of `numpy`; `dtype=`."""
    found = getattr(np, asked.name, None)
    if not callable(found):
        raise ValueError(f"numpy has no function {asked.name!r}")
    if not asked.shapes:
        raise ValueError(f"numpy:{asked.name} needs the shapes of its arrays: 64x64, or 2x3:3x4")
    try:
        dtype = np.dtype(asked.take("dtype", "float32"))
    except TypeError as error:
        raise ValueError(f"dtype=: {error}; write float32, int8, ...") from None
    random = np.random.default_rng(0)
    arrays = [random.uniform(-100, 100, shape).astype(dtype) for shape in asked.shapes]
    options = asked.options

    def run() -> object:
        return found(*arrays, **options)

    shapes = ":".join("x".join(map(str, shape)) for shape in asked.shapes)
    products = matrix_product(asked.shapes) if asked.name in ("matmul", "dot") else None
    return Opened(run, f"numpy {asked.name} {shapes} {dtype}", dtype.name, products)


# ONNX files on ONNX Runtime, with the table of its own profile.

_ONNX_CALLS = 5
_ONNX_DTYPES = {"float": "float32", "double": "float64"}
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
        dtype = np.dtype(_ONNX_DTYPES.get(kind, kind))
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
        for _ in range(1 + _ONNX_CALLS):
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


_OPENVINO_CALLS = 5
_OPENVINO_DTYPES = {
    "f32": "float32", "f64": "float64", "f16": "float16", "i32": "int32", "i64": "int64",
    "i8": "int8", "u8": "uint8", "boolean": "bool",
}  # fmt: skip


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
        str(number): (_OPENVINO_DTYPES[one.element_type.get_type_name()], shapes[one])
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
    for number in range(1 + _OPENVINO_CALLS):
        request.infer(values)
        for node in request.get_profiling_info():
            if number and node.real_time.total_seconds():
                name = f"{node.node_type} {node.exec_type} ({node.node_name})"
                taken[name].append(node.real_time.total_seconds())
    return Operator.table(taken)


_ROWS = 256


@engines.register("torch")
def torch_operator(asked: Asked) -> Opened:
    """`linear` and `quantized_linear` of a shape KxN or MxK:KxN, or any function of `torch` and
    `torch.nn.functional` of tensors of the shapes; `dtype=`, `compile=true`."""
    import torch

    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    compiled = asked.take("compile", False)
    made = _LAYERS.get(asked.name, _function)(asked)
    asked.nothing_left()
    inner = torch.compile(made.call) if compiled else made.call

    def run() -> object:
        with torch.inference_mode():
            return inner()

    return replace(made, call=run)


def _dtype(asked: Asked) -> torch.dtype:
    import torch

    name = asked.take("dtype", "float32")
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype={name} is no dtype of torch; write float32, bfloat16, int8, ...")
    return found


def _tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    import torch

    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    return torch.randint(-100 if dtype.is_signed else 0, 100, shape).to(dtype)


def _linear(asked: Asked) -> Opened:
    import torch

    dtype = _dtype(asked)
    m, k, n = product_sizes(asked, asked.take("rows", _ROWS))
    layer = torch.nn.Linear(k, n, bias=asked.take("bias", True)).to(dtype)
    x = _tensor((m, k), dtype)
    name = str(dtype).removeprefix("torch.")
    return Opened(lambda: layer(x), f"torch linear {m}x{k}:{k}x{n} {name}", name, m * k * n)


def _quantized_linear(asked: Asked) -> Opened:
    import torch

    engine = asked.take("engine", torch.backends.quantized.engine)
    known = [one for one in torch.backends.quantized.supported_engines if one != "none"]
    if engine not in known:
        raise ValueError(f"engine={engine} is not one of this torch: {', '.join(known)}")
    torch.backends.quantized.engine = engine
    m, k, n = product_sizes(asked, asked.take("rows", _ROWS))
    dynamic = asked.take("dynamic", False)
    scales, zeros = torch.full((n,), 0.02), torch.zeros(n, dtype=torch.int64)
    operators: Any = torch.ops.quantized
    x = torch.randn(m, k)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that these tensors will go
        weight = torch.quantize_per_channel(torch.randn(n, k), scales, zeros, 0, torch.qint8)
        packed = operators.linear_prepack(weight, torch.randn(n))
        levels = torch.quantize_per_tensor(x, 0.05, 128, torch.quint8)
    if dynamic:
        call: Callable[[], object] = partial(operators.linear_dynamic.default, x, packed, True)
    else:
        call = partial(operators.linear.default, levels, packed, 0.5, 128)
    kind = "quantized linear, dynamic," if dynamic else "quantized linear"
    return Opened(call, f"torch {kind} {m}x{k}:{k}x{n} on {engine}", "int8", m * k * n)


_LAYERS = {"linear": _linear, "quantized_linear": _quantized_linear}


def _function(asked: Asked) -> Opened:
    import torch

    places = (torch.nn.functional, torch)
    found = next((getattr(p, asked.name) for p in places if hasattr(p, asked.name)), None)
    if not callable(found):
        raise ValueError(f"torch and torch.nn.functional have no function {asked.name!r}")
    if not asked.shapes:
        raise ValueError(f"torch:{asked.name} needs the shapes of its tensors: 64x64, or 2x3:3x4")
    dtype = _dtype(asked)
    tensors = [_tensor(shape, dtype) for shape in asked.shapes]
    call: Callable[[], Any] = partial(found, *tensors, **asked.options)
    asked.options.clear()
    shapes = ":".join("x".join(map(str, shape)) for shape in asked.shapes)
    name = str(dtype).removeprefix("torch.")
    products = matrix_product(asked.shapes) if asked.name in ("matmul", "mm", "bmm") else None
    if re.fullmatch(r"conv[123]d", asked.name):
        result: Any = call()
        products = result.numel() * math.prod(asked.shapes[1][1:])
    return Opened(call, f"torch {asked.name} {shapes} {name}", name, products)
