"""Quantize PyTorch models in place, run them on lowbit's kernels, save and load them.

In short:

    from lowbit.torch import Int8DynamicConfig, load, quantize_, save

    quantize_(model, Int8DynamicConfig())
    save(model, "model.safetensors")
    load(MyModel(), "model.safetensors")
"""

from __future__ import annotations

from importlib.util import find_spec

_missing = [name for name in ("torch", "safetensors") if find_spec(name) is None]
if _missing:
    raise ModuleNotFoundError(
        f"lowbit.torch needs {' and '.join(_missing)}; install with: pip install 'lowbit[torch]'",
        name=_missing[0],
    )

from lowbit.torch.config import (  # noqa: E402
    Int4DynamicConfig,
    Int4WeightOnlyConfig,
    Int8DynamicConfig,
    QuantizeConfig,
    config_from_json,
)
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
    "load",
    "quantize_",
    "save",
]
