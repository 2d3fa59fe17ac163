"""The steps of every ladder as implementations, and who stands beside those of int8 and float32."""

from __future__ import annotations

from typing import Any

from lowbit.registry.extras import explained
from lowbit_lab.bench.core.case import (
    OURS,
    STEP,
    Implementation,
    Ready,
    find,
    implementation,
    implementations,
)
from lowbit_lab.steps.registry import Step, steps

LADDERS = {"uint4_steps": "uint4", "int8_steps": "cpu-int8", "float32_steps": "cpu-float32"}
"""By suite, the steps on a CPU, which run on one thread. Those on a GPU are not imported before
somebody asks for them."""


class Stepping(Implementation):
    """A step of lowbit_lab.steps."""

    kind = STEP

    def __init__(self, step: Step) -> None:
        self.name = self.pool = step.name
        self.step = step
        if not step.isas:
            self.package = "Numba", "numba"

    def available(self, case: Any) -> str | None:
        try:
            self.step.serving()
        except RuntimeError as error:
            return str(error)
        return super().available(case)

    def runs_on(self, case: Any) -> str | None:
        served = self.step.serving()
        return served.name if served is not None else None

    def prepare(self, problem: Any, threads: int) -> Ready:
        return Ready(self.step.prepare(problem.a, problem.b), extra={"idea": self.step.idea})


class NoSteps(Implementation):
    """Stands for steps where Numba, or what they need besides, cannot be imported."""

    name = "the steps in Numba"
    kind = STEP

    def __init__(self, error: ImportError) -> None:
        known = isinstance(error, ModuleNotFoundError)
        self.reason = explained(error) if known else str(error)

    def available(self, case: Any) -> str | None:
        return self.reason


def step_entries(ladder: str) -> list[Implementation]:
    """The steps to read, from the lowest."""
    try:
        made = OnGpu if ladder == "gpu" else Stepping
        return [made(step) for step in steps(ladder)]
    except ImportError as error:
        return [NoSteps(error)]


class OnGpu(Stepping):
    """A step that launches a kernel on tensors."""

    package = "Numba", "numba"

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        if step.kernel.__module__.endswith(".tiles"):
            self.package = "Triton", "triton"

    def prepare(self, problem: Any, threads: int) -> Ready:
        import torch

        a, b = problem.a, problem.b

        def call() -> Any:
            out = torch.empty(len(a), b.shape[1], device=a.device)
            self.step.run(a, b, out)
            return out

        return Ready(call, _read, extra={"idea": self.step.idea})


def _read(result: Any) -> Any:
    return result.cpu().numpy()


@implementation(
    "gpu_steps",
    ("torch (cuBLAS)", "cuBLAS in float32"),
    ("torch (cuBLAS, TF32)", "cuBLAS, operands rounded to TF32"),
    ("lowbit", "lowbit.torch.functional.bmm"),
)
class WholeOnGpu(Implementation):
    """Another library's product, or lowbit's."""

    def __init__(self, entry: tuple[str, str]) -> None:
        self.name, self.idea = entry
        self.kind = OURS if self.name == "lowbit" else Implementation.kind
        self.always = self.name == "torch (cuBLAS)"
        self.package = None if self.kind == OURS else ("torch", "torch")

    def prepare(self, problem: Any, threads: int) -> Ready:
        import torch

        from lowbit.torch import functional

        a, b = problem.a, problem.b

        def rounded() -> Any:
            torch.backends.cuda.matmul.allow_tf32 = True
            try:
                return a @ b
            finally:
                torch.backends.cuda.matmul.allow_tf32 = False

        calls = {
            "lowbit": lambda: functional.bmm(a[None], b[None])[0],
            "torch (cuBLAS)": lambda: a @ b,
        }
        return Ready(calls.get(self.name, rounded), _read, extra={"idea": self.idea})


for _suite, _ladder in LADDERS.items():
    for _one in step_entries(_ladder):
        implementations.add(f"{_suite}: {_one.name}", _one)


@implementation(
    "int8_steps",
    ("matmul", "numpy fp32", "BLAS in float32"),
    ("matmul", "torch _int_mm", "bytes to 32-bit sums, weights not packed"),
    ("matmul", "oneDNN qlinear", "bytes to float32, weights packed"),
    ("matmul", "FBGEMM qlinear", "bytes to 8 bits, weights packed"),
    ("matmul", "MKL s8u8s32", "bytes to 32-bit sums, weights packed"),
    ("matmul", "NumKong i8", "bytes to 32-bit sums, weights packed"),
    ("matmul", "lowbit", "weights packed; rows while they are multiplied"),
)
@implementation(
    "float32_steps",
    ("gemm", "numpy", "OpenBLAS"),
    ("gemm", "torch", "MKL, on processors of its maker; else what torch is built with"),
    ("gemm", "lowbit", "the same kernels, cut by the shape"),
)
class Borrowed(Implementation):
    """One that stands in another suite, on the same problem."""

    def __init__(self, entry: tuple[str, str, str]) -> None:
        self.suite, self.name, self.idea = entry
        self.kind = OURS if self.name == "lowbit" else Implementation.kind
        self.isolated = self.name not in ("lowbit", "numpy", "numpy fp32", "torch")
        self.always = self.name in ("numpy fp32", "torch")
        self.pool = self.name if "numpy" in self.name else Implementation.pool

    @property
    def _one(self) -> Implementation:
        return find(self.suite, self.name)

    def available(self, case: Any) -> str | None:
        return self._one.available(case)

    def library(self) -> tuple[str, str]:
        return self._one.library()

    def runs_on(self, case: Any) -> str | None:
        return self._one.runs_on(case)

    def note(self, case: Any) -> str:
        return self._one.note(case)

    def prepare(self, problem: Any, threads: int) -> Ready:
        made = self._one.prepare(problem, threads)
        return Ready(made.call, made.read, made.nbytes, made.again, {"idea": self.idea})
