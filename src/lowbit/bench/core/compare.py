"""Two records of one suite, row by row: same, faster, slower, or unclear.

A row's median is known to within its noise, half of a distribution-free 95 % interval. The ratio of
two medians is compared on a logarithmic scale, where such intervals combine as the root of the sum
of their squares (Price and Bonett, "Distribution-free confidence intervals for difference and ratio
of medians", Journal of Statistical Computation and Simulation 72, 2002; for intervals of any kind
Zou and Donner, "Construction of confidence limits about effect measures", Statistics in Medicine
27, 2008). Two runs differ by more than their rounds do: rows of other libraries whose version is
the same in both are controls, and 1.96 standard deviations of their change, estimated from the
median absolute one, are added in the same way. With fewer than three controls nobody knows how much
the machine itself changed; then half of the spread of the rounds (10th to 90th percentile), which
shows what a change of the machine does, stands for a median's noise.

- same: the interval lies within the margin, on both sides (two one-sided tests: Schuirmann, Journal
  of Pharmacokinetics and Biopharmaceutics 15, 1987).
- faster, slower: it does not, and lies below 1, or above it.
- unclear: it holds 1 and reaches beyond the margin; or a median has no interval; or the records are
  of different machines.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from lowbit.bench.core import table
from lowbit.bench.core.case import LIMIT, PEER
from lowbit.bench.core.record import Record, Row

MARGIN = 0.05
VERDICTS = ("slower", "faster", "unclear", "same")
_NORMAL, _FROM_ABSOLUTE, _LEAST_CONTROLS = 1.96, 1.4826, 3
_MACHINE = ("cpu", "gpu", "isa", "thread_runtime")


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A row in both records. ratio: the new median over the old one, with its 95 % interval `low`
    to `high`; None where there is none. why: what makes it unclear."""

    name: str
    implementation: str
    kind: str
    old_seconds: float
    new_seconds: float
    ratio: float
    low: float | None
    high: float | None
    verdict: str
    why: str = ""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """All rows. drift: by what share the controls, so many, changed between the runs; None with too
    few of them. differences: what of machine, versions and settings is not the same. only_old,
    only_new: names of rows that one record lacks."""

    suite: str
    old: dict[str, Any]
    new: dict[str, Any]
    margin: float
    controls: int
    drift: float | None
    differences: tuple[str, ...]
    changes: tuple[Change, ...]
    only_old: tuple[str, ...]
    only_new: tuple[str, ...]

    @property
    def counts(self) -> dict[str, int]:
        """By verdict, how many of the rows that are no other library's."""
        found = Counter(one.verdict for one in self.changes if one.kind != PEER)
        return {verdict: found[verdict] for verdict in VERDICTS}

    def to_json(self) -> str:
        """Everything as JSON text."""
        plain = {**msgspec.to_builtins(self), "counts": self.counts}
        return msgspec.json.format(msgspec.json.encode(plain), indent=2).decode()


def compare(old: Record, new: Record, margin: float = MARGIN) -> Comparison:
    """Compare two records of one suite. margin: the share by which times may differ and still be
    the same, above 0. ValueError: another suite, no row in both, or a margin that is none."""
    if not 0 < margin < math.inf:
        raise ValueError(f"margin is {margin}; it must be above 0, for example {MARGIN}")
    if old.suite != new.suite:
        raise ValueError(f"records of two suites, {old.suite} and {new.suite}, do not compare")
    before, after = ({r.name: r for r in one.rows if r.kind != LIMIT} for one in (old, new))
    both = [name for name in after if name in before]
    if not both:
        raise ValueError("no row is in both records: give two of the same cases and threads")
    differences = _differences(old.context, new.context)
    other = next((one for one in differences if one.startswith(_MACHINE)), "")
    controls = [
        abs(math.log(after[name].seconds.median / before[name].seconds.median))
        for name in both
        if after[name].kind == PEER and after[name].version == before[name].version
    ]
    known = len(controls) >= _LEAST_CONTROLS
    drift = _NORMAL * _FROM_ABSOLUTE * float(np.median(controls)) if known else None
    pairs = ((before[name], after[name]) for name in both)
    return Comparison(
        suite=new.suite,
        old=old.context,
        new=new.context,
        margin=margin,
        controls=len(controls),
        drift=drift,
        differences=differences,
        changes=tuple(_change(*pair, margin, drift, other) for pair in pairs),
        only_old=tuple(name for name in before if name not in after),
        only_new=tuple(name for name in after if name not in before),
    )


