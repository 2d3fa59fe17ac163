"""What multiplies 4-bit integers exactly besides the steps: einsum, float32 BLAS, lowbit, peers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from lowbit import api
from lowbit.numerics.nibbles import pack_nibbles
from lowbit_lab.bench.core.case import (
    OURS,
    STEP,
    Case,
    Implementation,
    Ready,
    find,
    implementation,
)
from lowbit_lab.bench.peers.numpy_float import NumpyFloat
from lowbit_lab.bench.peers.own import runs_on, thread_limit
from lowbit_lab.bench.suites.matmul.problem import Problem, product
from lowbit_lab.bench.suites.steps import BASELINE, LARGEST, Task

_BYTES = ("u8:s8:s32", "s8:s8:s32")

LONGEST_FLOAT_SUM = 2**24 // LARGEST**2
"""Products of uint4 values that float32 sums exactly, in any order: its 24 bits hold every whole
number up to 2**24."""


class _Entry(Implementation):
    """idea: a line for the page. Every library has threads of its own."""

    idea: str

    def ready(self, call: Callable[[], Any], read: Callable[[Any], Any] = np.asarray) -> Ready:
        return Ready(call, read, extra={"idea": self.idea})


@implementation("uint4_steps")
class Einsum(_Entry):
    """NumPy's own loops over integers, which do not go through BLAS."""

    name = pool = "numpy einsum"
    idea = "NumPy's loops over int32, no BLAS"
    kind = STEP
    package = "NumPy", "numpy"

    def prepare(self, problem: Task, threads: int) -> Ready:
        # The faster of the layouts and integer types that were tried.
        a, b = problem.a.astype(np.int32), np.ascontiguousarray(problem.b.T.astype(np.int32))
        return self.ready(partial(np.einsum, "mk,kn->mn", a, b))


@implementation("uint4_steps")
class Blas(_Entry, NumpyFloat):
    """NumPy's float32 product: exact as long as its sums are whole numbers up to 2**24."""

    name = pool = BASELINE
    idea = "BLAS on float32, exact for small values"
    always = True
    remark = ""

    def available(self, case: Case) -> str | None:
        k = case.sizes["K"]
        if k > LONGEST_FLOAT_SUM:
            return f"K is {k}; float32 sums only {LONGEST_FLOAT_SUM} products of uint4 exactly"
        return super().available(case)

    def prepare(self, problem: Any, threads: int) -> Ready:
        a = problem.a.astype(np.float32)
        b = np.ascontiguousarray(problem.b.T.astype(np.float32))
        return self.ready(partial(np.matmul, a, b))


_SUMS, _FLOATS = "bytes to 32-bit sums, vectors not packed", "bytes to float32, vectors packed"


@implementation(
    "uint4_steps",
    *(("torch _int_mm", dtypes, _SUMS) for dtypes in _BYTES),
    *(("oneDNN qlinear", dtypes, _FLOATS) for dtypes in _BYTES),
)
class BytePeer(_Entry):
    """A peer of `lowbit bench matmul` that multiplies bytes, given 4-bit values in them: unsigned
    on the left, or signed, of which it may take one, and be faster with one."""

    isolated = True

    def __init__(self, entry: tuple[str, str, str]) -> None:
        self.peer, self.dtypes, self.idea = entry
        self.name = self.pool = f"{self.peer} {self.dtypes[:2]}"

    def available(self, case: Case) -> str | None:
        try:
            return find("matmul", self.peer).available(product(case.name, self.dtypes))
        except ValueError as error:
            return str(error)

    def library(self) -> tuple[str, str]:
        return find("matmul", self.peer).library()

    def prepare(self, problem: Task, threads: int) -> Ready:
        ready = find("matmul", self.peer).prepare(_byte_problem(problem, self.dtypes), threads)
        return self.ready(ready.call, ready.read)


def _byte_problem(task: Task, dtypes: str) -> Problem:
    """The task as a problem of bytes, which hold its values whatever their sign."""
    left = np.int8 if dtypes.startswith("s8") else np.uint8
    a, b = task.a.view(left), np.ascontiguousarray(task.b.T).view(np.int8)
    return Problem(product(task.case.name, dtypes), {"a": a, "b": b})


@implementation("uint4_steps", "uint4", "uint8")
class NumKong(_Entry):
    """`numkong.dots_packed`, on uint4 two to a byte on both sides, or on bytes.

    Nibbles may be in either order, as long as both sides agree: they are packed as lowbit's.
    """

    needs = ("numkong",)
    package = "NumKong", "numkong"

    def __init__(self, dtype: str) -> None:
        self.name = self.pool = f"NumKong {dtype}"
        self.dtype = dtype
        pairs = dtype == "uint4"
        self.idea = f"{'two values to a byte' if pairs else 'bytes'} on both sides"
        self.arrange = pack_nibbles if pairs else np.ascontiguousarray

    def prepare(self, problem: Task, threads: int) -> Ready:
        numkong: Any = importlib.import_module("numkong")
        packed = numkong.dots_pack(self.arrange(problem.b), dtype=self.dtype)
        # Asked for one thread it would still enter a parallel region.
        options = {"threads": threads} if threads > 1 else {}
        return self.ready(partial(numkong.dots_packed, self.arrange(problem.a), packed, **options))


@implementation("uint4_steps")
class Lowbit(_Entry):
    """This library: vectors packed two to a byte, queries as bytes."""

    name = pool = "lowbit"
    idea = "uint4 panels, unpacked on the way into an int8 product"
    kind = OURS

    def runs_on(self, case: Case) -> str | None:
        return runs_on(case)

    def prepare(self, problem: Task, threads: int) -> Ready:
        packed = api.pack(problem.b.T, dtype="uint4")
        return self.ready(partial(api.matmul, problem.a, packed, threads=thread_limit(threads)))
