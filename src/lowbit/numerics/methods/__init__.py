"""Ways to quantize a weight so that its layer's output, not each number, stays what it was.

    known = Activations.of(first) + Activations.of(second)
    result = methods.get("gptq")(dtype="uint4", group_size=128).quantize(weight, known)

One file a method; all are called alike. What needs two layers or a bias is a function:
`equalization`, `bias_correction`. docs/calibration.md says when to choose which.
"""

from __future__ import annotations

from lowbit.numerics.methods.activations import Activations
from lowbit.numerics.methods.data_free import bias_correction, equalization
from lowbit.numerics.methods.method import Method, QuantizedWeight, methods, output_error

__all__ = [
    "Activations",
    "Method",
    "QuantizedWeight",
    "bias_correction",
    "equalization",
    "methods",
    "output_error",
]
