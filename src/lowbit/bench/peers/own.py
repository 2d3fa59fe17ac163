"""lowbit itself, through its public functions."""

from __future__ import annotations

from functools import partial

import numpy as np

import lowbit
from lowbit import dispatch, ops
from lowbit import isa as instruction_sets
from lowbit.bench.implementation import Prepared, implementation
from lowbit.bench.problem import Problem
from lowbit.jit.threads import max_threads
from lowbit.kernels.cpu.integer.micro_kernel import Demand
from lowbit.numerics import QTensor, int_format
from lowbit.spec import Case
from lowbit.spec.operations.products import linear_dynamic
from lowbit.weights.panels import PackedMatrix

_NIBBLES = {"s4": "int4", "u4": "uint4"}


def packed_weight(problem: Problem) -> PackedMatrix:
    """The right operand of a problem, packed."""
    if problem.b_scale is None:
        return ops.pack(problem.b, dtype=_NIBBLES.get(problem.case.dtype("b").code))
    zero = np.zeros(problem.b_scale.shape, np.int32)
    fmt = int_format(problem.b.dtype.name)
    return ops.pack(QTensor(problem.b, problem.b_scale, zero, fmt, axis=1))


@implementation
class Lowbit:
    """This library."""

    name = "lowbit"
    ours = True
    isolated = False
    pool = "OpenMP of torch"

    def available(self, case: Case) -> str | None:
        return None

    def library(self) -> tuple[str, str]:
        return "lowbit", lowbit.__version__

    def isa(self, case: Case) -> str | None:
        m, n, k = (case.sizes[dim] for dim in "MNK")
        return dispatch.consider(instruction_sets.active(), Demand(m, n, k))[-1].isa.name

    def note(self, case: Case) -> str:
        return ""

    def prepare(self, problem: Problem, threads: int) -> Prepared:
        packed = packed_weight(problem)
        # As the peers: told how many threads there are, free to use fewer for little work.
        limit = None if max_threads() == threads else threads
        if problem.b_scale is None:
            return Prepared(partial(ops.matmul, problem.a, packed, threads=limit))
        if problem.case.spec is linear_dynamic:
            return Prepared(partial(ops.linear_dynamic, problem.a, packed, threads=limit))
        call = partial(
            ops.matmul_scaled,
            problem.a,
            packed,
            a_scale=problem.a_scale,
            a_zero_point=problem.a_zero_point,
            threads=limit,
        )
        if not problem.quantizes:
            return Prepared(call)
        scale, zero_point = problem.out_quantization
        out = {"out_dtype": "uint8", "out_scale": scale, "out_zero_point": zero_point}
        return Prepared(partial(call, **out))
