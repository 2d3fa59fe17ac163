"""OpenVINO: float32, bfloat16, and the file that ONNX Runtime's tools quantized."""

from __future__ import annotations

from typing import Any

from lowbit.bench.models.model import Array
from lowbit.bench.networks.engine import (
    FLOAT_ONNX,
    INPUTS,
    STATIC_ONNX,
    Engine,
    Opened,
    Work,
    engines,
)


class OpenVino(Engine):
    """precision: what floats are computed in; "" leaves that to OpenVINO."""

    needs = ("openvino", "onnx")
    package = ("OpenVINO", "openvino")

    def __init__(self, name: str, file: str, precision: str, config: str = "") -> None:
        self.name, self.files, self.config = name, (file,), config
        self.precision = precision

    def open(self, work: Work) -> Opened:
        import openvino  # pyright: ignore[reportMissingImports]

        core = openvino.Core()
        model = core.read_model(work.file(self.files[0]))
        shapes = [[work.batch, *one.shape[1:]] for one in work.arrays(INPUTS)]
        model.reshape(dict(zip(model.inputs, shapes, strict=True)))
        options: dict[str, Any] = {
            "INFERENCE_NUM_THREADS": work.threads,
            "PERFORMANCE_HINT": "LATENCY",
        }
        if self.precision:
            options["INFERENCE_PRECISION_HINT"] = self.precision
        compiled = core.compile_model(model, "CPU", options)
        used = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()

        def call(*arrays: Array) -> Array:
            return compiled(list(arrays))[0]

        return Opened(call, f"floats in {used}")


engines.add("OpenVINO fp32", OpenVino("OpenVINO fp32", FLOAT_ONNX, "f32"))
engines.add("OpenVINO bf16", OpenVino("OpenVINO bf16", FLOAT_ONNX, "bf16"))
engines.add("OpenVINO int8", OpenVino("OpenVINO int8", STATIC_ONNX, "", "static"))
