"""Quantization arithmetic on NumPy arrays: formats, the affine map, quantized tensors.

This package says what lowbit's numbers mean. Of lowbit it imports only the registry, and the
kernels are tested against it. Its packages: `observers` find ranges in batches of data,
`methods` quantize a weight with regard to its inputs.
"""

from __future__ import annotations

from lowbit.numerics.affine import (
    affine_parameters,
    check_finite,
    dequantize_affine,
    quantize_affine,
    quantize_rows,
)
from lowbit.numerics.formats import IntDtype, IntFormat, int_format, longest_sum
from lowbit.numerics.gptq import GPTQLayer, read_gptq
from lowbit.numerics.nibbles import from_int32, pack_nibbles, to_int32, unpack_nibbles
from lowbit.numerics.qtensor import QTensor, quantize
from lowbit.numerics.ranges import Range

__all__ = [
    "GPTQLayer",
    "IntDtype",
    "IntFormat",
    "QTensor",
    "Range",
    "affine_parameters",
    "check_finite",
    "dequantize_affine",
    "from_int32",
    "int_format",
    "longest_sum",
    "pack_nibbles",
    "quantize",
    "quantize_affine",
    "quantize_rows",
    "read_gptq",
    "to_int32",
    "unpack_nibbles",
]
