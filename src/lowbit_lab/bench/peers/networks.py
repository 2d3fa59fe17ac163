"""The engines that networks are measured with; importing this needs none of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lowbit.graph import Session, load
from lowbit.models.model import Array, Arrays, models
from lowbit_lab.bench.core.case import OURS, implementations
from lowbit_lab.bench.core.stamps import outside_kernels
from lowbit_lab.bench.networks.engine import (
    CALIBRATION,
    DYNAMIC,
    DYNAMIC_ONNX,
    FLOAT,
    FLOAT_ONNX,
    INPUTS,
    STATIC,
    STATIC_ONNX,
    Engine,
    NetworkWork,
    Opened,
)

if TYPE_CHECKING:
    from torch import nn


class OnnxRuntime(Engine):
    """Its CPU provider."""

    needs = ("onnxruntime", "onnx")
    package = ("ONNX Runtime", "onnxruntime")

    def open(self, work: NetworkWork) -> Opened:
        return Opened(onnx_call(work.file(self.file), work.threads))


def onnx_session(path: str | Path, threads: int, profile: str = "") -> Any:
    """A session of ONNX Runtime's CPU provider. profile: how the file begins that it writes."""
    import onnxruntime  # pyright: ignore[reportMissingImports]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    if profile:
        options.enable_profiling, options.profile_file_prefix = True, profile
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def onnx_call(path: Path, threads: int) -> Callable[..., Array]:
    """A file in such a session, as a function of arrays."""
    session = onnx_session(path, threads)
    names = [one.name for one in session.get_inputs()]

    def call(*arrays: Array) -> Array:
        return np.asarray(session.run(None, dict(zip(names, arrays, strict=True)))[0])

    return call


class OpenVino(Engine):
    """precision: what floats are computed in; "" leaves that to OpenVINO."""

    needs = ("openvino", "onnx")
    package = ("OpenVINO", "openvino")

    def __init__(self, name: str, file: str, precision: str, config: str = "") -> None:
        super().__init__(name, file, config)
        self.precision = precision

    def open(self, work: NetworkWork) -> Opened:
        import openvino  # pyright: ignore[reportMissingImports]

        model = openvino.Core().read_model(work.file(self.file))
        shapes = [[work.batch, *one.shape[1:]] for one in work.arrays(INPUTS)]
        model.reshape(dict(zip(model.inputs, shapes, strict=True)))
        call, used = openvino_call(model, work.threads, self.precision)
        return Opened(call, f"floats in {used}")


def openvino_call(
    model: Any, threads: int, precision: str = ""
) -> tuple[Callable[..., Array], str]:
    """A model of OpenVINO as a function of arrays, and what floats are computed in."""
    import openvino  # pyright: ignore[reportMissingImports]

    options = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    options |= {"INFERENCE_PRECISION_HINT": precision} if precision else {}
    compiled = openvino.Core().compile_model(model, "CPU", options)
    used = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    return lambda *arrays: compiled(list(arrays))[0], used


# lowbit's own sessions, without PyTorch.

_PROCESSES = 5
_SECONDS = 60.0
# From the start of Python's own work to the first result: NumPy, lowbit, file, plan, call.
_FIRST = """
import time
begin = time.perf_counter()
import json, sys
import numpy as np
from lowbit.graph import Session, load
path, threads, inputs = json.loads(sys.argv[1])
Session(load(path), threads=threads)(*(np.zeros(shape, dtype) for shape, dtype in inputs))
print(time.perf_counter() - begin)
"""


class LowbitNetwork(Engine):
    """A network in a file, loaded and run."""

    kind = OURS

    def open(self, work: NetworkWork) -> Opened:
        path = work.file(self.file)
        session = Session(load(path), threads=work.threads)
        arrays = tuple(one[: work.batch] for one in work.arrays(INPUTS))
        session(*arrays)
        plan = session.plan(dict(zip(session.graph.inputs, arrays, strict=True)))

        def measure() -> Mapping[str, Any]:
            return {
                "file_bytes": path.stat().st_size,
                "arena_bytes": plan.peak_bytes,
                "outside_kernels": outside_kernels(lambda: session(*arrays)),
                "first_result_seconds": first_result(str(path), work.threads, arrays),
            }

        return Opened(session, measure=measure)