def _differences(old: dict[str, Any], new: dict[str, Any]) -> tuple[str, ...]:
    """What of two contexts is not the same, in words."""
    names = (*_MACHINE, "seed", "distribution")
    pairs = [(name, old.get(name), new.get(name)) for name in names]
    versions = old.get("versions", {}), new.get("versions", {})
    for name in dict.fromkeys((*versions[0], *versions[1])):
        pairs.append((f"version of {name}", versions[0].get(name), versions[1].get(name)))
    return tuple(f"{name}: {one}, then {two}" for name, one, two in pairs if one != two)


def _change(old: Row, new: Row, margin: float, drift: float | None, other: str) -> Change:
    middle = math.log(new.seconds.median / old.seconds.median)
    low = high = None
    verdict, why = "unclear", other and f"another machine ({other})"
    if old.noise is None or new.noise is None:
        why = why or f"too few rounds for an interval: {old.rounds}, then {new.rounds}"
    else:
        if drift is None:
            reach = math.hypot(*(math.log(s.p90 / s.p10) / 2 for s in (old.seconds, new.seconds)))
        else:
            reach = math.hypot(old.noise, new.noise, drift)
        low, high = middle - reach, middle + reach
        if not why:
            verdict = _verdict(low, high, math.log1p(margin))
            why = "the interval holds 1 and more than the margin" if verdict == "unclear" else ""
    return Change(
        name=new.name,
        implementation=new.implementation,
        kind=new.kind,
        old_seconds=old.seconds.median,
        new_seconds=new.seconds.median,
        ratio=math.exp(middle),
        low=None if low is None else math.exp(low),
        high=None if high is None else math.exp(high),
        verdict=verdict,
        why=why,
    )


def _verdict(low: float, high: float, margin: float) -> str:
    """Of an interval of the logarithm of new over old."""
    if -margin <= low and high <= margin:
        return "same"
    if high < 0:
        return "faster"
    return "slower" if low > 0 else "unclear"


_COLUMNS = (("row", False), ("old", True), ("new", True), ("new / old", True), ("95 %", True))


def render(found: Comparison) -> RenderableType:
    """As text: lowbit's own rows and steps; other libraries' rows are the controls."""
    shown = table.new_table(
        f"{found.suite}: {_run(found.old)}, then {_run(found.new)}",
        [*_COLUMNS, ("verdict", False)],
    )
    rows = [one for one in found.changes if one.kind != PEER]
    for one in sorted(rows, key=lambda one: (VERDICTS.index(one.verdict), -one.ratio)):
        reach = f"{one.low:.3f} to {one.high:.3f}" if one.low and one.high else "not known"
        times = map(table.format_seconds, (one.old_seconds, one.new_seconds))
        style = {"slower": "bold red", "faster": "bold green"}.get(one.verdict)
        verdict = f"{one.verdict}: {one.why}" if one.why else one.verdict
        shown.add_row(one.name, *times, f"{one.ratio:.3f}", reach, verdict, style=style)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in found.counts.items())
    return Group(Text(f"{counts}; same is within {found.margin:.0%}"), shown, *_notes(found))


def _run(context: dict[str, Any]) -> str:
    return f"{context.get('date', 'some day')} ({(context.get('commit') or 'no commit')[:12]})"


def _notes(found: Comparison) -> Sequence[Text]:
    lines = [f"{found.controls} controls, rows of other libraries of the same version"]
    if found.drift is None:
        lines[0] += f": fewer than {_LEAST_CONTROLS}, so the spread of rounds is the interval"
    else:
        lines[0] += f": the runs themselves differ by up to {found.drift:.1%}, which is in the 95 %"
    lines += [f"not the same, {one}" for one in found.differences]
    for which, names in (("old", found.only_old), ("new", found.only_new)):
        if names:
            lines.append(f"only in the {which} record: {', '.join(names)}")
    return [Text(line, style="dim") for line in lines]
