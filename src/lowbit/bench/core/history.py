"""A history: a folder of records, each under the name of its suite, date and commit."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from lowbit.bench.core import table
from lowbit.bench.core.case import PEER
from lowbit.bench.core.compare import MARGIN, compare
from lowbit.bench.core.record import Record


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
    path.write_text(record.to_json() + "\n", encoding="utf-8")
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


def render(several: list[Record], margin: float = MARGIN) -> RenderableType:
    """As text: every row that is no other library's, run after run, and what became of it since the
    run before in which it was."""
    parts: list[RenderableType] = []
    for suite in dict.fromkeys(one.suite for one in several):
        runs = [one for one in several if one.suite == suite]
        shown = table.new_table(
            f"{suite}: {len(runs)} runs",
            [
                ("row", False),
                ("date", False),
                ("commit", False),
                ("time", True),
                ("verdict", False),
            ],
        )
        verdicts = [
            {one.name: one.verdict for one in compare(a, b, margin).changes} if _share(a, b) else {}
            for a, b in pairwise(runs)
        ]
        names = dict.fromkeys(r.name for run in runs for r in run.rows if r.kind != PEER)
        for name in names:
            for run, told in zip(runs, [{}, *verdicts], strict=True):
                for row in (row for row in run.rows if row.name == name):
                    commit = (run.context.get("commit") or "unknown")[:12]
                    when = run.context["date"]
                    time = table.format_seconds(row.seconds.median)
                    shown.add_row(name, when, commit, time, told.get(name, ""))
        parts.append(shown)
    return Group(*parts, Text("Verdicts: as of lowbit bench compare, with the run before."))


def _share(old: Record, new: Record) -> bool:
    return bool({row.name for row in old.rows} & {row.name for row in new.rows})