def first_result(path: str, threads: int, arrays: Arrays) -> float:
    """Seconds from the start of a new Python process's work to its first result: the median of some
    processes, which find compiled kernels in the cache, and modules compiled as pip installs them,
    whatever the environment says of that."""
    inputs = [(one.shape, one.dtype.name) for one in arrays]
    command = [sys.executable, "-c", _FIRST, json.dumps([path, threads, inputs])]
    taken = []
    with tempfile.TemporaryDirectory() as bytecode:
        where = {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
        for _ in range(_PROCESSES + 1):
            done = subprocess.run(
                command, env=os.environ | where, capture_output=True, text=True, check=True,
                timeout=_SECONDS,
            )  # fmt: skip
            taken.append(float(done.stdout))
    return float(np.median(taken[1:]))


class PyTorch(Engine):
    """A model as it is built, run eagerly."""

    needs = ("torch",)
    package = ("torch", "torch")

    def __init__(self, name: str, change: Change, config: str = "", always: bool = False) -> None:
        super().__init__(name, config=config)
        self.change, self.always = change, always

    def open(self, work: NetworkWork) -> Opened:
        import torch

        torch.set_num_threads(work.threads)
        built = models.get(work.model).build(work.weights, for_speed=True)
        if not isinstance(built, torch.nn.Module):
            raise ValueError(f"{work.model} comes as an ONNX file")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its quantization is deprecated, and says so often
            network = self.change(built, work)

        def call(*arrays: Array) -> Array:
            with torch.inference_mode():
                return network(*map(torch.from_numpy, arrays)).float().numpy()

        return Opened(call, measure=lambda: _file_bytes(network))


def _file_bytes(network: Any) -> Mapping[str, int]:
    """Of the file that a module's state is saved as; nothing of what is no module."""
    import torch

    if not isinstance(network, torch.nn.Module):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model")
        torch.save(network.state_dict(), path)  # packed weights know no other format
        return {"file_bytes": path.stat().st_size}


Change = Callable[["nn.Module", NetworkWork], Callable[..., Any]]


def _float32(network: nn.Module, work: NetworkWork) -> Callable[..., Any]:
    return network


def _bfloat16(network: nn.Module, work: NetworkWork) -> Callable[..., Any]:
    import torch

    network = network.to(torch.bfloat16)

    def call(*tensors: Any) -> Any:
        floats = (one.bfloat16() if one.is_floating_point() else one for one in tensors)
        return network(*floats)

    return call


def _x86(network: nn.Module, work: NetworkWork) -> Callable[..., Any]:
    """Static, by the engine x86."""
    import torch
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    torch.backends.quantized.engine = "x86"
    tensors = tuple(torch.from_numpy(one) for one in work.arrays(CALIBRATION))
    prepared = prepare_fx(network, get_default_qconfig_mapping("x86"), tensors)
    with torch.inference_mode():
        for index in range(len(tensors[0])):
            prepared(*(one[index : index + 1] for one in tensors))
    return convert_fx(prepared)


def _dynamic(engine: str) -> Change:
    def change(network: nn.Module, work: NetworkWork) -> Callable[..., Any]:
        import torch
        from torch.ao.quantization import quantize_dynamic
        from torch.ao.quantization.qconfig import per_channel_dynamic_qconfig

        torch.backends.quantized.engine = engine
        scheme = {torch.nn.Linear: per_channel_dynamic_qconfig}
        return quantize_dynamic(network, scheme, dtype=torch.qint8)

    return change


for _one in (
    OnnxRuntime("ONNX Runtime fp32", FLOAT_ONNX),
    OnnxRuntime("ONNX Runtime int8", STATIC_ONNX, "static"),
    OnnxRuntime("ONNX Runtime dynamic", DYNAMIC_ONNX, "dynamic"),
    OpenVino("OpenVINO fp32", FLOAT_ONNX, "f32"),
    OpenVino("OpenVINO bf16", FLOAT_ONNX, "bf16"),
    OpenVino("OpenVINO int8", STATIC_ONNX, "", "static"),
    LowbitNetwork("lowbit int8", STATIC, "static"),
    LowbitNetwork("lowbit int8 dynamic", DYNAMIC, "dynamic"),
    LowbitNetwork("lowbit fp32", FLOAT),
    PyTorch("torch fp32", _float32, always=True),
    PyTorch("torch bf16", _bfloat16),
    PyTorch("torch int8 x86", _x86, "static"),
    PyTorch("torch dynamic x86", _dynamic("x86"), "dynamic"),
    PyTorch("torch dynamic onednn", _dynamic("onednn"), "dynamic"),
    PyTorch("torch dynamic fbgemm", _dynamic("fbgemm"), "dynamic"),
):
    implementations.add(f"networks: {_one.name}", _one)
