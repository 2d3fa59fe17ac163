"""What PyTorch multiplies without quantized layers: float32, and 8-bit integers to sums."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np

from lowbit.spec.operations.products import matmul
from lowbit_lab.bench.core.case import Implementation, Ready, implementation
from lowbit_lab.bench.suites.matmul.problem import Array, MatmulCase, MatmulProblem

MKL = ("MKL", r"Math Kernel Library Version (\S+?)-")
ONEDNN = ("oneDNN", r"MKL-DNN v(\S+)")
FBGEMM = ("FBGEMM", r"FBGEMM v(\S+)")

BYTES = ("u8:s8", "s8:s8")


class SumsOnly(Implementation):
    """An implementation that stops at the integer sums where the case goes on."""

    def note(self, case: MatmulCase) -> str:
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

    def prepare(self, problem: MatmulProblem, threads: int) -> Ready:
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

    def prepare(self, problem: MatmulProblem, threads: int) -> Ready:
        import torch

        a, b = torch.from_numpy(problem.a), torch.from_numpy(problem.b.copy())
        call = partial(torch.ops.aten._int_mm.default, a, b)
        return Ready(call, lambda result: problem.from_sums(np.asarray(result)))
