"""Products step by step: kernels to read, one idea each, beside the best libraries and lowbit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType

from lowbit.registry.extras import require
from lowbit.registry.locks import cached_property
from lowbit.spec import Case as Stated
from lowbit.spec.operations.products import integer_product, product_of_floats, product_of_rows
from lowbit_lab.bench.core import table
from lowbit_lab.bench.core.case import (
    OURS,
    PEER,
    STEP,
    Case,
    Implementation,
    Problem,
    StatedProblem,
)
from lowbit_lab.bench.core.context import Clock
from lowbit_lab.bench.core.record import Record, Row, groups, thread_text
from lowbit_lab.bench.core.suite import Suite, option, suite, suites
from lowbit_lab.bench.core.table import Column
from lowbit_lab.bench.suites import gemm
from lowbit_lab.bench.suites.matmul import problem
from lowbit_lab.bench.suites.matmul.problem import parse_shape, product

_BAR = 24


class StepSuite(Suite):
    """What the ladders share. ladder: its name among `kernels.steps`. baseline: the implementation,
    called `base` in the table, that all are compared with besides lowbit."""

    ladder: ClassVar[str]
    baseline: ClassVar[str]
    base: ClassVar[str]
    reads: ClassVar[bool] = False

    def implementations(self) -> Sequence[Implementation]:
        order = (STEP, PEER, OURS)
        several = super().implementations()
        return sorted(several, key=lambda one: order.index(one.kind))

    def references(self, several: Sequence[Implementation]) -> list[str]:
        return [*super().references(several), self.baseline]

    def what(self, row: Row) -> str:
        """What is multiplied, for the title."""
        return f"{row.dtypes} product of {row.case}"

    def columns(self, rows: Sequence[Row]) -> Sequence[Column]:
        steps = [row.implementation for row in rows if row.kind == STEP]

        def label(row: Row) -> str:
            name = row.implementation
            return f"{steps.index(name) + 1}. {name}" if name in steps else name

        def against(row: Row) -> str:
            ratio = row.ratios.get(self.baseline)
            return "" if ratio is None else table.format_ratio(ratio.inverse())

        def idea(row: Row) -> str:
            return row.extra.get("idea", "")

        return [
            Column("step", label, right=False),
            Column("what is new on it, or what it is", idea, right=False),
            *(table.TIME, table.SPREAD, table.GOPS),
            Column("speed, logarithmic", _plotted(rows), right=False),
            Column(f"times as fast as {self.base}", against),
            *([table.PEAK] if self.ceiling else []),
            table.ERROR,
        ]

    def render(self, record: Record) -> RenderableType:
        parts: list[RenderableType] = [""]
        for rows in groups(record.rows, "threads"):
            threads = f"; {thread_text(rows[0].threads)}" if self.threaded else ""
            title = f"{self.what(rows[0])}{threads}"
            shown = table.table(title, rows, self.columns(rows), by_time=False)
            parts += [shown, "", *table.notes(rows), ""]
        return table.page(record, *parts)


def _plotted(rows: Sequence[Row]) -> Callable[[Row], str]:
    """A bar for each row, as long as the logarithm of its speed over that of the slowest."""
    least, most = (extreme(row.gops for row in rows) for extreme in (min, max))

    def bar(row: Row) -> str:
        share = math.log(row.gops / least) / math.log(most / least) if most > least else 1.0
        return "█" * (1 + round((_BAR - 1) * share))

    return bar


def suite_of(ladder: str, shape: str | None = None) -> StepSuite:
    """The suite of a ladder, of this shape or its own. ValueError, with the names that there are,
    for an unknown one."""
    known = {one.ladder: one for one in suites if issubclass(one, StepSuite)}
    if ladder not in known:
        raise ValueError(f"no steps are called {ladder!r}; known are {', '.join(sorted(known))}")
    return known[ladder](**({} if shape is None else {"shape": shape}))


@suite
@dataclass(frozen=True)
class Int8Steps(StepSuite):
    """Time exact int8 products step by step: three loops, blocks, registers, packing, products of
    bytes, VNNI, AMX; other libraries; lowbit. All are compared with the exact sums first."""

    shape: str = option("512x512:512x512", "A shape MxK:KxN.", argument=True)

    name: ClassVar[str] = "int8_steps"
    ladder: ClassVar[str] = "cpu-int8"
    baseline: ClassVar[str] = "numpy fp32"
    base: ClassVar[str] = "BLAS in float32"
    example: ClassVar[str] = "--threads 1 --json record.json"
    distribution: ClassVar[str] = problem.DISTRIBUTION

    def cases(self, seed: int = 0) -> Sequence[Case]:
        return [product(self.shape, "u8:s8:s32")]

    def make(self, case: Any, seed: int) -> problem.Problem:
        return problem.Problem.make(case, seed)


@suite
@dataclass(frozen=True)
class Float32Steps(StepSuite):
    """Time float32 products step by step: three loops, blocks, registers, fused multiply-adds,
    packing; MKL and OpenBLAS; lowbit. Each error is shown, and lowbit held to its budget."""

    shape: str = option("1024x1024:1024x1024", "A shape MxK:KxN.", argument=True)

    name: ClassVar[str] = "float32_steps"
    ladder: ClassVar[str] = "cpu-float32"
    baseline: ClassVar[str] = "torch"
    base: ClassVar[str] = "MKL"
    example: ClassVar[str] = "--threads 1 --json record.json"
    distribution: ClassVar[str] = "N(0, 1)"
    ceiling: ClassVar[str] = "float32"

    def cases(self, seed: int = 0) -> Sequence[Case]:
        product(self.shape, "s8:s8:s32")  # which refuses what is too large for the memory
        sizes = parse_shape(self.shape)
        return [gemm.Product("gemm", self.shape, gemm.DTYPES[0], sizes=sizes)]

    def make(self, case: Any, seed: int) -> gemm.Problem:
        return gemm.Problem.make(case, seed)


@suite
@dataclass(frozen=True)
class GpuSteps(StepSuite):
    """Time float32 products on a GPU step by step: a thread for each output, coalescing, shared
    memory, registers, the compiler's tiles, tensor cores; cuBLAS; lowbit. Each must be within the
    budget of the specification."""

    shape: str = option("2048x2048:2048x2048", "A shape MxK:KxN.", argument=True)
    device: str = option("cuda", "The GPU: cuda, or cuda:1.")

    name: ClassVar[str] = "gpu_steps"
    ladder: ClassVar[str] = "gpu"
    baseline: ClassVar[str] = "torch (cuBLAS)"
    base: ClassVar[str] = "cuBLAS"
    example: ClassVar[str] = "--json record.json"
    distribution: ClassVar[str] = "N(0, 1)"
    ceiling: ClassVar[str] = ""
    threaded: ClassVar[bool] = False

    def clock(self) -> Clock:
        require("lowbit steps gpu", "gpu", "torch", "triton")
        from lowbit_lab.bench.core.cuda import Cuda

        return Cuda(self.device)

    def implementations(self) -> Sequence[Implementation]:
        from lowbit_lab.bench.peers.steps import step_entries

        return [*step_entries(self.ladder), *super().implementations()]

    def cases(self, seed: int = 0) -> Sequence[Case]:
        sizes = parse_shape(self.shape)
        return [Case("product", self.shape, "f32:f32:f32", sizes=sizes)]

    def make(self, case: Case, seed: int) -> OnGpu:
        import torch

        m, n, k = (case.sizes[name] for name in "MNK")
        rng = torch.Generator(self.device).manual_seed(seed)
        a, b = (torch.randn(*each, generator=rng, device=self.device) for each in ((m, k), (k, n)))
        return OnGpu(case, a, b)


@dataclass(frozen=True, eq=False)
class OnGpu(StatedProblem):
    """A product of tensors a [M, K] and b [K, N] on a GPU."""

    judged: ClassVar[tuple[str, ...]] = (OURS, STEP)
    case: Case
    a: Any
    b: Any

    @cached_property
    def stated(self) -> Stated:
        return product_of_floats.case(self.case.sizes)

    @cached_property
    def inputs(self) -> dict[str, Any]:
        return {"a": self.a.cpu().numpy(), "b": self.b.cpu().numpy()}


# Exact products of 4-bit integers, from a naive loop in Numba to lowbit, one idea a step.

LARGEST = 15
BASELINE = "numpy fp32"


@suite
@dataclass(frozen=True)
class Uint4Steps(StepSuite):
    """Time exact uint4 products step by step: teaching kernels in Numba with one new idea each,
    einsum, BLAS in float32, other libraries, lowbit. All are compared with the exact sums first."""

    shape: str = option(
        "256x256:256x16384", "Queries and vectors as a shape MxK:KxN.", argument=True
    )

    name: ClassVar[str] = "uint4_steps"
    ladder: ClassVar[str] = "uint4"
    baseline: ClassVar[str] = BASELINE
    base: ClassVar[str] = "BLAS"
    example: ClassVar[str] = "--threads 1 --json record.json"
    distribution: ClassVar[str] = "uint4 uniform over 0 to 15"

    def cases(self, seed: int = 0) -> Sequence[Case]:
        product(self.shape, "s8:s8:s32")  # which refuses what is too large, for sums or memory
        return [Case("matmul", self.shape, "u4:u4:s32", sizes=parse_shape(self.shape))]

    def make(self, case: Case, seed: int) -> Task:
        return Task.make(case, seed)

    def what(self, row: Row) -> str:
        sizes = row.sizes
        return (
            f"exact uint4 product: {sizes['M']:,} queries, {sizes['N']:,} vectors, "
            f"{sizes['K']:,} dimensions"
        )


@dataclass(frozen=True, eq=False)
class Task(Problem):
    """The product of queries and vectors: uint8 a [M, K] and b [N, K], of values 0 to 15."""

    case: Case
    a: NDArray[np.uint8]
    b: NDArray[np.uint8]

    @classmethod
    def make(cls, case: Case, seed: int = 0) -> Task:
        """Values drawn uniformly over the full range; the same seed gives the same."""
        rng = np.random.default_rng(seed)
        m, n, k = (case.sizes[size] for size in "MNK")
        a, b = (rng.integers(0, LARGEST, (size, k), np.uint8, endpoint=True) for size in (m, n))
        return cls(case, a, b)

    @cached_property
    def stated(self) -> Stated:
        """The case of the specification."""
        return product_of_rows.case(self.case.sizes)

    @cached_property
    def weight_bytes(self) -> int:
        return -(-self.b.size // 2)

    @cached_property
    def ideal(self) -> NDArray[np.int64]:
        """The exact sums, int64 [M, N]."""
        return integer_product(self.a, self.b.T)

    def wrong(self, implementation: Implementation, result: NDArray[Any]) -> str | None:
        """Everyone has to be exact."""
        if reason := super().wrong(implementation, result):
            return reason
        if np.array_equal(result, self.ideal):
            return None
        error = self.error(result)
        return f"it is off by up to {error:.1e} of the largest sum, and everyone has to be exact"
