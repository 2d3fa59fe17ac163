"""Linear layers with 4-bit weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType
from rich.table import Table

import lowbit
from lowbit.numerics import QTensor, int_format
from lowbit.registry.extras import require
from lowbit.registry.locks import cached_property
from lowbit.spec import Case as Stated
from lowbit.spec import Expected
from lowbit.spec.operations.products import linear_groups, linear_weight_only
from lowbit.weights.panels import group_refusal
from lowbit_lab.bench.core import table
from lowbit_lab.bench.core.case import LIMIT, OURS, Case, Implementation, Problem
from lowbit_lab.bench.core.clock import Limits
from lowbit_lab.bench.core.cpu import PlainRead
from lowbit_lab.bench.core.record import Record, Row, standing
from lowbit_lab.bench.core.suite import Suite, option, suite
from lowbit_lab.bench.core.table import Column
from lowbit_lab.bench.suites.matmul.problem import parse_shape, product

# What a benchmark of linear layers with 4-bit weights computes: data and the right answers.

Floats = NDArray[np.float32]

ACTIVATIONS = {"f32": "W4A32", "bf16": "W4A16", "int8": "W4A8"}
"""What lowbit's rows compute with, and how such a product is called."""

ACTIVATIONS_OF = {f"lowbit {name}": one for one, name in ACTIVATIONS.items()}
"""By the names of lowbit's rows."""

DISTRIBUTION = (
    "4-bit weights uniform over 0 to 15, scales of the groups log-uniform from 1e-3 to 1e-2, zero "
    "point 8 or, where asked for, uniform; activations N(0, 1) cut to bfloat16, so that every type "
    "of activation holds the same numbers"
)

_MIDDLE = 8
_CHECKED_COLUMNS = 128  # each is a sum of its own, and the budget takes many times the work of one


@dataclass(frozen=True)
class LinearCase(Case):
    """x [M, K] @ w [K, N], of which `group_size` k share a scale, 0 for all of them.

    zero_points: whether groups have zero points of their own.
    """

    group_size: int = 128
    zero_points: bool = False

    @property
    def groups(self) -> int:
        """How many there are along K."""
        return self.sizes["K"] // self.group_size if self.group_size else 1

    def stated(self, activations: str, columns: int) -> Stated:
        """The case of the specification, with so many columns of the weight."""
        spec = linear_groups if activations == "int8" else linear_weight_only
        each = self.sizes["K"] // self.groups
        sizes = {"M": self.sizes["M"], "G": self.groups, "S": each, "N": columns}
        floats = "bf16" if activations == "bf16" else "f32"
        return spec.case(sizes, dtypes=f"{floats}:u4:{floats}", without=("bias", "residual"))


@dataclass(frozen=True, eq=False)
class LinearProblem(Problem):
    """A product with its data: x float32 [M, K], values uint8 [K, N] from 0 to 15, scale float32
    and zero int32 [groups, N]."""

    case: LinearCase
    x: Floats
    values: NDArray[np.uint8]
    scale: Floats
    zero: NDArray[np.int32]

    @classmethod
    def make(cls, case: LinearCase, seed: int = 0) -> LinearProblem:
        """Draw the data as `DISTRIBUTION` says; the same seed gives the same."""
        rng = np.random.default_rng(seed)
        m, n, k = (case.sizes[size] for size in "MNK")
        x = rng.standard_normal((m, k), np.float32)
        x = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        values = rng.integers(0, 16, (k, n), np.uint8)
        each = case.groups, n
        scale = np.exp(rng.uniform(np.log(1e-3), np.log(1e-2), each)).astype(np.float32)
        zero = np.full(each, _MIDDLE, np.int32)
        if case.zero_points:
            zero = rng.integers(0, 16, each, np.int32)
        return cls(case, x, values, scale, zero)

    def quantized(self) -> QTensor:
        """The weight [K, N] as `lowbit.pack` takes it."""
        fmt = int_format("uint4")
        if not self.case.group_size:
            return QTensor(self.values, self.scale[0], self.zero[0], fmt, axis=1)
        groups = {"group_size": self.case.group_size, "group_axis": 0}
        return QTensor(self.values, self.scale, self.zero, fmt, axis=1, **groups)

    @cached_property
    def weight(self) -> Floats:
        """What the weight stands for, float32 [K, N]."""
        return self.quantized().dequantize()

    @cached_property
    def ideal(self) -> NDArray[np.float64]:
        """x @ weight in float64, [M, N], the weight dequantized in float64."""
        depth = self.case.sizes["K"] // self.case.groups
        weight = self.values.astype(np.float64)
        weight -= np.repeat(self.zero, depth, axis=0)
        weight *= np.repeat(self.scale, depth, axis=0)
        return self.x.astype(np.float64) @ weight

    @cached_property
    def columns(self) -> NDArray[np.int64]:
        """The columns of the result that `expected` is for: all, or some that are spread evenly."""
        n = self.case.sizes["N"]
        return np.unique(np.linspace(0, n - 1, min(n, _CHECKED_COLUMNS)).astype(np.int64))

    def expected(self, activations: str) -> Expected:
        """Reference and budget of the specification in the chosen `columns`; for "bf16" with the
        rounding of the result to bfloat16."""
        stated = self.case.stated(activations, len(self.columns))
        m, groups, each = (stated.sizes[size] for size in "MGS")
        inputs = {
            "x": self.x.reshape(m, groups, each),
            "b": self.values[:, self.columns].reshape(groups, each, -1),
            "b_scale": self.scale[:, self.columns],
            "b_zero_point": self.zero[:, self.columns],
        }
        return stated.expect(inputs)

    def wrong(self, implementation: Implementation, result: NDArray[Any]) -> str | None:
        """Only lowbit's own must be within the budget of the specification."""
        if (reason := super().wrong(implementation, result)) or implementation.kind != OURS:
            return reason
        expected = self.expected(ACTIVATIONS_OF[implementation.name])
        # It was read as float32, which holds all of bfloat16.
        verdict = expected.check(result[:, self.columns].astype(expected.dtype.storage))
        return None if verdict.ok else verdict.message

    @cached_property
    def stated(self) -> Stated:
        return self.case.stated("f32", self.case.sizes["N"])

    @cached_property
    def weight_bytes(self) -> int:
        """Of lowbit's packed weight."""
        return lowbit.pack(self.quantized()).nbytes


