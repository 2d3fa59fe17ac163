"""What is traced: text as a user gives it, and the call that comes of it."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lowbit.registry import Registry
from lowbit.registry.extras import require
from lowbit_lab.trace.operators import Operator

if TYPE_CHECKING:
    import torch

_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")
RUN, EXPECTED, MULTIPLY_ADDS = "run", "arithmetic", "multiply_adds"
"""Names that a Python file may define."""


@dataclass(frozen=True)
class Asked:
    """`engine:name shape:shape key=value`, understood. `name` is a file where `engine` is FILE."""

    engine: str
    name: str
    shapes: tuple[tuple[int, ...], ...] = ()
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    threads: int = 1

    def take(self, name: str, default: Any) -> Any:
        """An option, which is used up; ValueError for a value of another kind."""
        value = self.options.pop(name, default)
        if default is not None and type(value) is not type(default):
            wanted = type(default).__name__
            raise ValueError(f"{name}={value}: give {name} as {wanted}, such as {name}={default}")
        return value

    def nothing_left(self) -> None:
        """ValueError if an option was not understood."""
        if self.options:
            raise ValueError(f"{self.engine}:{self.name} knows no {', '.join(self.options)}=...")


@dataclass(frozen=True)
class Opened:
    """A call that can be made again and again.

    arithmetic: what its products are expected to be made in, such as "int8"; "" if that is not
    known. multiply_adds: of one call, if known. operators: the engine's own table of a few calls.
    """

    call: Callable[[], object]
    title: str
    arithmetic: str = ""
    multiply_adds: int | None = None
    operators: Callable[[], list[Operator]] | None = None


FILE = "file"
engines: Registry[Callable[[Asked], Opened]] = Registry("engine", "lowbit_lab.trace.subject")


def understood(text: str, threads: int = 1) -> Asked:
    """ValueError, with what is known, or FileNotFoundError, for what can be no subject."""
    first, *rest = text.split() or [""]
    engine, colon, name = first.partition(":")
    known = (
        f"known are {', '.join(f'{one}:...' for one in engines.names())} and FILE.py with a run()"
    )
    if first.endswith(".py"):
        if not Path(first).exists():
            raise FileNotFoundError(2, f"there is no such file; subjects that are {known}", first)
        try:
            Path(first).read_bytes()
        except OSError as error:
            raise ValueError(f"{first} cannot be read: {error.strerror}; {known}") from None
        engine, name = FILE, first
    elif not colon:
        raise ValueError(f"{first!r} is no subject; {known}")
    else:
        engines.get(engine)
    shapes = [part for part in rest if "=" not in part]
    options = dict(part.split("=", 1) for part in rest if "=" in part)
    sizes = tuple(_sizes(one) for part in shapes for one in part.split(":"))
    return Asked(engine, name, sizes, {k: _value(v) for k, v in options.items()}, threads)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(size) for size in text.split("x"))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ValueError(f"shape {text!r} is not understood; write 1024x2048, or MxK:KxN")
    return found


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return True if text.lower() in _TRUE else False if text.lower() in _FALSE else text


def opened(asked: Asked) -> Opened:
    """ValueError for what cannot be made of it; whatever a file raises."""
    return _file(asked) if asked.engine == FILE else engines.get(asked.engine)(asked)


def product_sizes(asked: Asked, rows: int) -> tuple[int, int, int]:
    """M, K and N of `MxK:KxN`, or of a layer `KxN` that is given `rows` rows."""
    match asked.shapes:
        case ((k, n),):
            return rows, k, n
        case ((m, k), (other, n)) if k == other:
            return m, k, n
    raise ValueError(
        f"{asked.engine}:{asked.name} needs a shape: KxN, with rows=M if you like, or MxK:KxN"
    )


def matrix_product(shapes: Sequence[tuple[int, ...]]) -> int | None:
    """Multiply-adds of the product of two stacks of matrices; None if that is none."""
    if len(shapes) != 2 or min(map(len, shapes)) < 2 or shapes[0][-1] != shapes[1][-2]:
        return None
    stack = max(math.prod(shape[:-2]) for shape in shapes)
    return stack * shapes[0][-2] * shapes[0][-1] * shapes[1][-1]


def refusal(asked: Asked, error: BaseException) -> str:
    """Why nothing comes of a subject that is named, and what is wanted."""
    said = str(error).splitlines()
    why = f"{type(error).__name__}{': ' + said[0] if said else ''}"
    shapes = ":".join("x".join(map(str, shape)) for shape in asked.shapes) or "no shapes"
    return (
        f"{asked.engine}:{asked.name} cannot be called with {shapes}: {why}; give the shape of "
        "each operand, such as MxK:KxN, and what else it needs as name=value"
    )


def _file(asked: Asked) -> Opened:
    asked.nothing_left()
    path = Path(asked.name).absolute()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    call = getattr(module, RUN, None)
    if not callable(call):
        raise ValueError(f"{asked.name} defines no function {RUN}() to trace")
    arithmetic = str(getattr(module, EXPECTED, ""))
    return Opened(call, asked.name, arithmetic, getattr(module, MULTIPLY_ADDS, None))


# Engines that `lowbit explain call` knows by name; a new one is added to this file.


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
    from lowbit_lab.bench.peers.networks import onnx_session

    session = onnx_session(asked.name, asked.threads)
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


def _profile(asked: Asked, values: dict[str, Any]) -> list[Operator]:
    """A row for each operator of the file's graph as ONNX Runtime runs it."""
    from lowbit_lab.bench.peers.networks import onnx_session

    with tempfile.TemporaryDirectory() as folder:
        session = onnx_session(asked.name, asked.threads, str(Path(folder) / "profile"))
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
