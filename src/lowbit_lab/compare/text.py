"""A comparison as text for a terminal, and its chart."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lowbit.report.charts import bars
from lowbit.report.page import Figure
from lowbit.report.text import format_seconds, new_table, three_digits
from lowbit_lab.bench.core.record import Spread
from lowbit_lab.bench.core.table import format_error, format_known, format_ratio, format_spread
from lowbit_lab.compare.code import KINDS
from lowbit_lab.compare.explain import Change, Explained, Timed
from lowbit_lab.compare.ptx.execute import AccessCost
from lowbit_lab.compare.run import Result


def render(result: Result, notes: bool = False) -> RenderableType:
    """The table of all variants, each variant's types and faults, and what changed between
    neighbours. notes: also what costs little."""
    sizes = ", ".join(f"{name}={size}" for name, size in result.sizes.items())
    small = ", ".join(f"{name}={size}" for name, size in result.small.items())
    sizes += f"; checked at {small}" if small != sizes else ""
    where = ""
    if any(each.built.ptx is not None for each in result.variants):
        device = f"timed on {result.device}" if result.device else "no GPU here"
        where = f"; compiled for sm_{result.sm}; {device}"
    parts: list[RenderableType] = [Text(f"{result.file}: {sizes}{where}", "bold"), Text("")]
    parts += _times(result)
    parts.append(_table(result))
    parts += [Text(f"note: {note}", "dim") for note in result.notes]
    for each in result.variants:
        parts += ["", _variant(each, notes)]
    for each in result.changes:
        parts += ["", _change(each)]
    return Group(*parts)


def _times(result: Result) -> Iterator[RenderableType]:
    """A row for everybody who was timed."""
    if not (timed := result.timed):
        return
    bases = list(dict.fromkeys(name for one in timed for name in one.ratios))
    headings = ["time", "p10 to p90", *(["GOP/s"] if result.operations else [])]
    headings += ["% of peak"] if result.ceiling else []
    headings += [f"times as fast as {name}" for name in bases]
    columns = [("variant", False), *((name, True) for name in headings), ("error", True)]
    ideas = any(one.idea for one in timed)
    table = new_table("Times", [*columns, *([("what it is", False)] if ideas else [])])
    for one in timed:
        assert one.seconds is not None
        row = [one.name, format_seconds(one.seconds[1])]
        row.append(format_spread(Spread(*one.seconds)) if one.rounds > 1 else "one run")
        if result.operations:
            row.append(three_digits(result.operations / one.seconds[1] / 1e9))
        if result.ceiling:
            row.append(format_known(one.peak_share))
        row += [_ratio(one, name) for name in bases]
        row.append("" if one.error is None else format_error(one.error))
        table.add_row(*row, *([one.idea] if ideas else []))
    yield table
    if result.ceiling:
        peak = result.ceiling
        yield Text(
            f"peak: {three_digits(peak.gops)} GOP/s of {peak.dtype} ({peak.way}), measured with "
            "one thread, as all was timed; error: the largest, as a share of the largest result"
        )


def _ratio(one: Timed, base: str) -> str:
    if base not in one.ratios:
        return ""
    ratio = Spread(*one.ratios[base])
    return format_ratio(ratio) if one.rounds > 1 else three_digits(ratio.median)


_HEADINGS = {
    "arithmetic": "arith", "address": "addr", "conversion": "conv", "memory": "mem",
    "control": "loop", "other": "other",
}  # fmt: skip


def _table(result: Result) -> Table:
    """A row a variant; numbers of instructions are per iteration of the inner loop."""
    headings = ["right", "regs", "spill", "warps", "unroll", "instr"]
    headings += [*(_HEADINGS[kind] for kind in KINDS), "uniform", "per arith", "bytes"]
    title = "Instructions and bytes per iteration of the inner loop, as the text writes it"
    rows: list[list[str]] = []
    for each in result.variants:
        loop, machine, held = each.loop, each.machine, each.occupancy
        rows.append([
            {True: "yes", False: "NO", None: "?"}[each.checked.ok],
            str(machine.registers) if machine else "",
            str(machine.spill_stores + machine.spill_loads) if machine else "",
            f"{held.warps}/{held.most}" if held else "",
            f"{loop.unrolled:.3g}" if loop else "",
            three_digits(loop.per_iteration) if loop else "",
            *(_count(loop.mix[kind]) if loop else "" for kind in KINDS),
            _count(loop.uniform) if loop else "",
            three_digits(loop.per_arithmetic) if loop and loop.per_arithmetic else "",
            "" if each.moved is None else three_digits(each.moved),
        ])  # fmt: skip
    # What nobody knows, as registers of what runs on a CPU, has no column.
    kept = [at for at in range(len(headings)) if any(row[at] for row in rows)]
    table = new_table(title, [("variant", False), *((headings[at], True) for at in kept)])
    table.columns[0].no_wrap = True
    for each, row in zip(result.variants, rows, strict=True):
        table.add_row(each.name, *(row[at] for at in kept))
    return table


def _count(number: float) -> str:
    return three_digits(number) if number else "0"


def _variant(variant: Explained, notes: bool) -> Text:
    text = Text(f"{variant.name} ({variant.kind}", "bold")
    text.append(f", {variant.built.made_by})" if variant.built.made_by else ")")
    lines = [f"check: {variant.checked}"]
    if variant.types:
        lines.append("types: " + ", ".join(f"{t.name} {t.type}" for t in variant.types))
    for access in variant.accesses:
        lines.append(f"line {access.line}: {_access(access)}")
    text.append("".join(f"\n  {line}" for line in lines), "not bold")
    for fault in variant.faults:
        if fault.severity == "note" and not notes:
            continue
        style = "red" if fault.severity == "fault" else "yellow"
        place = f"line {fault.line}: " if fault.line else ""
        text.append(f"\n  {fault.severity}: {place}{fault.title}: {fault.message}", style)
        if source := variant.text_of(fault.line):
            text.append(f"\n      {source}", "dim")
    hidden = sum(f.severity == "note" for f in variant.faults) if not notes else 0
    if hidden:
        text.append(f"\n  {hidden} more notes: --notes", "dim")
    for note in variant.notes:
        text.append("\n  note: " + note.replace("\n", "\n    "), "dim")
    return text


def _access(cost: AccessCost) -> str:
    what = f"{'store to' if cost.stores else 'load from'} {cost.space} memory"
    what += f", {cost.nbytes} bytes a thread"
    if cost.space == "shared":
        return f"{what}: the busiest bank is asked {cost.conflict:.3g} times"
    return f"{what}: {cost.sectors:.3g} sectors a warp, {cost.least:.3g} would do"


def _change(change: Change) -> Text:
    text = Text(f"{change.before} → {change.after}", "bold")
    for line in _changes(change):
        style = {"-": "red", "+": "green"}.get(line[:1], "")
        text.append(f"\n  {line}", style or "not bold")
    return text


def _changes(change: Change) -> Iterator[str]:
    yield from change.text
    if change.types:
        yield "types: " + "; ".join(change.types)
    if change.registers:
        yield f"registers: {change.registers[0]} → {change.registers[1]}"
    if change.loop:
        said = (f"{kind} {_count(a)} → {_count(b)}" for kind, (a, b) in change.loop.items())
        yield "per iteration: " + ", ".join(said)
    if change.faults:
        yield "faults: " + ", ".join(change.faults)
    if change.time:
        yield f"time: × {three_digits(change.time)}"


def figures(result: Result) -> Iterator[Figure]:
    """The speed of everybody who was timed."""
    work, unit = (result.operations / 1e9, "GOP/s") if result.operations else (1, "calls/s")
    speeds = [
        {"name": one.name, "speed": work / one.seconds[1]} for one in result.timed if one.seconds
    ]
    if speeds:
        command = f"lowbit compare {result.file}"
        yield Figure(bars(speeds, "name", "speed", unit), f"{result.file}: speed.", command)
