"""Operators as functions of torch tensors, on the CPU and on CUDA GPUs.

In short:

    from lowbit.torch.functional import softmax

    z = softmax(x)  # x: float32, bfloat16 or float16

Each is an operator `torch.ops.lowbit.*` too, with a fake for tracing, and differentiable. CUDA
tensors are served by the Triton kernels of `lowbit.kernels.triton.fast` (extra "gpu"); CPU tensors
by lowbit's kernels where there are some (`linear`), else by plain PyTorch in float64. Which kernel
serves a call, and why, `lowbit.torch.explain` tells.
"""

from __future__ import annotations

from lowbit.kernels.triton.fast.tiles import interleaved
from lowbit.torch.functional.attention import attention
from lowbit.torch.functional.attention_decode import attention_decode, write_cache
from lowbit.torch.functional.convolution import conv2d
from lowbit.torch.functional.eight_bits import int4_dynamic_matmul, quantize_rows, scaled_matmul
from lowbit.torch.functional.experts import grouped_matmul, route, routed_sum, top_experts
from lowbit.torch.functional.int4 import (
    TiledWeight,
    bmm,
    int4_matmul,
    pack_int4,
    pack_int8,
    weight_only_matmul,
)
from lowbit.torch.functional.linear import linear
from lowbit.torch.functional.rows import layer_norm, rms_norm, softmax, sum

__all__ = [
    "TiledWeight",
    "attention",
    "attention_decode",
    "bmm",
    "conv2d",
    "grouped_matmul",
    "int4_dynamic_matmul",
    "int4_matmul",
    "interleaved",
    "layer_norm",
    "linear",
    "pack_int4",
    "pack_int8",
    "quantize_rows",
    "rms_norm",
    "route",
    "routed_sum",
    "scaled_matmul",
    "softmax",
    "sum",
    "top_experts",
    "weight_only_matmul",
    "write_cache",
]
