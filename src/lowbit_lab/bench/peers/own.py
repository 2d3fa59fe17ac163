"""lowbit itself, through its public functions."""

from __future__ import annotations

from functools import partial

import numpy as np

from lowbit import api
from lowbit import isa as instruction_sets
from lowbit.jit.threads import max_threads
from lowbit.kernels.cpu.integer.micro_kernel import KernelQuery
from lowbit.numerics import IntDtype, QTensor, int_format
from lowbit.product import dispatch
from lowbit.spec.operations.products import linear_dynamic
from lowbit.weights.panels import PackedMatrix
from lowbit_lab.bench.core.case import OURS, Case, Implementation, Ready, implementation
from lowbit_lab.bench.suites.matmul.problem import MatmulProblem

_NIBBLES: dict[str, IntDtype] = {"s4": "int4", "u4": "uint4"}


def packed_weight(problem: MatmulProblem) -> PackedMatrix:
    """The right operand of a problem, packed."""
    if problem.b_scale is None:
        return api.pack(problem.b, dtype=_NIBBLES.get(problem.case.dtypes.split(":")[1]))
    zero = np.zeros(problem.b_scale.shape, np.int32)
    fmt = int_format(problem.b.dtype.name)
    return api.pack(QTensor(problem.b, problem.b_scale, zero, fmt, axis=1))


def thread_limit(threads: int) -> int | None:
    """What a call is told: as the peers, how many threads there are, free to use fewer for little
    work."""
    return None if max_threads() == threads else threads


def runs_on(case: Case) -> str:
    """The instruction set that a product of these sizes runs on."""
    m, n, k = (case.sizes[size] for size in "MNK")
    return dispatch.consider(instruction_sets.active(), KernelQuery(m, n, k))[-1].isa.name


@implementation("matmul")
class LowbitMatmul(Implementation):
    """This library."""

    name = "lowbit"
    kind = OURS

    def runs_on(self, case: Case) -> str | None:
        return runs_on(case)

    def prepare(self, problem: MatmulProblem, threads: int) -> Ready:
        packed = packed_weight(problem)
        limit = thread_limit(threads)
        if problem.b_scale is None:
            return Ready(partial(api.matmul, problem.a, packed, threads=limit))
        if problem.case.spec is linear_dynamic:
            return Ready(partial(api.linear_dynamic, problem.a, packed, threads=limit))
        assert problem.a_scale is not None
        call = partial(
            api.matmul_scaled,
            problem.a,
            packed,
            a_scale=problem.a_scale,
            a_zero_point=problem.a_zero_point,
            threads=limit,
        )
        if not problem.quantizes:
            return Ready(call)
        scale, zero_point = problem.out_quantization
        out = {"out_dtype": "uint8", "out_scale": scale, "out_zero_point": zero_point}
        return Ready(partial(call, **out))
