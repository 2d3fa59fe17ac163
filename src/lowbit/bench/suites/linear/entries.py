"""What a benchmark of linear layers compares: lowbit with each type of activation, its product
with 8-bit weights, a plain read, and PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lowbit
from lowbit import isa as instruction_sets
from lowbit.bench import peak
from lowbit.bench.linear_problem import ACTIVATIONS, Linear, LinearPlan, LinearTask, Ready
from lowbit.bench.peers import torch_int4
from lowbit.jit.threads import max_threads
from lowbit.jit.workspace import aligned_empty
from lowbit.registry.extras import absent
from lowbit.weights.panels import PackedMatrix

READ = "plain read"


class _Own:
    """What lowbit's entries share."""

    isolated = False
    fallback = False

    def available(self) -> str | None:
        return None

    def library(self) -> tuple[str, str]:
        return "lowbit", lowbit.__version__

    def note(self) -> str:
        return ""


class Lowbit(_Own):
    """A product with 4-bit weights."""

    def __init__(self, activations: str) -> None:
        self.activations = activations
        self.name = f"lowbit {ACTIVATIONS[activations]}"

    def available(self) -> str | None:
        return absent("torch") if self.activations == "bf16" else None  # bfloat16 is PyTorch's

    def prepare(self, task: LinearTask, threads: int) -> Ready:
        packed = lowbit.pack(task.quantized())
        if self.activations == "int8":
            return _ready(lowbit.linear_dynamic, task.x, packed, threads)
        if self.activations == "f32":
            return _ready(lowbit.linear_weight_only, task.x, packed, threads)
        import torch

        x = torch.from_numpy(task.x).bfloat16()
        # As torch's own, which give what they take.
        call = partial(lowbit.linear_weight_only, out_dtype="bfloat16")
        return replace(_ready(call, x, packed, threads), read=torch_int4.read)


class LowbitBytes(_Own):
    """The product with 8-bit weights, quantized again from what the 4-bit ones stand for."""

    name = "lowbit W8A8"
    activations = ""

    def note(self) -> str:
        return "8-bit weights, one scale a column"

    def prepare(self, task: LinearTask, threads: int) -> Ready:
        packed = lowbit.pack(lowbit.quantize(task.weight, axis=1))
        return _ready(lowbit.linear_dynamic, task.x, packed, threads)


class PlainRead(_Own):
    """A read of as many bytes as lowbit's packed weight has, which does nothing with them."""

    name = READ
    activations = ""

    def prepare(self, task: LinearTask, threads: int) -> Ready:
        nbytes = lowbit.pack(task.quantized()).nbytes

        def reader() -> peak.Reader:
            return peak.Reader(instruction_sets.active(), nbytes, threads)

        first = reader()
        return Ready(first, first.nbytes, reader)


def _ready(function: Callable[..., Any], x: Any, packed: PackedMatrix, threads: int) -> Ready:
    # As the peers: told how many threads there are, free to use fewer for little work.
    limit = None if max_threads() == threads else threads

    def of(weight: PackedMatrix) -> Callable[[], Any]:
        return partial(function, x, weight, threads=limit)

    return Ready(of(packed), packed.nbytes, lambda: of(_copied(packed)))


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


def entries(plan: LinearPlan) -> tuple[Linear, ...]:
    """What a plan compares, lowbit's own first."""
    ours = tuple(Lowbit(each) for each in ACTIVATIONS if each in plan.activations)
    peers = torch_int4.peers() if plan.peers else ()
    return (*ours, *peers, LowbitBytes(), PlainRead())


def find(name: str) -> Linear:
    """The entry of that name; ValueError lists the known ones."""
    known = {one.name: one for one in entries(LinearPlan())}
    if name not in known:
        raise ValueError(f"no entry {name!r}; known are {', '.join(known)}")
    return known[name]
