"""Fast operators on GPUs, as functions of torch tensors and as `torch.ops.lowbit.*`.

In short:

    from lowbit.gpu import softmax

    z = softmax(x)  # x: float32, bfloat16 or float16 on a GPU

CPU tensors are served by plain PyTorch, so that a model runs without a GPU too.
"""

from __future__ import annotations

import re
import warnings

from lowbit.registry.extras import install, require

require("lowbit.gpu", "gpu", "torch", "triton")

import triton  # noqa: E402

from lowbit.kernels.triton import NEWEST, OLDEST  # noqa: E402

_known = "lowbit.gpu is made for Triton {}.{} to {}.{}".format(*OLDEST, *NEWEST)
_known += f" and this is {triton.__version__}; {install('gpu')}"
try:
    from lowbit.gpu.attention import attention
    from lowbit.gpu.convolution import conv2d
    from lowbit.gpu.int4 import Int4Weight, int4_matmul, pack_int4
    from lowbit.gpu.products import batched_matmul
    from lowbit.gpu.rows import layer_norm, rms_norm, row_sum, softmax
except ImportError as error:
    raise ImportError(f"{_known} ({error})", name=error.name) from None
if not OLDEST <= tuple(map(int, re.findall(r"\d+", triton.__version__)[:2])) <= NEWEST:
    warnings.warn(_known, stacklevel=2)

__all__ = [
    "Int4Weight",
    "attention",
    "batched_matmul",
    "conv2d",
    "int4_matmul",
    "layer_norm",
    "pack_int4",
    "rms_norm",
    "row_sum",
    "softmax",
]
