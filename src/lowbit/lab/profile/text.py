"""A profile as text, and its charts."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from lowbit.bench.core.table import (
    format_known,
    format_seconds,
    limits_line,
    new_table,
    thread_text,
)
from lowbit.lab.charts import bars, roofline
from lowbit.lab.page import Figure
from lowbit.lab.profile.profile import Operator, Profile, Side, figures_of

_MOST_OPERATORS = 20
_DOUBTFUL = "?"  # marks what was not measured well
_LITTLE = 0.1  # of the time: a ratio may hold in spite of it


def render(found: Profile) -> RenderableType:
    """For a terminal."""
    samples = f"{found.samples} sample{'s' if found.samples != 1 else ''}"
    where = f"{found.cpu}, {found.isa}, {thread_text(found.threads)}"
    parts: list[RenderableType] = [Text(found.name, "bold"), Text(f"{samples} on {where}")]
    parts += map(limits_line, found.ceilings)
    if found.operators:
        parts += _operators(found.operators)
    for side in found.sides:
        if side.untimed:
            parts.append(Text(f"{side.name}: not timed: {side.untimed}"))
        else:
            parts += [_kinds(side), _layers(side), *_doubts(side)]
    if len(found.sides) == 2 and all(side.seconds for side in found.sides):
        before, after = found.sides
        ratio = before.seconds / after.seconds
        doubtful = max(before.doubtful_share, after.doubtful_share) > _LITTLE
        mark = f" {_DOUBTFUL}" if doubtful else ""
        parts.append(
            Text(f"{after.name}: {ratio:.2f} times as fast as {before.name}{mark}", "bold")
        )
    note = "limit: the larger of the times by compute, at the measured peak of what the layer "
    note += "computes in, and by memory, its bytes at the read rate of the cache that holds them. "
    note += "winograd makes a quarter of the multiply-adds, of words."
    return Group(*parts, Text(note, "dim"))


def _operators(several: tuple[Operator, ...]) -> list[RenderableType]:
    columns = [("operator", False), ("self", True), ("share", True), ("total", True)]
    columns += [("calls", True), ("mean", True)]
    made = new_table("PyTorch's operators, before", columns)
    for one in several[:_MOST_OPERATORS]:
        total, mean = format_seconds(one.total_seconds), format_seconds(one.mean_seconds)
        own = format_seconds(one.self_seconds), f"{one.share:.1%}"
        made.add_row(one.name, *own, total, f"{one.calls:.4g}", mean)
    left = several[_MOST_OPERATORS:]
    rest = f"{len(left)} more take {sum(one.share for one in left):.1%}" if left else ""
    return [made, Text(rest, "dim")]


def _kinds(side: Side) -> RenderableType:
    columns = [("operator", False), ("in", False), ("calls", True), ("time", True)]
    columns += [("mean", True), ("share of time", True), ("share of multiply-adds", True)]
    made = new_table(f"{side.name}: {format_seconds(side.seconds)} in all", columns)
    for one in side.kinds:
        operations = f"{one.operation_share:.1%}" if one.multiply_adds else ""
        times = _marked(one.seconds, one.doubtful), format_seconds(one.mean_seconds)
        times = *times, f"{one.share:.1%}"
        made.add_row(one.op, one.computes, str(one.calls), *times, operations)
    return made


def _marked(seconds: float, doubtful: object) -> str:
    return f"{format_seconds(seconds)} {_DOUBTFUL}" if doubtful else format_seconds(seconds)


def _doubts(side: Side) -> Iterator[RenderableType]:
    """A sentence of the layers that were not measured well, and why."""
    doubtful = [layer for layer in side.layers if layer.doubt]
    if doubtful:
        worst = max(doubtful, key=lambda layer: layer.seconds)
        count = (
            f"{len(doubtful)} of {len(side.layers)} layers, {side.doubtful_share:.1%} of the time"
        )
        yield Text(
            f"Not measured well, marked {_DOUBTFUL}: {count}; {worst.name}: {worst.doubt}. "
            "Other processes may use the cores: measure again when they are idle, or with fewer "
            "--threads.",
            "bold",
        )


def _layers(side: Side) -> RenderableType:
    columns = [("layer", False), ("operator", False), ("kernels", False), ("time", True)]
    columns += [("share", True), ("GOP/s", True), ("limit", True), ("by", False)]
    made = new_table(f"{side.name}: layers", [*columns, ("of the limit", True)])
    for one in side.layers:
        timed = one.multiply_adds and one.seconds > 0
        speed = f"{2e-9 * one.multiply_adds / one.seconds:.1f}" if timed else ""
        by = f"{one.limit}, {one.computes or one.level}" if one.limit == "compute" else one.level
        made.add_row(
            *(one.name, one.op, ", ".join(one.kernels), _marked(one.seconds, one.doubt)),
            *(f"{one.share:.1%}", speed),
            *((format_seconds(one.limit_seconds), by) if one.bytes else ("", "")),
            format_known(one.reached) if one.bytes else "",
        )
    return made


def figures(found: Profile) -> Iterator[Figure]:
    """The roofline of all layers with multiply-adds, and where the time goes."""
    points = figures_of(found)
    if points:
        peaks = {f"{one.dtype} peak": one.gops for one in found.ceilings}
        drawn = roofline(points, peaks, found.ceilings[0].read_gbs)
        yield Figure(drawn, "Each layer against the limits measured in the same call.")
    values = [
        {"side": side.name, "ms": 1e3 * one.seconds, "operator": f"{one.op} {one.computes}".strip()}
        for side in found.sides
        for one in side.kinds
    ]
    if values:
        split = bars(values, "side", "ms", "milliseconds", "operator")
        yield Figure(split, "Time split by operator and what it computes in.")
