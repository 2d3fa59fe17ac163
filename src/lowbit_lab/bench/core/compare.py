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
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from lowbit.registry.files import write_text
from lowbit_lab.bench.core import table
from lowbit_lab.bench.core.case import LIMIT, PEER
from lowbit_lab.bench.core.record import Record, Row, Spread, groups, standing

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


# A history: a folder of records, each under the name of its suite, date and commit.


def read(path: str | Path) -> Record:
    """The record in a file. ValueError, which names the file: it is none."""
    try:
        return Record.from_json(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def keep(record: Record, folder: str | Path) -> Path:
    """Add a record to a folder, which is made if there is none; where it lies then."""
    date = record.context["date"].partition("+")[0].replace(":", "").replace("-", "")
    commit = (record.context.get("commit") or "unknown")[:12]
    path = Path(folder) / f"{record.suite}-{date}-{commit}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, record.to_json() + "\n")
    return path


def records(folder: str | Path, suite: str | None = None) -> list[Record]:
    """The records of a folder, of one suite or of all, the oldest first. ValueError: there is none,
    or a file is none."""
    every = map(read, sorted(Path(folder).glob("*.json")))
    found = [one for one in every if suite in (None, one.suite)]
    if not found:
        of = f" of the suite {suite}" if suite else ""
        raise ValueError(f"{folder} holds no record{of}; --history {folder} of a suite adds one")
    return sorted(found, key=lambda one: one.context["date"])


def pair(old: str | Path, new: str | Path) -> tuple[Record, Record]:
    """Two records, each from a file, or the last of a folder: of the other one's suite, and before
    it. ValueError: there are not two."""
    if Path(new).is_dir():
        later = records(new, None if Path(old).is_dir() else read(old).suite)[-1]
    else:
        later = read(new)
    if not Path(old).is_dir():
        return read(old), later
    date = later.context["date"]
    before = [one for one in records(old, later.suite) if one.context["date"] < date]
    if not before:
        raise ValueError(f"{old} holds no record of {later.suite} from before {date}")
    return before[-1], later


def render_history(several: list[Record], margin: float = MARGIN) -> RenderableType:
    """As text: every row that is no other library's, run after run, and what became of it since the
    run before in which it was."""
    parts: list[RenderableType] = []
    for suite in dict.fromkeys(one.suite for one in several):
        runs = [one for one in several if one.suite == suite]
        columns = [(name, name == "time") for name in ("row", "date", "commit", "time", "verdict")]
        shown = table.new_table(f"{suite}: {len(runs)} runs", columns)
        verdicts = [
            {one.name: one.verdict for one in compare(a, b, margin).changes} if _share(a, b) else {}
            for a, b in pairwise(runs)
        ]
        names = dict.fromkeys(r.name for run in runs for r in run.rows if r.kind != PEER)
        for name in names:
            for run, verdicts_of in zip(runs, [{}, *verdicts], strict=True):
                for row in (row for row in run.rows if row.name == name):
                    commit = (run.context.get("commit") or "unknown")[:12]
                    date, time = run.context["date"], table.format_seconds(row.seconds.median)
                    shown.add_row(name, date, commit, time, verdicts_of.get(name, ""))
        parts.append(shown)
    return Group(*parts, Text("Verdicts: as of lowbit bench compare, with the run before."))


def _share(old: Record, new: Record) -> bool:
    return bool({row.name for row in old.rows} & {row.name for row in new.rows})


# The page of every row in which a peer is ahead of lowbit.

_TOP = """# Where a peer is ahead

In how many products another library is faster than lowbit, on each machine that was measured.
`lowbit bench behind RECORD.json ... --no-rows --page docs/behind.md` writes this page from records
of `lowbit bench`; [benchmark.md](benchmark.md) says how they are measured and what a peer leaves
out. Ratios are the time of the best peer over lowbit's: below 1 the peer is ahead. The site, which
`make docs` makes, has the rows behind below this table, and so has the command without `--no-rows`.
"""
EVERY_ROW = "<!-- every row: tools/site.py -->\n"
_FIGURES = ("rows", "geometric mean", "tenth percentile", "worst", "rows behind")
_HEAD = [(name, name in _FIGURES) for name in ("record", "which", *_FIGURES)]
_TIMES = ("lowbit's time", "the peer's time", "times as fast")
_BEHIND = [(name, name in _TIMES) for name in ("case", _TIMES[0], "best peer", *_TIMES[1:])]


def page_behind(records: Mapping[str, Record]) -> str:
    """The page in Markdown: for each record, by the link to it, the figures over all of its rows,
    and EVERY_ROW, in whose place `rows_behind` belongs."""
    lines = [
        [f"[{_title(record)}]({link})", place, *figures]
        for link, record in records.items()
        for place, figures, _ in _products(record)
    ]
    return "\n".join([_TOP, table.markdown(_HEAD, lines), EVERY_ROW])


def rows_behind(records: Mapping[str, Record]) -> str:
    """The rows of each record in which a peer is ahead, the worst first, in Markdown. In brackets
    the 10th and 90th percentile over the rounds."""
    parts = list[str]()
    for link, record in records.items():
        where = record.context
        measured = f"{where['date']}, seed {where['seed']}, commit {where['commit'] or 'not known'}"
        about = f"[Record]({link}) of {measured}: {table.header(record)[0]}.\n"
        parts += [f"## {_title(record)}\n", about]
        for place, _, lines in _products(record):
            parts += [f"### {place}\n", table.markdown(_BEHIND, lines)] if lines else []
    return "\n".join(parts)


def _title(record: Record) -> str:
    words = filter(None, (record.suite, record.context.get("set")))
    return f"{record.context.get('cpu') or record.context['gpu']}: {' '.join(words)}"


def _products(record: Record) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Of each product what it is, the figures over all of its rows, and those behind."""
    time = table.TIME.cell
    several = map(_paired, groups(record.rows, "operation", "dtypes", "weights", "threads"))
    for pairs in chain.from_iterable(several):
        place = table.heading(pairs[0][1], "implementation", "operation", "dtypes")
        figures, _ = standing([(ratio.median, own) for ratio, own, _ in pairs])
        texts = [f"{x}" if isinstance(x, int) else table.three_digits(x) for x in figures.values()]
        lines = [
            [own.case, time(own), peer.implementation, time(peer), table.format_ratio(ratio)]
            for ratio, own, peer in pairs
            if ratio.median < 1
        ]
        yield place, texts, lines


def _paired(rows: Sequence[Row]) -> list[list[tuple[Spread, Row, Row]]]:
    """For each of lowbit's own, how many times as fast it is as the best peer, and both rows; the
    slowest first."""
    best = {row.case: row for row in rows if row.best_peer}
    found: dict[str, list[tuple[Spread, Row, Row]]] = {}
    for own in rows:
        name, peer = own.implementation, best.get(own.case)
        if own.ours and peer is not None and name in peer.ratios:
            found.setdefault(name, []).append((peer.ratios[name], own, peer))
    return [sorted(pairs, key=lambda pair: pair[0].median) for pairs in found.values()]
