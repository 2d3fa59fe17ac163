"""What PyTorch multiplies: floats, and integers of 8 and 4 bits."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lowbit.bench.core.case import Call, Implementation, Ready, implementation
from lowbit.bench.suites.linear import Task
from lowbit.bench.suites.matmul.problem import Array, Problem, Product
from lowbit.spec.operations.products import matmul

if TYPE_CHECKING:
    import torch


# What PyTorch multiplies without quantized layers: float32, and 8-bit integers to sums.

MKL = ("MKL", r"Math Kernel Library Version (\S+?)-")
ONEDNN = ("oneDNN", r"MKL-DNN v(\S+)")
FBGEMM = ("FBGEMM", r"FBGEMM v(\S+)")

BYTES = ("u8:s8", "s8:s8")


class SumsOnly(Implementation):
    """An implementation that stops at the integer sums where the case goes on."""

    def note(self, case: Product) -> str:
        only = "" if case.spec is matmul else "32-bit sums, neither scaled nor rounded"
        return "; ".join(filter(None, (only, self.remark)))


class Torch(Implementation):
    """What the peers inside PyTorch share."""

    isolated = True
    needs = ("torch",)
    component: tuple[str, str] | None = None
    """Name and pattern of its version in torch's build configuration."""
    engine: str = ""
    """The engine of torch's quantized operators that it needs, "" if none."""
    operator: str = ""
    """Of torch.ops.aten, where not every PyTorch has it."""

    def available(self, case: Any) -> str | None:
        if (reason := super().available(case)) is not None:
            return reason
        import torch

        engines = torch.backends.quantized.supported_engines
        if self.engine and self.engine not in engines:
            return f"this PyTorch has no engine {self.engine}; it has {', '.join(engines)}"
        if self.operator and not hasattr(torch.ops.aten, self.operator):
            return f"PyTorch {torch.__version__} has no operator {self.operator}"
        return None

    def library(self) -> tuple[str, str]:
        import torch

        if self.component is None:
            return "torch", str(torch.__version__)
        inside = f"torch {torch.__version__}"
        name, pattern = self.component
        match = re.search(pattern, torch.__config__.show())
        return name, f"{match[1]} in {inside}" if match else f"in {inside}"


@implementation("matmul")
class TorchFloat(Torch):
    """PyTorch's float32 product on the float version of the data: MKL on x86-64."""

    name = "torch fp32"
    isolated = False
    component = MKL
    remark = "float32 data and result"

    def prepare(self, problem: Problem, threads: int) -> Ready:
        import torch

        a, b = torch.from_numpy(problem.a_float), torch.from_numpy(problem.b_float.copy())

        def read(result: torch.Tensor) -> Array:
            return problem.from_real(result.numpy())

        return Ready(partial(torch.mm, a, b), read)


@implementation("matmul")
class TorchIntMm(SumsOnly, Torch):
    """`torch._int_mm`: 8-bit integers to int32, weights not packed in advance."""

    name = "torch _int_mm"
    component = ONEDNN
    takes = BYTES
    remark = "weights not packed"

    def prepare(self, problem: Problem, threads: int) -> Ready:
        import torch

        a, b = torch.from_numpy(problem.a), torch.from_numpy(problem.b.copy())
        call = partial(torch.ops.aten._int_mm.default, a, b)
        return Ready(call, lambda result: problem.from_sums(np.asarray(result)))


# PyTorch's quantized linear layers: on oneDNN and on FBGEMM, static and dynamic.


@implementation("matmul")
class OnednnLinear(Torch):
    """oneDNN through torch's qlinear: 8-bit integers to float32 or to 8 bits, weights packed."""

    name = "oneDNN qlinear"
    component = ONEDNN
    engine = "onednn"
    takes = BYTES

    def prepare(self, problem: Problem, threads: int) -> Ready:
        import torch

        m, n, k = (problem.case.sizes[dim] for dim in "MNK")
        weight = torch.from_numpy(np.ascontiguousarray(problem.b.T))
        scale, zero_point = problem.out_quantization if problem.quantizes else (1.0, 0)
        call = partial(
            torch.ops.onednn.qlinear_pointwise.default,
            torch.from_numpy(problem.a),
            problem.a_scale or 1.0,
            problem.a_zero_point or 0,
            torch.ops.onednn.qlinear_prepack(weight, [m, k]),
            torch.from_numpy(_scales(problem)),
            torch.zeros(n, dtype=torch.int32),
            None,
            scale,
            zero_point,
            torch.uint8 if problem.quantizes else torch.float32,
            "none",
            [],
            "",
        )
        return Ready(call)


