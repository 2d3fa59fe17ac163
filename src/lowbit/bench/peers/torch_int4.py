"""PyTorch's linear layers on the CPU: 4-bit weights, and the float ones that they stand for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lowbit.bench.linear_problem import Call, LinearTask, Ready
from lowbit.bench.peers.torch_products import MKL, ONEDNN, Torch
from lowbit.registry.extras import absent

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
    return Ready(of(weight), nbytes, lambda: of(weight.clone()), read)


class _TorchLinear(ABC):
    """What the layers here share."""

    name: str
    activations = ""
    isolated = False
    fallback = False
    operator = ""
    """Of torch.ops.aten, where not every PyTorch has it."""
    component: tuple[str, str] | None = None

    def available(self) -> str | None:
        if (reason := absent("torch")) is not None:
            return reason
        import torch

        if self.operator and not hasattr(torch.ops.aten, self.operator):
            return f"PyTorch {torch.__version__} has no operator {self.operator}"
        return None

    def library(self) -> tuple[str, str]:
        inside = Torch()
        inside.component = self.component
        return inside.library()

    def note(self) -> str:
        return ""

    @abstractmethod
    def prepare(self, task: LinearTask, threads: int) -> Ready: ...


class TorchFloatLinear(_TorchLinear):
    """`torch.nn.functional.linear` in float32 or bfloat16, on the dequantized weight."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.name = {"float32": "torch fp32", "bfloat16": "torch bf16"}[dtype]
        self.component = MKL if dtype == "float32" else ONEDNN

    def prepare(self, task: LinearTask, threads: int) -> Ready:
        import torch

        dtype = getattr(torch, self.dtype)
        x = torch.from_numpy(task.x).to(dtype)
        weight = torch.from_numpy(task.weight).T.contiguous().to(dtype)
        return _ready(lambda own: partial(torch.nn.functional.linear, x, own), weight)


class TorchInt4Pack(_TorchLinear):
    """`_weight_int4pack_mm_for_cpu`: weights of 4 bits, activations of bfloat16 or float32."""

    isolated = True
    operator = "_weight_int4pack_mm_for_cpu"

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.name = f"torch int4pack {'bf16' if dtype == 'bfloat16' else 'fp32'}"
        self.fallback = dtype == "float32"

    def note(self) -> str:
        return "scales rounded to bfloat16" if self.dtype == "bfloat16" else ""

    def prepare(self, task: LinearTask, threads: int) -> Ready:
        import torch

        dtype = getattr(torch, self.dtype)
        values = torch.from_numpy(np.ascontiguousarray(task.values.T, np.int32))
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, _INNER_K_TILES)
        # It takes values less 8, and what is to be added to their multiples, not subtracted.
        zeros = task.scale * (_MIDDLE - task.zero)
        both = torch.from_numpy(np.stack([task.scale, zeros.astype(np.float32)], axis=-1)).to(dtype)
        x = torch.from_numpy(task.x).to(dtype)
        size = task.shape.group_size or task.shape.k

        def of(own: torch.Tensor) -> Call:
            operator: Any = torch.ops.aten._weight_int4pack_mm_for_cpu
            return partial(operator, x, own, size, both.clone())

        ready = _ready(of, packed)
        scales = both.numel() * both.element_size()
        return Ready(ready.call, ready.nbytes + scales, ready.again, ready.read)


class TorchDynamic4Bit(_TorchLinear):
    """`_dyn_quant_matmul_4bit`: weights of 4 bits, float32 activations quantized to 8."""

    name = "torch dyn_quant 4bit"
    isolated = True
    fallback = True
    operator = "_dyn_quant_matmul_4bit"

    def prepare(self, task: LinearTask, threads: int) -> Ready:
        import torch

        shape = task.shape
        if shape.zero_points:
            raise ValueError("it takes no zero points")
        if shape.k % 2:
            raise ValueError(f"K is {shape.k}; it takes even ones only")
        nibbles = np.ascontiguousarray(task.values.T)
        pairs = torch.from_numpy(nibbles[:, 1::2] << 4 | nibbles[:, ::2])
        scales = torch.from_numpy(np.ascontiguousarray(task.scale.T))
        size = shape.group_size or shape.k
        if shape.group_size:  # it takes no others then
            scales = scales.bfloat16()
        pack: Any = torch.ops.aten._dyn_quant_pack_4bit_weight
        packed = pack(pairs, scales, None, size, shape.k, shape.n)
        x = torch.from_numpy(task.x)

        def of(own: torch.Tensor) -> Call:
            multiply: Any = torch.ops.aten._dyn_quant_matmul_4bit
            return partial(multiply, x, own, size, shape.k, shape.n)

        return _ready(of, packed)


def peers() -> tuple[_TorchLinear, ...]:
    """All of them."""
    return (
        TorchInt4Pack("bfloat16"),
        TorchInt4Pack("float32"),
        TorchDynamic4Bit(),
        TorchFloatLinear("bfloat16"),
        TorchFloatLinear("float32"),
    )
