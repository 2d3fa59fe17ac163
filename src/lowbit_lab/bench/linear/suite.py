"""`lowbit bench linear --device cuda`: quantized linear layers on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from rich.console import RenderableType

from lowbit_lab.bench.core import table
from lowbit_lab.bench.core.case import PEER, Case, Implementation, implementations_of
from lowbit_lab.bench.core.clock import Limits
from lowbit_lab.bench.core.cuda import Graphs
from lowbit_lab.bench.core.peak import share
from lowbit_lab.bench.core.record import Record, Row, groups, standing
from lowbit_lab.bench.core.suite import Suite
from lowbit_lab.bench.core.table import Column
from lowbit_lab.bench.linear.layers import FORMATS, GROUP, SHAPES, GpuLinearProblem, parse
from lowbit_lab.bench.peers.linear_gpu import SUITE, CuBlas, from_file


@dataclass(frozen=True)
class LinearOnGpu(Suite):
    """Products with quantized weights, each compared with float64 first, against cuBLAS in bfloat16
    and what else is there. The options are those of `lowbit bench linear`."""

    device: str = "cuda"
    shapes: tuple[str, ...] = SHAPES
    formats: tuple[str, ...] = tuple(FORMATS)
    library: str = ""

    name: ClassVar[str] = "linear"
    distribution: ClassVar[str] = (
        "activations N(0, 1) in bfloat16, weights N(0, 1 / K) before they are quantized"
    )
    colds: ClassVar[bool] = True
    threaded: ClassVar[bool] = False
    ceiling: ClassVar[str] = "bfloat16"

    def __post_init__(self) -> None:
        parse(self.formats, self.shapes)  # which refuses what cannot be

    @property
    def limits(self) -> Limits:
        return Limits(seconds=0.3, least_rounds=9, most_rounds=100)

    def clock(self) -> Graphs:
        return Graphs(self.device)

    def settings(self) -> Mapping[str, Any]:
        return {"group_size": GROUP, "library": os.path.basename(self.library)}

    def cases(self, seed: int = 0) -> Sequence[Case]:
        return parse(self.formats, self.shapes)

    def make(self, case: Case, seed: int) -> GpuLinearProblem:
        return GpuLinearProblem.make(case, seed, torch.device(self.device))

    def implementations(self) -> Sequence[Implementation]:
        return [*implementations_of(SUITE), *from_file(self.library)]

    def taking_part(
        self, problem: GpuLinearProblem, chosen: Sequence[Implementation]
    ) -> list[Implementation]:
        """Those that take its format."""
        dtypes = problem.case.dtypes
        return [one for one in chosen if dtypes.startswith(getattr(one, "formats", ""))]

    def summary(self, rows: Sequence[Row]) -> Sequence[dict[str, Any]]:
        return list(against_cublas(rows))

    def render(self, record: Record) -> RenderableType:
        columns = (
            Column("case", lambda row: row.case, False),
            Column("weights", lambda row: row.weights, False),
            table.IMPLEMENTATION,
            *table.MICROSECONDS,
            Column("TB/s", lambda row: f"{row.gbs / 1e3:.2f}"),
            Column("TFLOP/s", lambda row: f"{row.gops / 1e3:,.1f}"),
            Column("% of limit", lambda row: table.format_known(of_limit(record, row))),
            Column(
                "lowbit ×", lambda row: f"{row.ratios['lowbit'].median:.2f}" if row.ratios else ""
            ),
            table.ERROR,
        )
        shown = [
            table.table(f"{each[0].dtypes}: {FORMATS[each[0].dtypes].text}", each, columns,
                        by_time=False)
            for each in groups(record.rows, "dtypes")
        ]  # fmt: skip
        return table.page(record, "", *shown, "\n".join(ratios_page(record)))


def of_limit(record: Record, row: Row) -> float | None:
    """The larger of the shares of the two limits that were measured: of bytes read in a second, and
    of operations of this dtype."""
    rate = record.ceilings[0].read_gbs["memory"]
    parts = [row.peak_share, share(row.gbs / rate) if row.weights == "cold" else 0.0]
    return None if None in parts else max(one for one in parts if one is not None)


def against_cublas(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """For each format, state of the weights, other library and number of rows of x: how many times
    as fast as it lowbit is, the geometric mean over the weights and the worst."""
    for each in groups([row for row in rows if row.ratios], "dtypes", "weights", "implementation"):
        for M in dict.fromkeys(row.sizes["M"] for row in each):
            here = [(row.ratios["lowbit"].median, row) for row in each if row.sizes["M"] == M]
            figures, where = standing(here)
            names = ("dtypes", "weights", "implementation")
            yield {
                **{name: getattr(where, name) for name in names},
                "M": M,
                **figures,
                "worst_shape": where.case,
            }


def ratios_page(record: Record) -> Iterator[str]:
    """For a page, in Markdown: by format, how many times as fast as cuBLAS in bfloat16 lowbit is
    with cold weights, a line for each weight and a column for each number of rows of x; then of all
    libraries the geometric mean over the weights, and the least."""
    cold = [row for row in record.rows if row.weights == "cold" and row.kind == PEER]
    for each in groups(cold, "dtypes"):
        format, rows = each[0].dtypes, sorted({row.sizes["M"] for row in each})
        right = [(str(M), True) for M in rows]
        found = {(row.sizes["N"], row.sizes["K"], row.sizes["M"]): row.ratios["lowbit"].median
                 for row in each if row.implementation == CuBlas.name}  # fmt: skip
        lines = [
            [f"{N}×{K}", *(f"{found[N, K, M]:.2f}" if (N, K, M) in found else "" for M in rows)]
            for N, K in dict.fromkeys(key[:2] for key in found)
        ]
        yield table.markdown([(f"{format}, N×K \\ M", False), *right], lines)
        means = {
            (one["implementation"], one["M"]): f"{one['geometric_mean']:.2f} ({one['worst']:.2f})"
            for one in record.summary
            if (one["dtypes"], one["weights"]) == (format, "cold")
        }
        names = dict.fromkeys(row.implementation for row in each)
        lines = [[name, *(means.get((name, M), "") for M in rows)] for name in names]
        yield table.markdown([(f"{format}, against \\ M", False), *right], lines)
