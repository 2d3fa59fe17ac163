"""Exact products of 4-bit integers, from a naive loop in Numba to lowbit, one idea a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lowbit.bench.core.case import Case, Implementation, Problem
from lowbit.bench.core.record import Row
from lowbit.bench.core.suite import option, suite
from lowbit.bench.suites.matmul.problem import parse_shape, product
from lowbit.bench.suites.steps import StepSuite
from lowbit.registry.locks import cached_property
from lowbit.spec import Case as Stated
from lowbit.spec.operations.products import integer_product, product_of_rows

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

    def wrong(self, one: Implementation, result: NDArray[Any]) -> str | None:
        """Everyone has to be exact."""
        if reason := super().wrong(one, result):
            return reason
        if np.array_equal(result, self.ideal):
            return None
        error = self.error(result)
        return f"it is off by up to {error:.1e} of the largest sum, and everyone has to be exact"