SHAPES = (
    "1x4096:4096x4096",
    "1x4096:4096x14336",
    "16x4096:4096x4096",
    "128x4096:4096x4096",
    "512x4096:4096x4096",
    "1024x4096:4096x4096",
)
MANY_ROWS = 128
"""From here on arithmetic decides, not the reading of weights."""

_MOST_TRIED_ROWS = 16  # as good as more, and some take a second for each


@suite
@dataclass(frozen=True)
class Linear(Suite):
    """Time linear layers with 4-bit weights, against PyTorch's own and against float ones; on a GPU
    with weights of 4 and 8 bits. Each is compared with float64 on the dequantized weights first."""

    shapes: tuple[str, ...] = option(
        SHAPES, "Shapes MxK:KxN.", argument=True, shown="six, of 4096x4096 and 4096x14336"
    )
    activations: str = option(
        ",".join(ACTIVATIONS),
        "What lowbit computes with: f32 (W4A32), bf16 (W4A16), int8 (W4A8).",
    )
    group_size: int = option(128, "How many k share a scale; 0: all.")
    zero_points: bool = option(False, "Whether groups have zero points of their own.")
    device: str = option("cpu", "cpu, or a GPU: cuda, cuda:1.")
    formats: str = option(
        "", "On a GPU: w4a16, w4a8, w4a8 fp8, w8a16, int8, fp8, fp8 blocks, by commas.", shown="all"
    )
    library: str = option(
        "", "On a GPU: vLLM's _C_stable_libtorch.abi3.so, for its kernels.", shown="none"
    )

    name: ClassVar[str] = "linear"
    example: ClassVar[str] = "1x4096:4096x4096 --activations f32,int8"
    distribution: ClassVar[str] = DISTRIBUTION
    colds: ClassVar[bool] = True
    patient: ClassVar[bool] = True
    # A virtual machine may say less of its last cache than there is.
    least_cold_bytes: ClassVar[int] = 256 << 20

    def __post_init__(self) -> None:
        if self.device != "cpu":
            return  # `resolved` checks
        for one in self.activations.split(","):
            if one not in ACTIVATIONS:
                known = ", ".join(ACTIVATIONS)
                raise ValueError(f"activations {one!r} are not known; known are {known}")
        if self.group_size and (refusal := group_refusal(self.group_size)):
            raise ValueError(f"{refusal}; 0 is one scale a column")
        if not self.shapes:
            raise ValueError("shapes is empty; give at least one")
        for text in self.shapes:
            product(text, "f32:s8:f32")  # which refuses what this machine cannot hold
            k = parse_shape(text)["K"]
            if self.group_size and k % self.group_size:
                raise ValueError(
                    f"shape {text!r}: K = {k} must be a multiple of the group size, "
                    f"{self.group_size}; change either, or give group size 0"
                )

    def resolved(self) -> Suite:
        """On a GPU, its own suite. ValueError for options that only one of both has."""
        if self.device == "cpu":
            if self.formats or self.library:
                raise ValueError("formats and library are for GPUs; give --device cuda too")
            return self
        require("lowbit bench linear --device cuda", "gpu", "torch", "triton")
        from lowbit_lab.bench.linear.suite import GROUP, LinearOnGpu

        if self.zero_points or self.group_size != GROUP:
            raise ValueError(f"on a GPU groups of {GROUP} without zero points are timed")
        suite = LinearOnGpu(self.device, library=self.library)
        if self.formats:
            suite = replace(suite, formats=tuple(self.formats.split(",")))
        return suite if self.shapes == SHAPES else replace(suite, shapes=self.shapes)

    @property
    def limits(self) -> Limits:
        return Limits(least_rounds=5)

    def settings(self) -> Mapping[str, Any]:
        return {"group_size": self.group_size, "zero_points": self.zero_points}

    def cases(self, seed: int = 0) -> Sequence[LinearCase]:
        return [self._layer(text, parse_shape(text)) for text in dict.fromkeys(self.shapes)]

    def _layer(self, name: str, sizes: Mapping[str, int]) -> LinearCase:
        groups = {"group_size": self.group_size, "zero_points": self.zero_points}
        return LinearCase("linear", name, sizes=sizes, **groups)

    def tried(self, case: LinearCase) -> LinearCase:
        m = min(case.sizes["M"], _MOST_TRIED_ROWS)
        k, n = case.sizes["K"], case.sizes["N"]
        return self._layer(f"{m}x{k}:{k}x{n}", {"M": m, "N": n, "K": k})

    def implementations(self) -> Sequence[Implementation]:
        wanted = self.activations.split(",")
        return [
            one
            for one in (*super().implementations(), PlainRead())
            if one.kind != OURS or ACTIVATIONS_OF[one.name] in wanted
        ]

    def make(self, case: LinearCase, seed: int) -> LinearProblem:
        return LinearProblem.make(case, seed)

    def summary(self, rows: Sequence[Row]) -> Sequence[dict[str, Any]]:
        return list(means(rows))

    def title(self, record: Record) -> str:
        groups = f"groups of {self.group_size}" if self.group_size else "one scale a column"
        zeros = "with zero points" if self.zero_points else "symmetric"
        return f"4-bit weights, {groups}, {zeros}; seed {record.context['seed']}"

    def columns(self, rows: Sequence[Row]) -> Sequence[Column]:
        return (
            *(table.IMPLEMENTATION, table.TIME, table.SPREAD),
            *(replace(one, when=_many) for one in (table.GOPS, table.PEAK)),
            *(replace(one, when=_few) for one in (table.GBS, table.READ)),
            table.ERROR,
            *table.ratio_columns(rows, lambda name: name.removeprefix("lowbit ")),
        )

    def ending(self, record: Record) -> Sequence[RenderableType]:
        return [_means(record.summary), ""] if record.summary else []


