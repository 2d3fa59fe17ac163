"""Products of float32 and bfloat16 matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType

from lowbit.registry.locks import cached_property
from lowbit.spec import Case as Stated
from lowbit.spec.operations.products import gemm
from lowbit_lab.bench.core.case import Case, StatedProblem
from lowbit_lab.bench.core.clock import Limits
from lowbit_lab.bench.core.record import Record, Row
from lowbit_lab.bench.core.suite import Suite, option, suite
from lowbit_lab.bench.core.table import summaries, summary_table
from lowbit_lab.bench.suites.matmul.problem import parse_shape

Array = NDArray[Any]

_CUBES = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
SETS = {
    "square": tuple(f"{size}x{size}:{size}x{size}" for size in _CUBES),
    "thin": (
        "1x1024:1024x1024",
        "1x4096:4096x4096",
        "4x2048:2048x2048",
        "16x1024:1024x1024",
        "32x1024:1024x4096",
        "64x64:64x4096",
        "64x4096:4096x64",
        "197x768:768x768",
        "1024x1024:1024x16",
        "3136x576:576x64",
        "4096x64:64x64",
    ),
}
"""Shapes by name: cubes, and products of which one or two sizes are small."""

DTYPES = ("f32:f32:f32", "bf16:bf16:bf16", "bf16:bf16:f32", "f32:f32:bf16")
"""Left, right and output of what can be timed."""


@dataclass(frozen=True)
class GemmCase(Case):
    """a [M, K] @ b [K, N]; transposed: b is the view of an array [N, K], as a layer's weight."""

    transposed: bool = False

    @property
    def stated(self) -> Stated:
        """The case of the specification, without c."""
        out = self.dtypes.split(":")[2]
        return gemm.case(self.sizes, dtypes=f"{self.dtypes}:{out}", without=("c",))


@dataclass(frozen=True, eq=False)
class GemmProblem(StatedProblem):
    """A product with its data, in the dtypes of the case; bfloat16 is ml_dtypes'."""

    case: GemmCase
    inputs: dict[str, Array]

    @classmethod
    def make(cls, case: GemmCase, seed: int) -> GemmProblem:
        """Draw the data of `case`; the same seed gives the same."""
        rng, inputs = np.random.default_rng(seed), {}
        for name in ("a", "b"):
            shape = case.stated.shape(name)
            normal = rng.standard_normal(shape, np.float32)
            inputs[name] = normal.astype(case.stated.dtype(name).storage)
        if case.transposed:
            inputs["b"] = np.asfortranarray(inputs["b"])
        return cls(case, inputs)

    @cached_property
    def stated(self) -> Stated:
        return self.case.stated

    @property
    def a(self) -> Array:
        return self.inputs["a"]

    @property
    def b(self) -> Array:
        return self.inputs["b"]


@suite
@dataclass(frozen=True)
class Gemm(Suite):
    """Time the product of two float matrices, as lowbit.gemm, NumPy and PyTorch compute it.

    All get the same data and take turns in random order. Each is compared with float64 first, and
    lowbit held to the budget of the specification.
    """

    shapes: tuple[str, ...] = option((), "Shapes MxK:KxN.", argument=True)
    suite: str | None = option(
        None, f"A set of shapes: {', '.join(SETS)}, or all.", shown="all, without shapes"
    )
    dtype: tuple[str, ...] = option(
        (), f"Left, right and output: {', '.join(DTYPES)}; may be repeated.", shown="f32:f32:f32"
    )
    transposed: bool = option(False, "Whether b lies along K, as the weight of a layer does.")

    name: ClassVar[str] = "gemm"
    example: ClassVar[str] = "256x512:512x1024 --dtype f32:f32:f32 --threads 1"
    distribution: ClassVar[str] = "N(0, 1), rounded to bfloat16 where that is the dtype"
    ceiling: ClassVar[str] = ""  # that of bytes

    def __post_init__(self) -> None:
        if self.suite not in (None, "all", *SETS):
            raise ValueError(
                f"no set of shapes is called {self.suite!r}; known are {', '.join(SETS)} and all"
            )
        for dtypes in self.dtype:
            if dtypes not in DTYPES:
                raise ValueError(f"dtypes {dtypes!r} are not known; known are {', '.join(DTYPES)}")
        for shape in self.shapes:
            parse_shape(shape)

    @property
    def limits(self) -> Limits:
        return Limits(seconds=4.0 if self.shapes else 1.0)

    def cases(self, seed: int = 0) -> Sequence[GemmCase]:
        wanted = dict.fromkeys(self.shapes)
        for name, shapes in SETS.items():
            if self.suite in (name, "all") or (self.suite is None and not self.shapes):
                wanted |= dict.fromkeys(shapes)
        return [
            GemmCase("gemm", shape, dtypes, sizes=parse_shape(shape), transposed=self.transposed)
            for dtypes in self.dtype or DTYPES[:1]
            for shape in wanted
        ]

    def settings(self) -> dict[str, Any]:
        return {"transposed": self.transposed}

    def make(self, case: GemmCase, seed: int) -> GemmProblem:
        return GemmProblem.make(case, seed)

    def summary(self, rows: Sequence[Row]) -> Sequence[dict[str, Any]]:
        return list(summaries(rows))

    def ending(self, record: Record) -> Sequence[RenderableType]:
        return [summary_table(record.summary), ""] if record.summary else []
