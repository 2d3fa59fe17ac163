"""A trace as text."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lowbit.report.text import format_seconds, new_table
from lowbit_lab.bench.core.table import facts_table, format_known
from lowbit_lab.trace import replay, roles
from lowbit_lab.trace.operators import operators_table
from lowbit_lab.trace.report import Limit, Loop, Trace

_OPERATORS = 12
_LISTED = 40
_CACHED = "all operands in the nearest cache"


def render(trace: Trace, whole: bool = False) -> RenderableType:
    """The verdict first, then operators, callers, the loop and its limit. whole: every operator,
    frame and instruction."""
    parts: list[RenderableType] = [Text(f"{trace.subject} on {trace.cpu}", style="bold"), ""]
    parts += [_head(trace), "", _operators(trace, whole), *_chain(trace, whole), ""]
    if trace.parts:
        parts += [_parts(trace), ""]
    if trace.loops:
        parts += list(_hot(trace.loops[0], whole))
        if trace.limit is not None:
            parts += ["", *_limit(trace.limit)]
        if len(trace.loops) > 1:
            parts += ["", _others(trace)]
    else:
        parts.append(Text(trace.why))
    parts += [Text(f"Note: {note}.") for note in trace.notes]
    before, while_sampled = (
        format_seconds(seconds) for seconds in (trace.mean_cpu_seconds, trace.sampled_cpu_seconds)
    )
    cost = f"a call took {while_sampled} of the processor while sampled, {before} before"
    parts.append(Text(f"{trace.samples} samples: {cost}; all took {trace.took_seconds:.0f} s."))
    return Group(*parts)


def _head(trace: Trace) -> Table:
    table = facts_table()
    table.add_row("fast path", Text(trace.verdict.text))
    if trace.operators:
        first = trace.operators[0]
        table.add_row(
            "operator", Text(f"{first.name}, {first.share:.0%} of all operators' own time")
        )
    if trace.loops:
        hot = trace.loops[0]
        callers = [frame.function for frame in trace.chain[:-1] if frame.named and frame.matters]
        by = f", called by {callers[-1]}" if callers else ""
        where = f" in {hot.library}" if hot.library else f", made at run time{by}"
        table.add_row("kernel", Text(f"{hot.function}{where}"))
        table.add_row("instructions", _instructions(hot))
    low, high = format_seconds(trace.seconds.p10), format_seconds(trace.seconds.p90)
    ran = f"; the processor took {format_seconds(trace.cpu_seconds)} at least"
    middle = format_seconds(trace.seconds.median)
    count = "1 thread" if trace.threads == 1 else f"{trace.threads} threads"
    table.add_row("one call", f"{middle} ({low} to {high}), untraced, {count}{ran}")
    return table


def _instructions(hot: Loop) -> str:
    wide = f", {hot.vector_bits}-bit vectors" if hot.vector_bits else ""
    sets = ", ".join(hot.instruction_sets) or "no vector instructions"
    return f"{', '.join(hot.products) or 'no products'}{wide}; sets: {sets}"


def _operators(trace: Trace, whole: bool) -> Table:
    shown = trace.operators if whole else trace.operators[:_OPERATORS]
    table = operators_table(f"Operators, by {trace.operators_by}", shown)
    left = len(trace.operators) - _OPERATORS
    if left > 0 and not whole:
        table.caption = f"and {left} more; --whole shows all"
    return table


def _chain(trace: Trace, whole: bool) -> Iterator[RenderableType]:
    yield Text("Call chain, from Python to the kernel", style="bold")
    depth = left = 0
    for where, group in groupby(trace.chain, key=lambda frame: frame.named or frame.where):
        frames = list(group)
        if whole or where is True:
            matter = (frame for frame in frames if whole or frame.matters)
            shown = [f"{frame.function}  [{frame.where}]" for frame in matter]
        else:  # those without a name as one
            shown = [f"{len(frames)} without a name  [{where}]"]
        for line in shown:
            yield Text(f"  {' ' * depth}{line}")
            depth += not whole
        left += len(frames) - len(shown)
    if left:
        yield Text(f"  ({left} frames that only hand the call on are left out; --whole shows all)")


def _parts(trace: Trace) -> Table:
    table = new_table("Where the time goes", [("part", False), ("share", True), ("in", False)])
    for part in trace.parts:
        table.add_row(part.name, f"{part.share:.1%}", Text(", ".join(part.functions)))
    return table


def _hot(hot: Loop, whole: bool) -> Iterator[RenderableType]:
    yield Text(
        f"Hot {hot.form}: {hot.share:.0%} of the samples, {hot.instructions} instructions "
        f"at {hot.start:#x}; part: {hot.part}",
        style="bold",
    )
    yield Text("  structure: " + ", ".join(f"{n} {role}" for role, n in hot.structure.items()))
    yield Text("  mix: " + ", ".join(f"{n} {name}" for name, n in list(hot.mix.items())[:12]))
    if hot.multiply_adds:
        loads, stores = hot.loads_per_product or 0.0, hot.stores_per_product or 0.0
        yield Text(
            f"  {hot.multiply_adds:,} multiply–adds a round in {hot.arithmetic}, "
            f"into {hot.accumulators} registers; "
            f"{loads:.2f} loads and {stores:.2f} stores for each instruction that multiplies"
        )
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 2))
    for justify in ("right", "left", "left"):
        table.add_column(justify=justify, no_wrap=True)  # type: ignore[arg-type]
    lines = hot.listing if whole else hot.listing[:_LISTED]
    for line in lines:
        count = str(line.samples) if line.samples else ""
        table.add_row(count, Text(line.text), ", ".join(line.roles))
    yield table
    if len(hot.listing) > len(lines):
        yield Text(f"  and {len(hot.listing) - len(lines)} more instructions; --whole shows all")


def _limit(limit: Limit) -> Iterator[RenderableType]:
    yield Text("What the structure allows, by its own instructions run again", style="bold")
    rounds = ", ".join(
        f"{name} {format_seconds(seconds)}"
        for name, seconds in limit.by.items()
        if name != replay.TOGETHER
    )
    together = format_seconds(limit.by[replay.TOGETHER])
    rate = "" if limit.rate is None else f", {limit.rate * 1e-9:.0f} × 10⁹ multiply–adds a second"
    yield Text(f"  a round takes {together}, {_CACHED}{rate}")
    if rounds:
        yield Text(f"  each kind alone: {rounds}")
    yield Text(f"  limited by: {limit.limited_by}")
    taken = format_seconds(limit.loop_seconds)
    if limit.seconds is None:
        yield Text(f"  such code takes {taken} of a call; how many rounds it makes is not known")
    else:
        reached = "which is below: one of the two was disturbed"
        if limit.reached is not None:
            reached = f"{format_known(limit.reached)} reached"
        allowed = format_seconds(limit.seconds)
        yield Text(f"  a call would take {allowed}; its loops take {taken}: {reached}")


def _others(trace: Trace) -> Table:
    columns = [("other loops", False), ("part", False), ("share", True), ("multiplies with", False)]
    table = new_table("", columns)
    for loop in trace.loops[1:]:
        what = ", ".join(loop.products) or "/".join(
            role for role in loop.structure if role not in (roles.CONTROL, roles.ADDRESS)
        )
        table.add_row(
            Text(f"{loop.function} {loop.start:#x}"), loop.part, f"{loop.share:.1%}", what
        )
    return table
