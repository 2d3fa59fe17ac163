"""Quantize PyTorch models in place, run them on lowbit's kernels, save and load them.

In short:

    from lowbit.torch import Int8DynamicConfig, load, quantize_, save

    quantize_(model, Int8DynamicConfig())
    save(model, "model.safetensors")
    load(MyModel(), "model.safetensors")
"""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("torch") is None:
    raise ModuleNotFoundError(
        "lowbit.torch needs torch; install with: pip install 'lowbit[torch]'", name="torch"
    )

from lowbit.torch.config import (
    Int4DynamicConfig,
    Int4WeightOnlyConfig,
    Int8DynamicConfig,
    QuantizeConfig,
    config_from_json,
)
from lowbit.torch.files import load, save
from lowbit.torch.linear import QuantizedLinear
from lowbit.torch.quantize import quantize_
from lowbit.torch.weight import QuantizedWeight

__all__ = [
    "Int4DynamicConfig",
    "Int4WeightOnlyConfig",
    "Int8DynamicConfig",
    "QuantizeConfig",
    "QuantizedLinear",
    "QuantizedWeight",
    "config_from_json",
    "load",
    "quantize_",
    "save",
]