def _many(rows: Sequence[Row]) -> bool:
    return rows[0].sizes["M"] >= MANY_ROWS


def _few(rows: Sequence[Row]) -> bool:
    return not _many(rows)


def means(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """For each number of threads, state of the weights and range of M, each of lowbit's rows
    against everything that is compared with it and multiplies: the geometric mean of the ratios
    (above 1: lowbit is faster), the worst, and where that is."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        for ours in row.ratios if row.kind not in (OURS, LIMIT) else ():
            key = row.threads, row.weights, _range(row), ours, row.implementation
            groups.setdefault(key, []).append(row)
    order = list(ACTIVATIONS_OF)

    def place(key: tuple[Any, ...]) -> tuple[Any, ...]:
        return key[0], key[1] == "cold", groups[key][0].sizes["M"], order.index(key[3])

    for key in sorted(groups, key=place):
        group = groups[key]
        figures, where = standing([(row.ratios[key[3]].median, row) for row in group])
        names = ("threads", "weights", "sizes", "ours", "implementation")
        yield {**dict(zip(names, key, strict=True)), **figures, "worst_shape": where.case}


def _range(row: Row) -> str:
    m = row.sizes["M"]
    if m >= MANY_ROWS:
        return f"M from {MANY_ROWS}"
    return "M = 1" if m == 1 else f"M from 2 to {MANY_ROWS - 1}"


def _means(rows: Sequence[dict[str, Any]]) -> Table:
    names = [name for name in ACTIVATIONS_OF if any(one["ours"] == name for one in rows)]
    made = table.new_table(
        "times as fast as others: geometric mean over the shapes (least)",
        [(each, False) for each in ("threads", "weights", "sizes", "lowbit against")]
        + [("shapes", True), *((name.removeprefix("lowbit "), True) for name in names)],
    )
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for one in rows:
        key = tuple(str(one[x]) for x in ("threads", "weights", "sizes", "implementation", "rows"))
        mean = f"{table.three_digits(one['geometric_mean'])} ({table.three_digits(one['worst'])})"
        lines.setdefault(key, {})[one["ours"]] = mean
    for key, each in lines.items():
        made.add_row(*key, *(each.get(name, "") for name in names))
    return made
