"""Records held against each other: the verdicts, what they rest on, and the folder of records."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tests.bench.test_behind import CONTEXT
from tests.bench.test_summary import row
from tests.test_cli import error_line, run_lowbit

from lowbit_lab.bench import Record
from lowbit_lab.bench.core.clock import Samples, quantiles
from lowbit_lab.bench.core.compare import (
    Comparison,
    compare,
    keep,
    pair,
    records,
    render,
    render_history,
)
from lowbit_lab.bench.core.record import Row, Spread

PEERS = ("a", "b", "c", "d")


def timed(name: str, seconds: float, noise: float | None = 0.01, **changes: Any) -> Row:
    """A row whose rounds spread by 2 % to both sides."""
    spread = Spread(seconds / 1.02, seconds, seconds * 1.02)
    ratio = None if name == "lowbit" else 1.0
    return row("8x8:8x8", name, ratio, seconds=spread, noise=noise, **changes)


def record(own: Row | float, peers: dict[str, float] | None = None, **context: Any) -> Record:
    rows = [timed(name, one) for name, one in (peers or dict.fromkeys(PEERS, 1.0)).items()]
    mine = own if isinstance(own, Row) else timed("lowbit", own)
    return Record("matmul", {**CONTEXT, **context}, (mine, *rows))


def verdict(found: Comparison) -> str:
    return next(one.verdict for one in found.changes if one.kind == "ours")


@pytest.mark.parametrize(
    ("new", "expected"),
    [(1.0, "same"), (1.03, "same"), (0.97, "same"), (1.04, "unclear"), (0.96, "unclear"),
     (1.2, "slower"), (0.8, "faster"), (1.07, "slower"), (0.93, "faster")],
)  # fmt: skip
def test_verdicts_by_the_interval_and_the_margin(new: float, expected: str) -> None:
    # Noise of 1 % in both: 1.4 % in the ratio; the controls have not moved.
    found = compare(record(timed("lowbit", 1.0)), record(timed("lowbit", new)))
    if expected == "unclear":  # an interval that reaches over the margin and over 1
        found = compare(record(timed("lowbit", 1.0, 0.03)), record(timed("lowbit", new, 0.03)))
    assert verdict(found) == expected
    (one,) = (each for each in found.changes if each.kind == "ours")
    assert one.low is not None
    assert one.high is not None
    assert one.low < one.ratio < one.high
    assert one.ratio == pytest.approx(new)
    assert found.counts[expected] == 1 == sum(found.counts.values())


def test_the_margin_is_asked_for() -> None:
    old, new = record(1.0), record(1.07)
    assert verdict(compare(old, new, 0.05)) == "slower"
    assert verdict(compare(old, new, 0.2)) == "same"
    for wrong in (0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match="margin is"):
            compare(old, new, wrong)


def test_controls_that_moved_widen_the_interval() -> None:
    moved = {"a": 1.1, "b": 0.92, "c": 1.09, "d": 1.12}
    calm, restless = compare(record(1.0), record(1.1)), compare(record(1.0), record(1.1, moved))
    assert (verdict(calm), verdict(restless)) == ("slower", "unclear")
    assert calm.drift == 0
    assert restless.drift == pytest.approx(1.96 * 1.4826 * math.log(1.1 * 1.09) / 2, rel=0.05)
    # A control is one only as long as its version stays.
    rows = [
        timed(n, 1.1, version="2") if n != "lowbit" else timed(n, 1.1) for n in ("lowbit", *PEERS)
    ]
    newer = Record("matmul", CONTEXT, tuple(rows))
    assert compare(record(1.0), newer).drift is None


def test_without_controls_the_spread_of_rounds_decides() -> None:
    def alone(own: Row) -> Record:
        return Record("matmul", CONTEXT, (own,))

    found = compare(alone(timed("lowbit", 1.0)), alone(timed("lowbit", 1.04)))
    (one,) = found.changes
    assert one.high == pytest.approx(1.04 * math.exp(math.hypot(math.log(1.02), math.log(1.02))))
    assert (one.verdict, found.controls, found.drift) == ("slower", 0, None)


def test_what_has_no_interval_or_another_machine_is_unclear() -> None:
    once = compare(record(timed("lowbit", 1.0, None)), record(3.0))
    other = compare(record(1.0), record(3.0, cpu="otherlake"))
    assert verdict(once) == verdict(other) == "unclear"
    assert "too few rounds" in once.changes[0].why
    assert "another machine (cpu: somelake, then otherlake)" in other.changes[0].why
    assert other.differences == ("cpu: somelake, then otherlake",)


def test_rows_of_one_record_alone_are_told() -> None:
    old, new = record(1.0), record(1.0, {"a": 1.0, "e": 1.0})
    found = compare(old, new)
    assert [name.split("/")[3] for name in found.only_old] == ["b", "c", "d"]
    assert [name.split("/")[3] for name in found.only_new] == ["e"]
    with pytest.raises(ValueError, match="no row is in both"):
        compare(Record("matmul", CONTEXT, old.rows[:1]), Record("matmul", CONTEXT, new.rows[1:]))
    with pytest.raises(ValueError, match="two suites, matmul and gemm"):
        compare(old, Record("gemm", CONTEXT, old.rows))


def test_runs_of_the_same_thing_are_rarely_called_different() -> None:
    """With as many rounds as a run has, medians of one distribution, its machine a little slower or
    faster in each run: at most 5 % of the verdicts say that something changed."""
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(100):
        runs = []
        for _ in range(2):
            rows = []
            for name in ("lowbit", *PEERS, "e", "f"):
                drift = math.exp(rng.normal(0, 0.02))
                taken = Samples(name, drift * (1 + rng.exponential(0.1, 60)), np.zeros(60), 1)
                spread = Spread(*quantiles(taken.seconds))
                ratio = None if name == "lowbit" else 1.0
                rows.append(row("8x8:8x8", name, ratio, seconds=spread, noise=taken.noise))
            runs.append(Record("matmul", CONTEXT, tuple(rows)))
        wrong += verdict(compare(*runs)) in ("faster", "slower")
    assert wrong <= 5


def test_a_folder_keeps_records_and_tells_their_story(tmp_path: Path) -> None:
    dates = ("2026-01-02T03:04:05+00:00", "2026-01-03T03:04:05+00:00")
    for seconds, date in zip((1.0, 2.0), dates, strict=True):
        keep(record(seconds, date=date), tmp_path / "kept")
    names = [one.name for one in sorted((tmp_path / "kept").iterdir())]
    assert names == ["matmul-20260102T030405-abc.json", "matmul-20260103T030405-abc.json"]
    old, new = pair(tmp_path / "kept", tmp_path / "kept")
    assert (old.context["date"], new.context["date"]) == dates
    assert pair(tmp_path / "kept" / names[0], tmp_path / "kept")[1] == new
    console = Console(width=200)
    with console.capture() as captured:
        console.print(render_history(records(tmp_path / "kept")), render(compare(old, new)))
    assert captured.get().count("slower") == 3  # the history, the counts, the row
    with pytest.raises(ValueError, match="from before 2026-01-02"):
        pair(tmp_path / "kept", tmp_path / "kept" / names[0])
    with pytest.raises(ValueError, match="holds no record of the suite gemm"):
        records(tmp_path / "kept", "gemm")


@pytest.mark.deep
def test_command(tmp_path: Path) -> None:
    old, new, page = tmp_path / "old.json", tmp_path / "new.json", tmp_path / "page.html"
    old.write_text(record(1.0).to_json())
    new.write_text(record(2.0).to_json())
    pytest.importorskip("vl_convert")
    done = run_lowbit("bench", "compare", str(old), str(new), "--json", "-", "--html", str(page))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["counts"] == {"slower": 1, "faster": 0, "unclear": 0, "same": 0}
    text = page.read_text()
    assert f"<code>lowbit bench compare {old} {new} --json - --html {page}</code>" in text
    assert '<tr class="bold red">' in text
    new.write_text("{}")
    assert f"lowbit: {new}: " in error_line(run_lowbit("bench", "compare", str(old), str(new)), 2)
