"""Fast operators on GPUs, as functions of torch tensors and as `torch.ops.lowbit.*`.

In short:

    from lowbit.gpu import softmax

    z = softmax(x)  # x: float32, bfloat16 or float16 on a GPU

CPU tensors are served by plain PyTorch, so that a model runs without a GPU too.
"""

from __future__ import annotations

from importlib.util import find_spec

_missing = [name for name in ("torch", "triton") if find_spec(name) is None]
if _missing:
    raise ModuleNotFoundError(
        f"lowbit.gpu needs {' and '.join(_missing)}; install with: pip install 'lowbit[gpu]'",
        name=_missing[0],
    )

from lowbit.gpu.attention import attention  # noqa: E402
from lowbit.gpu.convolution import conv2d  # noqa: E402
from lowbit.gpu.int4 import Int4Weight, int4_matmul, pack_int4  # noqa: E402
from lowbit.gpu.products import batched_matmul  # noqa: E402
from lowbit.gpu.rows import layer_norm, rms_norm, row_sum, softmax  # noqa: E402

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
