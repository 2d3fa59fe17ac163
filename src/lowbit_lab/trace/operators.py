"""The operators that a library ran, as a table: how often, and how long each took."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from lowbit.report.text import format_seconds, new_table


@dataclass(frozen=True)
class Operator:
    """A line of the table: seconds of all its calls, in itself and with what it calls; its share of
    all operators' own time; seconds of one call, with what it calls."""

    name: str
    self_seconds: float
    total_seconds: float
    share: float
    calls: float
    mean_seconds: float

    @staticmethod
    def rows(found: Sequence[tuple[str, float, float, float]]) -> list[Operator]:
        """Of names, own and total seconds, and calls; the longest first."""
        whole = sum(own for _, own, _, _ in found) or 1.0
        made = [Operator(name, own, all_, own / whole, n, all_ / n) for name, own, all_, n in found]
        return sorted(made, key=lambda row: -row.self_seconds)

    @staticmethod
    def table(taken: Mapping[str, Sequence[float]]) -> list[Operator]:
        """Of the seconds of each call, where none calls another."""
        return Operator.rows([(name, sum(s), sum(s), len(s)) for name, s in taken.items()])


def of_torch(call: Callable[[], object], runs: int = 1) -> list[Operator]:
    """Those of PyTorch in a call, by its profiler; each figure is one of so many `runs`."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as seen:
        call()
    scale = 1e-6 / runs
    return Operator.rows(
        [
            (o.key, o.self_cpu_time_total * scale, o.cpu_time_total * scale, o.count / runs)
            for o in seen.key_averages()
            if o.self_cpu_time_total > 0 and not o.key.startswith("ProfilerStep")
        ]
    )


def operators_table(title: str, rows: Sequence[Operator]) -> Table:
    """As text."""
    columns = [("operator", False), ("self", True), ("share", True), ("total", True)]
    table = new_table(title, [*columns, ("calls", True), ("mean", True)])
    for row in rows:
        own, total = format_seconds(row.self_seconds), format_seconds(row.total_seconds)
        mean = format_seconds(row.mean_seconds)
        table.add_row(Text(row.name), own, f"{row.share:.1%}", total, f"{row.calls:g}", mean)
    return table
