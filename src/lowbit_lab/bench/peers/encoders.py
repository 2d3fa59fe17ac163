"""Engines that quantize the sentence encoder in their own way, for sentences of any length."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lowbit import graph
from lowbit.models.model import Array, models
from lowbit_lab.bench.core.case import OURS, implementation
from lowbit_lab.bench.networks.engine import INPUTS, Engine, NetworkWork, Opened
from lowbit_lab.bench.peers.networks import onnx_call, openvino_call


class _Encoder(Engine):
    """An engine that quantizes the module itself, and needs no prepared file."""

    models = ("minilm",)

    def __init__(self) -> None:
        super().__init__(self.name, config="dynamic")

    def open(self, work: NetworkWork) -> Opened:
        import torch

        torch.set_num_threads(work.threads)
        encoder: Any = models.get(work.model).build(work.weights, for_speed=True)
        example = tuple(map(torch.from_numpy, work.arrays(INPUTS)))
        with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
            return self.quantize(encoder, example, work.threads, Path(folder))

    def quantize(self, encoder: Any, example: Any, threads: int, folder: Path) -> Opened:
        """Quantize a module; `example` are its inputs, `folder` is there to be written to."""
        raise NotImplementedError


def _on_arrays(model: Any) -> Callable[..., Array]:
    import torch

    def call(*arrays: Array) -> Array:
        with torch.inference_mode():
            return model(*map(torch.from_numpy, arrays)).numpy()

    return call


def _opened(call: Any, detail: str, *files: Path) -> Opened:
    size = sum(one.stat().st_size for one in files)
    return Opened(call, detail, lambda: {"file_bytes": size})


GROUP = 32  # the model's rows are short, 384 and 1536; the default of 128 costs it accuracy
CONFIGS: dict[str, tuple[str, dict[str, int]]] = {
    "int8": ("Int8DynamicConfig", {}),
    "int8 layers": ("Int8DynamicConfig", {}),
    "W4A8": ("Int4DynamicConfig", {"group_size": GROUP}),
    "W4A32": ("Int4WeightOnlyConfig", {"group_size": GROUP}),
}


@implementation("networks", *CONFIGS)
class LowbitEncoder(_Encoder):
    """`quantize_` of linear layers alone, as the others quantize; then `compile`, so that a call is
    one for the whole network, unless its layers are to be called by PyTorch."""

    kind = OURS

    def __init__(self, scheme: str) -> None:
        self.name, self.scheme = f"lowbit torch {scheme}", scheme
        super().__init__()

    def quantize(self, encoder: Any, example: Any, threads: int, folder: Path) -> Opened:
        import lowbit.torch as ours

        name, options = CONFIGS[self.scheme]
        model = ours.quantize_(encoder, getattr(ours, name)(**options, embeddings=None))
        path = folder / "model"
        if self.scheme.endswith("layers"):
            ours.save(model, path)
            return _opened(_on_arrays(model), "without compile", path)
        compiled = ours.compile(model, example, dynamic_shapes=True)
        graph.save(compiled.graph, path)
        return _opened(_on_arrays(compiled), name, path)


@implementation("networks")
class OnnxRuntimeEncoder(_Encoder):
    """`quantize_dynamic` with a scale for each output channel."""

    name = "ONNX Runtime any length"
    needs = ("onnxruntime", "onnx", "onnxscript")
    package = ("ONNX Runtime", "onnxruntime")

    def quantize(self, encoder: Any, example: Any, threads: int, folder: Path) -> Opened:
        import torch
        from onnxruntime.quantization import QuantType, quantize_dynamic  # pyright: ignore[reportMissingImports]

        exact, small = folder / "exact.onnx", folder / "int8.onnx"
        sizes = {0: torch.export.Dim("sentences"), 1: torch.export.Dim("length")}
        names, shapes = ("tokens", "mask"), (sizes, sizes)
        torch.onnx.export(
            encoder, example, exact, input_names=names, dynamic_shapes=shapes, verbose=False
        )
        quantize_dynamic(exact, small, per_channel=True, weight_type=QuantType.QInt8)
        return _opened(onnx_call(small, threads), "dynamic", small)


@implementation("networks")
class OpenVinoEncoder(_Encoder):
    """Weights of 8 bits, a scale for each output channel: what its tool for compression does."""

    name = "OpenVINO int8 weights"
    needs = ("openvino",)
    package = ("OpenVINO", "openvino")

    def quantize(self, encoder: Any, example: Any, threads: int, folder: Path) -> Opened:
        import openvino  # pyright: ignore[reportMissingImports]

        model = openvino.convert_model(encoder, example_input=example)
        _compress(model)
        path = folder / "model.xml"
        openvino.save_model(model, path, compress_to_fp16=False)
        call, precision = openvino_call(model, threads)
        return _opened(call, f"int8 weights, {precision}", path, path.with_suffix(".bin"))


def _compress(model: Any) -> None:
    """Make the constant right operands of products int8, with what turns them back."""
    from openvino import opset13 as operators  # pyright: ignore[reportMissingImports]

    for node in model.get_ops():
        source = node.input_value(1).get_node() if node.get_type_name() == "MatMul" else None
        if source is None or source.get_type_name() != "Constant":
            continue
        weight = source.data
        axis = 1 if node.get_attributes()["transpose_b"] else 0
        scale = np.abs(weight).max(axis=axis, keepdims=True) / np.float32(127)
        scale[scale == 0] = 1
        values = operators.constant(np.rint(weight / scale).astype(np.int8))
        restored = operators.multiply(
            operators.convert(values, "f32"), operators.constant(scale.astype(np.float32))
        )
        node.input(1).replace_source_output(restored.output(0))


_COMPILE_SECONDS = 60


@implementation("networks")
class TorchaoEncoder(_Encoder):
    """`Int8DynamicActivationInt8WeightConfig`."""

    name = "torchao int8"
    needs = ("torchao",)
    package = ("torchao", "torchao")

    def quantize(self, encoder: Any, example: Any, threads: int, folder: Path) -> Opened:
        import torch
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_  # pyright: ignore[reportMissingImports]

        quantize_(encoder, Int8DynamicActivationInt8WeightConfig())
        path = folder / "model"
        torch.save(encoder.state_dict(), path)
        model, detail = torch.compile(encoder, dynamic=True), "dynamic, compiled"
        try:
            with _at_most(_COMPILE_SECONDS):
                for count in (len(example[0]), 1):  # a size of 1 is compiled by itself
                    model(*(one[:count] for one in example))
        except Exception:  # not in time, or without a C++ compiler, and then for many reasons
            torch.compiler.reset()
            model, detail = encoder, "dynamic, eager"

        return _opened(_on_arrays(model), detail, path)


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """TimeoutError in a block that takes longer."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
