"""What the demo compares lowbit with: other libraries' int8, each in a process of its own.

A rival is a class of this file, which is added to `rivals`; importing the file needs nothing that
may be missing.
"""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lowbit.registry import Registry
from lowbit.registry.extras import absent

if TYPE_CHECKING:
    from torch import Tensor

    from lowbit.models.networks import Batch, SentenceEncoder


@dataclass(frozen=True)
class Ready:
    """A quantized model. call: tokens and mask to vectors [sentences, width]. bytes_on_disk: of
    the file that it is saved as. detail: a few words for the table."""

    call: Callable[[Batch], Tensor]
    bytes_on_disk: int
    detail: str


class Rival:
    """A library that can run the encoder.

    family: what it is called in the table, where only the fastest of one family stands. packages:
    the installed ones whose versions matter; others: what it needs besides. peer: whether it comes
    with the extra `peers`.
    """

    family: str
    packages: tuple[str, ...]
    others: tuple[str, ...] = ()
    peer: bool = True

    def unavailable(self) -> str | None:
        """Why it cannot run here; None if it may. Asked outside of its process."""
        return next(filter(None, map(absent, (*self.packages, *self.others))), None)

    def prepare(self, encoder: SentenceEncoder, batch: Batch, threads: int, folder: Path) -> Ready:
        """Quantize the encoder, inside of its process; `batch` is an example, `folder` is there to
        be written to."""
        raise NotImplementedError


rivals: Registry[Rival] = Registry("rival")


_INPUTS = ("tokens", "mask")


class OnnxRuntime(Rival):
    """`quantize_dynamic` with a scale for each output channel."""

    family = "ONNX Runtime int8"
    packages = ("onnxruntime",)
    others = ("onnx", "onnxscript")

    def prepare(self, encoder: SentenceEncoder, batch: Batch, threads: int, folder: Path) -> Ready:
        import onnxruntime  # pyright: ignore[reportMissingImports]
        import torch
        from onnxruntime.quantization import QuantType, quantize_dynamic  # pyright: ignore[reportMissingImports]

        exact, small = folder / "exact.onnx", folder / "int8.onnx"
        sizes = {0: torch.export.Dim("sentences"), 1: torch.export.Dim("length")}
        shapes = (sizes, sizes)
        torch.onnx.export(
            encoder, batch, exact, input_names=_INPUTS, dynamic_shapes=shapes, verbose=False
        )
        quantize_dynamic(exact, small, per_channel=True, weight_type=QuantType.QInt8)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(small, options, providers=["CPUExecutionProvider"])

        def call(batch: Batch) -> Tensor:
            given = {name: one.numpy() for name, one in zip(_INPUTS, batch, strict=True)}
            return torch.from_numpy(session.run(None, given)[0])

        return Ready(call, small.stat().st_size, "dynamic")


rivals.add("ONNX Runtime int8", OnnxRuntime())


class OpenVino(Rival):
    """Weights of 8 bits, a scale for each output channel: what its tool for compression does."""

    family = "OpenVINO int8"
    packages = ("openvino",)

    def prepare(self, encoder: SentenceEncoder, batch: Batch, threads: int, folder: Path) -> Ready:
        import openvino  # pyright: ignore[reportMissingImports]
        import torch

        model = openvino.convert_model(encoder, example_input=batch)
        _compress(model)
        path = folder / "model.xml"
        openvino.save_model(model, path, compress_to_fp16=False)
        options = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        compiled = openvino.Core().compile_model(model, "CPU", options)
        precision = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()

        def call(batch: Batch) -> Tensor:
            return torch.from_numpy(compiled([one.numpy() for one in batch])[0])

        size = sum(one.stat().st_size for one in (path, path.with_suffix(".bin")))
        return Ready(call, size, f"int8 weights, {precision}")


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


rivals.add("OpenVINO int8", OpenVino())


_DEPRECATED = ("torch.ao.quantization is", "TypedStorage is", "torch.quantize_per_")


class TorchInt8(Rival):
    """Weights get a scale per output channel, as lowbit's do: as fast as PyTorch's default of one
    scale per weight, and closer to the float model."""

    family = "PyTorch int8"
    packages = ("torch",)
    peer = False

    def __init__(self, engine: str) -> None:
        self.engine = engine

    def unavailable(self) -> str | None:
        import torch

        engines = torch.backends.quantized.supported_engines
        return None if self.engine in engines else "this PyTorch was built without it"

    def prepare(self, encoder: SentenceEncoder, batch: Batch, threads: int, folder: Path) -> Ready:
        import torch
        from torch.ao.quantization.qconfig import per_channel_dynamic_qconfig

        torch.backends.quantized.engine = self.engine
        with warnings.catch_warnings():
            for text in _DEPRECATED:
                warnings.filterwarnings("ignore", message=f"{text}.*deprecated")
            scheme = {torch.nn.Linear: per_channel_dynamic_qconfig}
            model = torch.ao.quantization.quantize_dynamic(encoder, scheme, dtype=torch.qint8)
        path = folder / "model"
        torch.save(model.state_dict(), path)  # its packed weights know no other format
        return Ready(lambda batch: model(*batch), path.stat().st_size, f"dynamic, {self.engine}")


# qnnpack is made for phones; elsewhere it is no rival.
for _engine in ("x86", "fbgemm", "onednn"):
    rivals.add(f"PyTorch int8 {_engine}", TorchInt8(_engine))


_COMPILE_SECONDS = 60


class Torchao(Rival):
    """`Int8DynamicActivationInt8WeightConfig`."""

    family = "torchao int8"
    packages = ("torchao",)

    def prepare(self, encoder: SentenceEncoder, batch: Batch, threads: int, folder: Path) -> Ready:
        import torch
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_  # pyright: ignore[reportMissingImports]

        quantize_(encoder, Int8DynamicActivationInt8WeightConfig())
        path = folder / "model"
        torch.save(encoder.state_dict(), path)
        model, detail = torch.compile(encoder, dynamic=True), "dynamic, compiled"
        try:
            with _at_most(_COMPILE_SECONDS):
                for count in (len(batch[0]), 1):  # a size of 1 is compiled by itself
                    model(*(one[:count] for one in batch))
        except Exception:  # not in time, or without a C++ compiler, and then for many reasons
            torch.compiler.reset()
            model, detail = encoder, "dynamic, eager"
        return Ready(lambda batch: model(*batch), path.stat().st_size, detail)


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


rivals.add("torchao int8", Torchao())
