"""lowbit itself, through its public functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lowbit
from lowbit import api
from lowbit import isa as instruction_sets
from lowbit.bench.core.case import OTHER, OURS, Case, Implementation, Ready, implementation
from lowbit.bench.peers import torch_products
from lowbit.bench.suites.linear import ACTIVATIONS, Task
from lowbit.bench.suites.matmul.problem import Problem
from lowbit.jit.threads import max_threads
from lowbit.jit.workspace import aligned_empty
from lowbit.kernels.cpu.integer.micro_kernel import KernelQuery
from lowbit.numerics import IntDtype, QTensor, int_format
from lowbit.product import dispatch
from lowbit.spec.operations.products import linear_dynamic
from lowbit.weights.panels import PackedMatrix

_NIBBLES: dict[str, IntDtype] = {"s4": "int4", "u4": "uint4"}


def packed_weight(problem: Problem) -> PackedMatrix:
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
class Lowbit(Implementation):
    """This library."""

    name = "lowbit"
    kind = OURS

    def runs_on(self, case: Case) -> str | None:
        return runs_on(case)

    def prepare(self, problem: Problem, threads: int) -> Ready:
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


# lowbit's linear layers with 4-bit weights, and its product with 8-bit ones beside them.


@implementation("linear", *ACTIVATIONS)
class LowbitLinear(Implementation):
    """A product with 4-bit weights."""

    kind = OURS

    def __init__(self, activations: str) -> None:
        self.activations = activations
        self.name = f"lowbit {ACTIVATIONS[activations]}"
        self.needs = ("torch",) if activations == "bf16" else ()  # bfloat16 is PyTorch's

    def prepare(self, problem: Task, threads: int) -> Ready:
        packed = lowbit.pack(problem.quantized())
        if self.activations == "int8":
            return _ready(lowbit.linear_dynamic, problem.x, packed, threads)
        if self.activations == "f32":
            return _ready(lowbit.linear_weight_only, problem.x, packed, threads)
        import torch

        x = torch.from_numpy(problem.x).bfloat16()
        # As torch's own, which give what they take.
        call = partial(lowbit.linear_weight_only, out_dtype="bfloat16")
        return replace(_ready(call, x, packed, threads), read=torch_products.read)


@implementation("linear")
class LowbitBytes(Implementation):
    """The product with 8-bit weights, quantized again from what the 4-bit ones stand for."""

    name = "lowbit W8A8"
    kind = OTHER
    remark = "8-bit weights, one scale a column"

    def prepare(self, problem: Task, threads: int) -> Ready:
        packed = lowbit.pack(lowbit.quantize(problem.weight, axis=1))
        return _ready(lowbit.linear_dynamic, problem.x, packed, threads)


def _ready(function: Callable[..., Any], x: Any, packed: PackedMatrix, threads: int) -> Ready:
    def of(weight: PackedMatrix) -> Callable[[], Any]:
        return partial(function, x, weight, threads=thread_limit(threads))

    return Ready(of(packed), nbytes=packed.nbytes, again=lambda: of(_copied(packed)))


def _copied(packed: PackedMatrix) -> PackedMatrix:
    """The same with everything that a product reads at another place in memory, aligned."""
    zeros = None if packed.zero_points is None else _moved(packed.zero_points)
    scale = None if packed.scale is None else _moved(packed.scale)
    panels, sums = _moved(packed.panels), _moved(packed.column_sums)
    return replace(packed, panels=panels, column_sums=sums, scale=scale, zero_points=zeros)


def _moved(part: NDArray[Any]) -> NDArray[Any]:
    result = aligned_empty(part.shape, part.dtype)
    np.copyto(result, part)
    return result
