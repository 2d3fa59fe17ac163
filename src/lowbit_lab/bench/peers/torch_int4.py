"""PyTorch's linear layers on the CPU: 4-bit weights, and the float ones that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lowbit_lab.bench.core.case import Call, Ready, implementation
from lowbit_lab.bench.peers.torch_products import MKL, ONEDNN, Torch
from lowbit_lab.bench.suites.linear import LinearProblem

if TYPE_CHECKING:
    import torch

_MIDDLE = 8
_INNER_K_TILES = 1  # without a meaning on the CPU


def read(result: torch.Tensor) -> np.ndarray:
    """A result as an array, float32 where it was bfloat16."""
    return result.float().numpy()


def _ready(of: Callable[[torch.Tensor], Call], weight: torch.Tensor) -> Ready:
    """`of` makes a call that reads the weight it is given."""
    nbytes = weight.numel() * weight.element_size()
    return Ready(of(weight), read, nbytes, lambda: of(weight.clone()))


@implementation("linear", "bfloat16", "float32")
class TorchInt4Pack(Torch):
    """`_weight_int4pack_mm_for_cpu`: weights of 4 bits, activations of bfloat16 or float32."""

    operator = "_weight_int4pack_mm_for_cpu"

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.name = f"torch int4pack {'bf16' if dtype == 'bfloat16' else 'fp32'}"
        self.fallback = dtype == "float32"
        self.remark = "scales rounded to bfloat16" if dtype == "bfloat16" else ""

    def prepare(self, problem: LinearProblem, threads: int) -> Ready:
        import torch

        dtype = getattr(torch, self.dtype)
        values = torch.from_numpy(np.ascontiguousarray(problem.values.T, np.int32))
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, _INNER_K_TILES)
        # It takes values less 8, and what is to be added to their multiples, not subtracted.
        zeros = problem.scale * (_MIDDLE - problem.zero)
        both = torch.from_numpy(np.stack([problem.scale, zeros.astype(np.float32)], axis=-1)).to(
            dtype
        )
        x = torch.from_numpy(problem.x).to(dtype)
        size = problem.case.group_size or problem.x.shape[1]

        def of(own: torch.Tensor) -> Call:
            operator: Any = torch.ops.aten._weight_int4pack_mm_for_cpu
            return partial(operator, x, own, size, both.clone())

        ready = _ready(of, packed)
        scales = both.numel() * both.element_size()
        return replace(ready, nbytes=ready.nbytes + scales)


@implementation("linear")
class TorchDynamic4Bit(Torch):
    """`_dyn_quant_matmul_4bit`: weights of 4 bits, float32 activations quantized to 8."""

    name = "torch dyn_quant 4bit"
    fallback = True
    operator = "_dyn_quant_matmul_4bit"

    def prepare(self, problem: LinearProblem, threads: int) -> Ready:
        import torch

        k, n = problem.values.shape
        if problem.case.zero_points:
            raise ValueError("it takes no zero points")
        if k % 2:
            raise ValueError(f"K is {k}; it takes even ones only")
        nibbles = np.ascontiguousarray(problem.values.T)
        pairs = torch.from_numpy(nibbles[:, 1::2] << 4 | nibbles[:, ::2])
        scales = torch.from_numpy(np.ascontiguousarray(problem.scale.T))
        size = problem.case.group_size or k
        if problem.case.group_size:  # it takes no others then
            scales = scales.bfloat16()
        pack: Any = torch.ops.aten._dyn_quant_pack_4bit_weight
        packed = pack(pairs, scales, None, size, k, n)
        x = torch.from_numpy(problem.x)

        def of(own: torch.Tensor) -> Call:
            multiply: Any = torch.ops.aten._dyn_quant_matmul_4bit
            return partial(multiply, x, own, size, k, n)

        return _ready(of, packed)


@implementation("linear", "bfloat16", "float32")
class TorchFloatLinear(Torch):
    """`torch.nn.functional.linear` in float32 or bfloat16, on the dequantized weight."""

    isolated = False

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.name = {"float32": "torch fp32", "bfloat16": "torch bf16"}[dtype]
        self.component = MKL if dtype == "float32" else ONEDNN

    def prepare(self, problem: LinearProblem, threads: int) -> Ready:
        import torch

        dtype = getattr(torch, self.dtype)
        x = torch.from_numpy(problem.x).to(dtype)
        weight = torch.from_numpy(problem.weight).T.contiguous().to(dtype)
        return _ready(lambda own: partial(torch.nn.functional.linear, x, own), weight)
