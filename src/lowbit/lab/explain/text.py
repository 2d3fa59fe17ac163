"""An explanation as text."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lowbit.bench.core.table import format_known, format_seconds, format_spread, three_digits
from lowbit.lab.explain.plan import Blocking, Explanation, Operand


def render(one: Explanation) -> RenderableType:
    """One line a fact, grouped as the way of the data goes."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("kernel", f"{one.kernel} on {one.isa}")
    for each in one.rejected:
        name = each.isa if each.kernel is None else f"{each.kernel} on {each.isa}"
        table.add_row("rejected", f"{name}: {each.why}")
    _add_blocking(table, one.blocking)
    if one.left is None:
        table.add_row("left in place", "its rows are read where they lie")
    else:
        table.add_row("left packed", _operand(one.left) + ", in every call")
    beside = f"; beside it {one.beside_right_bytes:,} bytes of sums and scales"
    table.add_row("right packed", _operand(one.right) + beside)
    if one.largest_pair is not None:
        table.add_row(
            "proof", f"neighbouring weights of one sign sum to {one.largest_pair} at most"
        )
    _add_times(table, one)
    title = Text(f"{one.operation} {one.dtypes} {one.shape} on {one.cpu}", style="bold")
    return Group(title, "", table)


def _add_blocking(table: Table, cut: Blocking) -> None:
    panels = f"{_count(cut.panels, 'panel')} of 16 columns"
    blocks = f"{_count(cut.row_blocks, 'block')} of {_count(cut.block_rows, 'row')}"
    table.add_row("step", f"{blocks} by {panels}")
    item = f"{_count(cut.item_steps, 'step')} by {_count(cut.item_panels, 'panel')}"
    share = f"{_count(cut.items, 'item')} for {_count(cut.threads, 'thread')}"
    table.add_row("item", f"{item}; {share}")
    rows = _count(cut.chunk_rows, "row")
    table.add_row("chunk", f"{rows} in one call of the machine code")


def _count(number: int, of: str) -> str:
    return f"{number} {of}{'' if number == 1 else 's'}"


def _operand(one: Operand) -> str:
    return (
        f"{one.given_bytes:,} bytes become {one.packed_bytes:,}, of which "
        f"{format_known(one.padding)} is padding"
    )


def _add_times(table: Table, one: Explanation) -> None:
    guess, limits = one.prediction, one.ceiling
    table.add_row(
        "compute",
        f"{format_seconds(guess.compute_seconds)}: {guess.operations:,} operations at the measured "
        f"{limits.gops:.0f} GOP/s ({limits.way})",
    )
    table.add_row(
        "memory",
        f"{format_seconds(guess.memory_seconds)}: {guess.moved_bytes:,} bytes at the measured "
        f"{limits.read_gbs[guess.level]:.0f} GB/s of {guess.level}",
    )
    table.add_row("predicted", f"{format_seconds(guess.seconds)}, limited by {guess.limit}")
    spread = format_spread(one.measured)
    table.add_row("measured", f"{format_seconds(one.measured.median)} ({spread})")
    reached = "not known: the limits were not measured well, other work had the cores"
    if one.reached is not None:
        reached = f"{three_digits(100 * one.reached)} % of what the limit allows"
    table.add_row("reached", reached)
