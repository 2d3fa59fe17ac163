"""A network made ready for all engines, once, in a process of its own."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lowbit.graph import Graph, Session, from_onnx, save
from lowbit.models.model import Array, Arrays, models
from lowbit.models.quantize import Method, quantized_graph
from lowbit.models.work import linear_share, multiply_adds, sized
from lowbit_lab.bench.networks.engine import (
    CALIBRATION,
    DYNAMIC,
    DYNAMIC_ONNX,
    FLOAT,
    FLOAT_ONNX,
    INPUTS,
    REFERENCE,
    STATIC,
    STATIC_ONNX,
)

if TYPE_CHECKING:
    from torch import nn

_CALIBRATED = 4  # batches of one sample
_OPSET = 17


@dataclass(frozen=True)
class Preparation:
    """What to prepare: a model with a checkpoint, `samples` of its inputs, in a folder; files: the
    ones that are wanted."""

    model: str
    weights: str | None
    folder: str
    samples: int
    files: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """What is known of a network.

    multiply_adds: of one sample. linear_share: how many of them linear layers have. float_bytes: of
    its parameters. missing: by file, why it could not be made.
    """

    multiply_adds: int
    linear_share: float
    float_bytes: int
    missing: Mapping[str, str] = field(default_factory=dict)


def prepare_quietly(task: Preparation) -> Facts:
    """`prepare` for a process of its own: other libraries have nothing to say."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    return prepare(task)


def prepare(task: Preparation) -> Facts:
    """Write the files of a task.

    All engines are calibrated on the same few samples, and judged by others."""
    folder, model = Path(task.folder), models.get(task.model)
    arrays = model.example(task.samples + _CALIBRATED)
    inputs = tuple(one[: task.samples] for one in arrays)
    calibration = tuple(one[task.samples :] for one in arrays)
    np.savez(folder / INPUTS, *inputs)
    np.savez(folder / CALIBRATION, *calibration)
    built = model.build(task.weights, for_speed=True)
    missing: dict[str, str] = {}
    compute = None
    if isinstance(built, Path):
        graph = _of_file(built, folder, inputs)
    else:
        graph, compute = _of_module(built, folder, inputs)
        if {FLOAT_ONNX, STATIC_ONNX, DYNAMIC_ONNX} & set(task.files):
            one = tuple(part[:1] for part in inputs)
            _attempt(FLOAT_ONNX, missing, lambda: export(built, one, folder / FLOAT_ONNX))
    save(graph, folder / FLOAT)
    batches = [
        {name: part[i : i + 1] for name, part in zip(graph.inputs, calibration, strict=True)}
        for i in range(_CALIBRATED)
    ]

    def write(name: str, config: str) -> None:
        made, _ = quantized_graph(graph, batches, Method(config=config), compute=compute)
        save(made, folder / name)

    for name, config in ((STATIC, "static"), (DYNAMIC, "dynamic")):
        if name in task.files:
            _attempt(name, missing, partial(write, name, config))
    _onnx_runtime(folder, calibration, task.files, missing)
    bound = sized(graph, 1)
    floats = sum(np.asarray(one).nbytes for one in graph.constants.values())
    return Facts(sum(multiply_adds(bound).values()), linear_share(bound), floats, missing)


def _attempt(name: str, missing: dict[str, str], make: Callable[[], object]) -> None:
    try:
        make()
    except Exception as error:  # of foreign tools, any; the engines that need the file are told
        text = str(error).strip().splitlines()
        missing[name] = f"{type(error).__name__}: {text[0] if text else ''}"


def _of_module(network: nn.Module, folder: Path, inputs: Arrays) -> tuple[Graph, Any]:
    """The graph of a PyTorch model, with what computes it faster than NumPy; the reference is
    written."""
    import torch

    from lowbit.torch import compile
    from lowbit.torch.capture.compute import COMPUTE

    tensors = tuple(map(torch.from_numpy, inputs))
    with torch.inference_mode():
        parts = [network(*(one[i : i + 1] for one in tensors)) for i in range(len(tensors[0]))]
    np.save(folder / REFERENCE, torch.cat(parts).float().numpy())
    one = tuple(part[:1] for part in tensors)
    graph: Graph = compile(network, one).graph
    return graph, COMPUTE


