"""lowbit's linear layers with 4-bit weights, and its product with 8-bit ones beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lowbit
from lowbit.jit.workspace import aligned_empty
from lowbit.weights.panels import PackedMatrix
from lowbit_lab.bench.core.case import OTHER, OURS, Implementation, Ready, implementation
from lowbit_lab.bench.peers import torch_int4
from lowbit_lab.bench.peers.own import thread_limit
from lowbit_lab.bench.suites.linear import ACTIVATIONS, LinearProblem


@implementation("linear", *ACTIVATIONS)
class LowbitLinear(Implementation):
    """A product with 4-bit weights."""

    kind = OURS

    def __init__(self, activations: str) -> None:
        self.activations = activations
        self.name = f"lowbit {ACTIVATIONS[activations]}"
        self.needs = ("torch",) if activations == "bf16" else ()  # bfloat16 is PyTorch's

    def prepare(self, problem: LinearProblem, threads: int) -> Ready:
        packed = lowbit.pack(problem.quantized())
        if self.activations == "int8":
            return _ready(lowbit.linear_dynamic, problem.x, packed, threads)
        if self.activations == "f32":
            return _ready(lowbit.linear_weight_only, problem.x, packed, threads)
        import torch

        x = torch.from_numpy(problem.x).bfloat16()
        # As torch's own, which give what they take.
        call = partial(lowbit.linear_weight_only, out_dtype="bfloat16")
        return replace(_ready(call, x, packed, threads), read=torch_int4.read)


@implementation("linear")
class LowbitBytes(Implementation):
    """The product with 8-bit weights, quantized again from what the 4-bit ones stand for."""

    name = "lowbit W8A8"
    kind = OTHER
    remark = "8-bit weights, one scale a column"

    def prepare(self, problem: LinearProblem, threads: int) -> Ready:
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
