"""Linear layers with 4-bit weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rich.console import RenderableType
from rich.table import Table

from lowbit.bench.core import table
from lowbit.bench.core.case import LIMIT, OURS, Implementation
from lowbit.bench.core.clock import Limits
from lowbit.bench.core.cpu import PlainRead
from lowbit.bench.core.record import Record, Row, standing
from lowbit.bench.core.suite import Suite, option, suite
from lowbit.bench.core.table import Column
from lowbit.bench.suites.linear.problem import (
    ACTIVATIONS,
    ACTIVATIONS_OF,
    DISTRIBUTION,
    Layer,
    Task,
)
from lowbit.bench.suites.matmul.problem import parse_shape, product
from lowbit.weights.panels import group_refusal

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
    """Time linear layers with 4-bit weights, against PyTorch's own and against float ones. Each is
    compared with float64 on the dequantized weights first."""

    shapes: tuple[str, ...] = option(
        SHAPES, "Shapes MxK:KxN.", argument=True, shown="six, of 4096x4096 and 4096x14336"
    )
    activations: str = option(
        ",".join(ACTIVATIONS),
        "What lowbit computes with: f32 (W4A32), bf16 (W4A16), int8 (W4A8).",
    )
    group_size: int = option(128, "How many k share a scale; 0: all.")
    zero_points: bool = option(False, "Whether groups have zero points of their own.")

    name: ClassVar[str] = "linear"
    example: ClassVar[str] = "1x4096:4096x4096 --activations f32,int8"
    distribution: ClassVar[str] = DISTRIBUTION
    colds: ClassVar[bool] = True
    patient: ClassVar[bool] = True
    # A virtual machine may say less of its last cache than there is.
    least_cold_bytes: ClassVar[int] = 256 << 20

    def __post_init__(self) -> None:
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

    @property
    def limits(self) -> Limits:
        return Limits(least_rounds=5)

    def settings(self) -> Mapping[str, Any]:
        return {"group_size": self.group_size, "zero_points": self.zero_points}

    def cases(self, seed: int = 0) -> Sequence[Layer]:
        return [self._layer(text, parse_shape(text)) for text in dict.fromkeys(self.shapes)]

    def _layer(self, name: str, sizes: Mapping[str, int]) -> Layer:
        groups = {"group_size": self.group_size, "zero_points": self.zero_points}
        return Layer("linear", name, sizes=sizes, **groups)

    def tried(self, case: Layer) -> Layer:
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

    def make(self, case: Layer, seed: int) -> Task:
        return Task.make(case, seed)

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

    def render(self, record: Record) -> RenderableType:
        shown = table.tables(record.rows, self.columns(record.rows))
        summed = [_means(record.summary), ""] if record.summary else []
        return table.page(record, self.title(record), "", *shown, *summed)


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


def _means(found: Sequence[dict[str, Any]]) -> Table:
    names = [name for name in ACTIVATIONS_OF if any(one["ours"] == name for one in found)]
    made = table.new_table(
        "times as fast as others: geometric mean over the shapes (least)",
        [(each, False) for each in ("threads", "weights", "sizes", "lowbit against")]
        + [("shapes", True), *((name.removeprefix("lowbit "), True) for name in names)],
    )
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for one in found:
        key = tuple(str(one[x]) for x in ("threads", "weights", "sizes", "implementation", "rows"))
        mean = f"{table.three_digits(one['geometric_mean'])} ({table.three_digits(one['worst'])})"
        lines.setdefault(key, {})[one["ours"]] = mean
    for key, each in lines.items():
        made.add_row(*key, *(each.get(name, "") for name in names))
    return made
