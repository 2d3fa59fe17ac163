"""OpenVINO with int8 weights; it chooses what it computes with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lowbit.demo.rivals import Ready, Rival, rivals

if TYPE_CHECKING:
    from torch import Tensor

    from lowbit.bench.models.networks.encoder import Batch, SentenceEncoder


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
