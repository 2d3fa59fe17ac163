"""ONNX Runtime's dynamic int8."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lowbit.demo.rivals import Ready, Rival, rivals

if TYPE_CHECKING:
    from torch import Tensor

    from lowbit.bench.models.networks.encoder import Batch, SentenceEncoder

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
