"""Numbers as text, and tables of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # numbers do without rich
    from rich.table import Table


def new_table(title: str, columns: Sequence[tuple[str, bool]]) -> Table:
    """An empty table; for each column its heading, and whether it is set to the right."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for heading, right in columns:
        if right:
            table.add_column(heading, justify="right")
        else:
            table.add_column(heading, overflow="fold")
    return table


def format_seconds(seconds: float) -> str:
    """A duration with its unit, about three significant digits."""
    unit, size = unit_of(seconds)
    return f"{three_digits(seconds / size)} {unit}"


def unit_of(seconds: float) -> tuple[str, float]:
    """The unit that a duration is told in, and how many seconds it has."""
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
    return next((unit for unit in units if seconds >= unit[1]), units[-1])


def three_digits(value: float) -> str:
    """A positive number with two or three significant digits."""
    if value >= 100:
        return f"{value:.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"
