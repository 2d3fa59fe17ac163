"""ONNX Runtime, on float files and on those that its own tools quantized."""

from __future__ import annotations

import numpy as np

from lowbit.bench.models.model import Array
from lowbit.bench.networks.engine import (
    DYNAMIC_ONNX,
    FLOAT_ONNX,
    STATIC_ONNX,
    Engine,
    Opened,
    Work,
    engines,
)


class OnnxRuntime(Engine):
    """Its CPU provider."""

    needs = ("onnxruntime", "onnx")
    package = ("ONNX Runtime", "onnxruntime")

    def __init__(self, name: str, file: str, config: str = "") -> None:
        self.name, self.files, self.config = name, (file,), config

    def open(self, work: Work) -> Opened:
        import onnxruntime  # pyright: ignore[reportMissingImports]

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = work.threads
        options.log_severity_level = 3
        path = str(work.file(self.files[0]))
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        names = [one.name for one in session.get_inputs()]

        def call(*arrays: Array) -> Array:
            return np.asarray(session.run(None, dict(zip(names, arrays, strict=True)))[0])

        return Opened(call)


engines.add("ONNX Runtime fp32", OnnxRuntime("ONNX Runtime fp32", FLOAT_ONNX))
engines.add("ONNX Runtime int8", OnnxRuntime("ONNX Runtime int8", STATIC_ONNX, "static"))
engines.add("ONNX Runtime dynamic", OnnxRuntime("ONNX Runtime dynamic", DYNAMIC_ONNX, "dynamic"))