def export(network: nn.Module, inputs: Arrays, path: Path) -> None:
    """Write a PyTorch model as ONNX, with any number of samples, without ONNX Script."""
    import torch

    example = tuple(map(torch.from_numpy, inputs))
    names = [f"input_{index}" for index in range(len(example))]
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it has no ONNX operator
    try:
        with contextlib.redirect_stdout(sys.stderr):
            torch.onnx.export(
                network, example, path, input_names=names, output_names=["output"],
                dynamic_axes={name: {0: "batch"} for name in (*names, "output")},
                opset_version=_OPSET, dynamo=False,
            )  # fmt: skip
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _of_file(path: Path, folder: Path, inputs: Arrays) -> Graph:
    """The graph of a model that comes as ONNX; the reference is written."""
    shutil.copyfile(path, folder / FLOAT_ONNX)
    graph = from_onnx(path)
    np.save(folder / REFERENCE, Session(graph)(*inputs))
    return graph


def _onnx_runtime(
    folder: Path, calibration: Arrays, files: Sequence[str], missing: dict[str, str]
) -> None:
    """The ONNX files that are quantized by ONNX Runtime's own tools."""
    source, ready = folder / FLOAT_ONNX, folder / "preprocessed.onnx"
    wanted = [name for name in (STATIC_ONNX, DYNAMIC_ONNX) if name in files]
    if FLOAT_ONNX in missing:
        missing |= dict.fromkeys(wanted, missing[FLOAT_ONNX])
        return
    if not wanted:
        return

    def preprocess() -> None:
        from onnxruntime.quantization import quant_pre_process  # pyright: ignore[reportMissingImports]

        quant_pre_process(source, ready, skip_symbolic_shape=True)

    def static(per_channel: bool) -> None:
        from onnxruntime.quantization import QuantFormat, QuantType, quantize_static  # pyright: ignore[reportMissingImports]

        reader: Any = _Reader(source, calibration)
        quantize_static(
            ready, folder / STATIC_ONNX, reader,
            quant_format=QuantFormat.QDQ, per_channel=per_channel,
            activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
        )  # fmt: skip

    def static_somehow() -> None:
        try:
            static(True)
        except ValueError:  # biases beside some weights per channel are more than it can do
            static(False)

    def dynamic() -> None:
        from onnxruntime.quantization import QuantType, quantize_dynamic  # pyright: ignore[reportMissingImports]

        quantize_dynamic(
            ready, folder / DYNAMIC_ONNX, per_channel=True, weight_type=QuantType.QInt8,
            op_types_to_quantize=["MatMul", "Gemm"],
        )  # fmt: skip

    _attempt(ready.name, missing, preprocess)
    if ready.name in missing:
        shutil.copyfile(source, ready)
    for name, make in ((STATIC_ONNX, static_somehow), (DYNAMIC_ONNX, dynamic)):
        if name in wanted:
            _attempt(name, missing, make)


class _Reader:
    """Samples, one by one, as ONNX Runtime's calibration asks for them."""

    def __init__(self, path: Path, calibration: Arrays) -> None:
        import onnx

        model = onnx.load(str(path), load_external_data=False).graph
        known = {one.name for one in model.initializer}
        self._names = [one.name for one in model.input if one.name not in known]
        self._rows = iter(range(len(calibration[0])))
        self._calibration = calibration

    def get_next(self) -> dict[str, Array] | None:
        row = next(self._rows, None)
        if row is None:
            return None
        parts = (one[row : row + 1] for one in self._calibration)
        return dict(zip(self._names, parts, strict=True))
