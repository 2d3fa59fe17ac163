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

from lowbit.torch.config import (  # noqa: E402
    Int4DynamicConfig,
    Int4WeightOnlyConfig,
    Int8DynamicConfig,
    QuantizeConfig,
    config_from_json,
)
from lowbit.torch.explain import explain  # noqa: E402
from lowbit.torch.files import load, save  # noqa: E402
from lowbit.torch.linear import QuantizedLinear  # noqa: E402
from lowbit.torch.quantize import quantize_  # noqa: E402
from lowbit.torch.weight import QuantizedWeight  # noqa: E402

__all__ = [
    "Int4DynamicConfig",
    "Int4WeightOnlyConfig",
    "Int8DynamicConfig",
    "QuantizeConfig",
    "QuantizedLinear",
    "QuantizedWeight",
    "config_from_json",
    "explain",
    "load",
    "quantize_",
    "save",
]