@implementation("matmul")
class FbgemmLinear(Torch):
    """FBGEMM through torch's quantized linear, which makes 8 bits of the result again.

    torch has no FBGEMM layer from 8 bits to float32. Where that is asked for, this does the same
    work but for the last store, of a quarter of the bytes, which is in its favour.
    """

    name = "FBGEMM qlinear"
    component = FBGEMM
    engine = "fbgemm"
    takes = ("u8:s8",)

    def note(self, case: Product) -> str:
        return "" if case.dtypes.endswith(":u8") else "u8 result"

    def prepare(self, problem: Problem, threads: int) -> Ready:
        import torch

        scale, zero_point = problem.out_quantization
        with _quantized_tensors("fbgemm"):
            x = torch.quantize_per_tensor(
                torch.from_numpy(problem.a_float),
                problem.a_scale or 1.0,
                problem.a_zero_point or 0,
                torch.quint8,
            )
        linear = torch.ops.quantized.linear.default
        call = partial(linear, x, _packed_linear(problem, "fbgemm"), scale, zero_point)

        def read(result: torch.Tensor) -> Array:
            return (result.int_repr() if problem.quantizes else result.dequantize()).numpy()

        return Ready(call, read)


@implementation("matmul", ONEDNN, FBGEMM)
class TorchDynamic(Torch):
    """torch's dynamic linear: one scale for the whole activation, found in each call."""

    takes = ("f32:s8",)
    remark = "one scale for all rows"

    def __init__(self, component: tuple[str, str]) -> None:
        self.component = component
        self.name = f"{component[0]} dynamic"
        self.engine = component[0].lower()

    def prepare(self, problem: Problem, threads: int) -> Ready:
        import torch

        weight = _packed_linear(problem, self.engine)
        x = torch.from_numpy(problem.a)
        return Ready(partial(torch.ops.quantized.linear_dynamic.default, x, weight, False))


def _scales(problem: Problem) -> NDArray[np.float32]:
    """The weight's scale per output channel: 1 where the operation has none."""
    if problem.b_scale is None:
        return np.ones(problem.b.shape[1], np.float32)
    return problem.b_scale


@contextmanager
def _quantized_tensors(engine: str) -> Iterator[None]:
    """torch's quantized operators on `engine`, without the notice that their tensors will go."""
    import torch

    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = engine
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*quantized tensor creation functions.*")
            yield
    finally:
        torch.backends.quantized.engine = before


def _packed_linear(problem: Problem, engine: str) -> torch.ScriptObject:
    """The weight as torch's quantized operators take it, packed for `engine`.

    Rounding b_float / scale gives b again, exactly: float32 keeps far more than its 8 bits.
    """
    import torch

    with _quantized_tensors(engine):
        weight = torch.quantize_per_channel(
            torch.from_numpy(np.ascontiguousarray(problem.b_float.T)),
            torch.from_numpy(_scales(problem)),
            torch.zeros(problem.b.shape[1], dtype=torch.int64),
            0,
            torch.qint8,
        )
        return torch.ops.quantized.linear_prepack(weight, None)


# PyTorch's linear layers on the CPU: 4-bit weights, and the float ones that they stand for.

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

    def prepare(self, problem: Task, threads: int) -> Ready:
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

    def prepare(self, problem: Task, threads: int) -> Ready:
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

    def prepare(self, problem: Task, threads: int) -> Ready:
        import torch

        dtype = getattr(torch, self.dtype)
        x = torch.from_numpy(problem.x).to(dtype)
        weight = torch.from_numpy(problem.weight).T.contiguous().to(dtype)
        return _ready(lambda own: partial(torch.nn.functional.linear, x, own), weight)
