"""Quantize PyTorch models in place, run them on lowbit's kernels, save and load them.

In short:

    from lowbit.torch import Int8DynamicConfig, load, quantize_, save

    quantize_(model, Int8DynamicConfig())
    save(model, "model.safetensors")
    load(MyModel(), "model.safetensors")
"""

from __future__ import annotations

from lowbit.registry.extras import require

require("lowbit.torch", "torch", "torch")

from lowbit.torch.capture.export import to_graph  # noqa: E402
from lowbit.torch.checkpoint import quantize_checkpoint  # noqa: E402
from lowbit.torch.config import (  # noqa: E402
    Int4DynamicConfig,
    Int4WeightOnlyConfig,
    Int8DynamicConfig,
    QuantizeConfig,
    StaticInt8Config,
    config_from_json,
)
from lowbit.torch.files import load, save  # noqa: E402
from lowbit.torch.kinds import QuantizedLinear  # noqa: E402
from lowbit.torch.network import CompiledModule, compile  # noqa: E402
from lowbit.torch.quantize import quantize_  # noqa: E402
from lowbit.torch.static import PreparedModule, convert, mixed, prepare, sensitivity  # noqa: E402  # noqa: E402
from lowbit.torch.summary import (  # noqa: E402
    LayerSummary,
    Summary,
    explain,
    summary,
)
from lowbit.torch.weight import QuantizedWeight  # noqa: E402

__all__ = [
    "CompiledModule",
    "Int4DynamicConfig",
    "Int4WeightOnlyConfig",
    "Int8DynamicConfig",
    "LayerSummary",
    "PreparedModule",
    "QuantizeConfig",
    "QuantizedLinear",
    "QuantizedWeight",
    "StaticInt8Config",
    "Summary",
    "compile",
    "config_from_json",
    "convert",
    "explain",
    "load",
    "mixed",
    "prepare",
    "quantize_",
    "quantize_checkpoint",
    "save",
    "sensitivity",
    "summary",
    "to_graph",
]
