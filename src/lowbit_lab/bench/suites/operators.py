"""The operators of `lowbit.torch.functional` on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import RenderableType

from lowbit.registry.extras import require
from lowbit_lab.bench.core import table
from lowbit_lab.bench.core.case import OURS, PEER, Implementation, Ready
from lowbit_lab.bench.core.clock import Limits
from lowbit_lab.bench.core.record import Record, Row
from lowbit_lab.bench.core.suite import Suite, option, suite
from lowbit_lab.bench.core.table import Column

if TYPE_CHECKING:
    from lowbit_lab.bench.core.cuda import Cuda
    from lowbit_lab.bench.operators.registry import OperatorCase, OperatorProblem

_COMPILED = "torch.compile"


class Named(Implementation):
    """One of the calls that a problem has, by its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.kind = OURS if name == "lowbit" else PEER

    def library(self) -> tuple[str, str]:
        import torch

        return super().library() if self.kind == OURS else ("torch", str(torch.__version__))

    def prepare(self, problem: OperatorProblem, threads: int) -> Ready:
        return Ready(problem.calls[self.name], read=lambda result: result)


@suite
@dataclass(frozen=True)
class Operators(Suite):
    """Time the operators of lowbit.torch.functional against PyTorch's, on a GPU.

    All implementations get the same data, are compared with float64 first, and take turns in
    random order with cold caches. Exit code 2 where there is no GPU.
    """

    device: str = option("cuda", "The GPU: cuda, or cuda:1.")
    op: tuple[str, ...] = option((), "An operation by its name; may be repeated.", shown="all")
    quick: bool = option(False, "A few cases of each operation.")
    compile: bool = option(True, "Whether to time torch.compile too.")

    name: ClassVar[str] = "ops"
    example: ClassVar[str] = "--device cuda --op softmax --op row_sum --json record.json"
    distribution: ClassVar[str] = "normal, mean 0, deviation 1"
    ceiling: ClassVar[str] = ""
    threaded: ClassVar[bool] = False

    @property
    def limits(self) -> Limits:
        return Limits(seconds=0.5, most_rounds=400)

    def clock(self) -> Cuda:
        require("lowbit bench ops", "gpu", "torch", "triton")
        from lowbit_lab.bench.core.cuda import Cuda

        return Cuda(self.device)

    def cases(self, seed: int = 0) -> Sequence[OperatorCase]:
        from lowbit_lab.bench.operators.registry import operators

        names = self.op or operators.names()
        return [case for name in names for case in operators.get(name).chosen(self.quick)]

    def make(self, case: OperatorCase, seed: int) -> OperatorProblem:
        import torch

        from lowbit_lab.bench.operators.registry import operators

        generator = torch.Generator(torch.device(self.device)).manual_seed(seed)
        return operators.get(case.operation).make(case, generator)

    def implementations(self) -> Sequence[Implementation]:
        return [Named("lowbit")]  # the others are known when a case is made

    def taking_part(
        self, problem: OperatorProblem, chosen: Sequence[Implementation]
    ) -> list[Implementation]:
        from lowbit_lab.bench.core.cuda import Copy
        from lowbit_lab.bench.operators.registry import operators

        several: list[Implementation] = [
            Named(name) for name in problem.calls if self.compile or name != _COMPILED
        ]
        limited = operators.get(problem.case.operation).copies
        return [*several, Copy()] if limited else several

    def render(self, record: Record) -> RenderableType:
        cells: list[str] = []

        def first(cell: Any) -> Any:
            """Only where it changes from one row to the next."""

            def text(row: Row) -> str:
                mine = f"{row.operation} {row.dtypes} {row.case}"
                news = not cells or cells[-1] != mine
                cells.append(mine)
                return cell(row) if news else ""

            return text

        columns = (
            Column("case", first(lambda row: f"{row.operation} {row.dtypes} {row.case}"), False),
            table.IMPLEMENTATION,
            *table.MICROSECONDS,
            Column("GB/s", lambda row: f"{row.gbs:,.0f}"),
            Column("% of copy", table.limit_share),
            Column("TFLOP/s", lambda row: f"{row.gops / 1e3:,.1f}"),
            Column("lowbit ×", _against_lowbit),
            table.ERROR,
        )
        return table.page(record, "", table.table("", record.rows, columns, by_time=False))


def _against_lowbit(row: Row) -> str:
    ratio = row.ratios.get("lowbit")
    return "" if ratio is None else table.three_digits(ratio.median)
