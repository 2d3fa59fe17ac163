"""lowbit multiplies matrices of few bits, from Python, at the speed of the hardware.

lowbit.matmul(a, b)         exact product of int8 or uint8 matrices, int32 out
lowbit.linear_weight_only   float activations by weights with a scale for each group
lowbit.convolution(x, w)    of 8-bit images, in any number of dimensions
lowbit.pack(b)              an operand packed once, for many products
lowbit.VectorIndex(dim)     vectors of 8 or 4 bits each, to be searched for the nearest
lowbit.quantize(x, "int8")  floats to integers with scales, a QTensor
lowbit.torch.quantize_      a PyTorch model, in place (needs the extra "torch")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowbit.api import gemm, linear_dynamic, linear_weight_only, matmul, matmul_scaled, pack
    from lowbit.kernels.cpu.shared.post_ops import Clamp, LeakyRelu, QuantizedResidual
    from lowbit.numerics import QTensor
    from lowbit.product.convolve import convolution
    from lowbit.search.index import VectorIndex
    from lowbit.weights.convolution import PackedConvolution, pack_convolution
    from lowbit.weights.packed_file import load_packed, save_packed
    from lowbit.weights.panels import PackedMatrix
    from lowbit.weights.quantize import quantize

__version__ = "0.1.0"

__all__ = [
    "Clamp",
    "LeakyRelu",
    "PackedConvolution",
    "PackedMatrix",
    "QTensor",
    "QuantizedResidual",
    "VectorIndex",
    "__version__",
    "convolution",
    "gemm",
    "linear_dynamic",
    "linear_weight_only",
    "load_packed",
    "matmul",
    "matmul_scaled",
    "pack",
    "pack_convolution",
    "quantize",
    "save_packed",
]

# A name's module is imported when the name is first used, and with it what that needs.
_MODULES = {
    "Clamp": "lowbit.kernels.cpu.shared.post_ops",
    "LeakyRelu": "lowbit.kernels.cpu.shared.post_ops",
    "PackedConvolution": "lowbit.weights.convolution",
    "PackedMatrix": "lowbit.weights.panels",
    "QTensor": "lowbit.numerics",
    "QuantizedResidual": "lowbit.kernels.cpu.shared.post_ops",
    "VectorIndex": "lowbit.search.index",
    "convolution": "lowbit.product.convolve",
    "gemm": "lowbit.api",
    "linear_dynamic": "lowbit.api",
    "linear_weight_only": "lowbit.api",
    "load_packed": "lowbit.weights.packed_file",
    "matmul": "lowbit.api",
    "matmul_scaled": "lowbit.api",
    "pack": "lowbit.api",
    "pack_convolution": "lowbit.weights.convolution",
    "quantize": "lowbit.weights.quantize",
    "save_packed": "lowbit.weights.packed_file",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    locks = importlib.import_module("lowbit.registry.locks")
    with locks.importing():
        value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
