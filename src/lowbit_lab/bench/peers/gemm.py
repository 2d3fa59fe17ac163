"""Products of float matrices: lowbit's, NumPy's (OpenBLAS), PyTorch's (MKL, oneDNN)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import lowbit
from lowbit import isa as instruction_sets
from lowbit.kernels.cpu.float.micro_kernel import float_micro_kernels
from lowbit.kernels.cpu.float.operand import Operand
from lowbit.kernels.cpu.shared.serving import consider
from lowbit_lab.bench.core.case import OURS, Implementation, Ready, implementation
from lowbit_lab.bench.peers.numpy_float import NumpyFloat
from lowbit_lab.bench.peers.own import thread_limit
from lowbit_lab.bench.peers.torch_products import MKL, ONEDNN, Torch
from lowbit_lab.bench.suites.gemm import GemmCase, GemmProblem


@implementation("gemm")
class LowbitGemm(Implementation):
    """This library."""

    name = "lowbit"
    kind = OURS

    def runs_on(self, case: GemmCase) -> str | None:
        right = Operand(case.dtypes.split(":")[0], "", packed=True)
        return consider(float_micro_kernels, instruction_sets.active(), right)[-1].isa.name

    def prepare(self, problem: GemmProblem, threads: int) -> Ready:
        out = None if problem.case.dtypes.endswith(":f32") else "bfloat16"
        limit = thread_limit(threads)
        return Ready(partial(lowbit.gemm, problem.a, problem.b, out_dtype=out, threads=limit))


@implementation("gemm")
class NumpyGemm(NumpyFloat):
    """NumPy's product of float32."""

    name = "numpy"
    remark = ""
    takes = ("f32:f32:f32",)

    def prepare(self, problem: Any, threads: int) -> Ready:
        return Ready(partial(np.matmul, problem.a, problem.b))


@implementation("gemm")
class TorchGemm(Torch):
    """PyTorch's product, which gives what it takes."""

    name = "torch"
    isolated = False

    def available(self, case: GemmCase) -> str | None:
        left, right, out = case.dtypes.split(":")
        if not left == right == out:
            return f"torch.mm gives what it takes, not {case.dtypes}"
        self.component = MKL if left == "f32" else ONEDNN
        return super().available(case)

    def prepare(self, problem: GemmProblem, threads: int) -> Ready:
        import torch

        from lowbit.product.arguments import tensor_of, viewed

        a, b = tensor_of(problem.a), tensor_of(problem.b)
        return Ready(partial(torch.mm, a, b), viewed)
