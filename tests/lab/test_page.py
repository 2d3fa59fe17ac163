"""Pages of HTML: whatever is shown as text, and the charts of records."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Group
from rich.table import Table
from rich.text import Text
from tests.bench.test_behind import CONTEXT
from tests.bench.test_summary import row
from tests.test_cli import error_line, run_lowbit

from lowbit.report.page import page
from lowbit_lab.bench import Record
from lowbit_lab.bench.core.peak import Ceiling
from lowbit_lab.bench.core.record import Row, Spread

LEVELS = {"L1d": 400.0, "L2": 100.0, "memory": 10.0}


def test_tables_notes_and_shares() -> None:
    table = Table(title="<times>")
    table.add_column("what")
    table.add_column("share", justify="right")
    table.add_row("a & b", "12.5%", style="bold")
    text = page(
        "t", Group(table, "plain", Text("faint", "dim"), Text(" ")), command="lowbit x 'a b'"
    )
    assert "<h2>&lt;times&gt;</h2>" in text
    assert '<tr class="bold"><td>a &amp; b</td>' in text
    assert '<td class="right" style="--share: 12.5%">12.5%</td>' in text
    assert "<p>plain</p>" in text
    assert '<p class="dim">faint</p>' in text
    assert "<code>lowbit x &#x27;a b&#x27;</code>" in text
    assert text.count("<p") == 3  # nothing for what is blank
    assert not re.search(r"https?:|src=|@import|url\(", text)


def _row(shape: str, name: str, seconds: float, **changes: Any) -> Row:
    ratio = None if name == "lowbit" else 1.0
    work = {"operations": 2 * 64**3, "bytes": 64 * 64 * 6, "peak_share": 0.5, **changes}
    return row(shape, name, ratio, seconds=Spread(seconds, seconds, seconds), **work)


def _drawn(rows: list[Row], **context: Any) -> list[str]:
    charts = pytest.importorskip("lowbit_lab.bench.core.charts")
    pytest.importorskip("vl_convert")
    ceilings = (Ceiling("some", 1, "dot", 500.0, 500.0, {"dot": 500.0}, LEVELS),)
    record = Record("matmul", {**CONTEXT, **context}, tuple(rows), ceilings=ceilings)
    return [
        f"{figure.caption} {figure.command} {figure.svg()}" for figure in charts.of_record(record)
    ]


def test_charts_of_a_record_follow_what_it_holds() -> None:
    one = [_row("8x8:8x8", "lowbit", 1e-5), _row("8x8:8x8", "fast", 2e-5)]
    roofline, bars = _drawn(one, command="lowbit bench matmul 8x8:8x8")
    for each in (roofline, bars):
        assert "lowbit bench matmul 8x8:8x8 <svg" in each
        assert "xmlns" not in each
        assert "lowbit" in each.partition("<svg")[2]
    assert "int8 peak" in roofline
    assert "memory" in roofline
    shapes = [f"{m}x8:8x8" for m in (8, 16, 32)]
    many = [_row(s, "lowbit", 1e-5, threads=t) for s in shapes for t in (1, 2)]
    captions = [text.partition(" lowbit bench")[0] for text in _drawn(many)]
    assert captions == [
        "Roofline of somelake, threads: 1; limits measured in the run.",
        "Share of the measured peak over the size of the product.",
        "Speed over threads, the geometric mean of the cases.",
    ]


@pytest.mark.deep
def test_a_record_is_shown_again(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    kept = Path(__file__).parent.parent.parent / "docs" / "records" / "zen4-ladder.json"
    made = tmp_path / "page.html"
    done = run_lowbit("report", str(kept), "--html", str(made))
    assert done.returncode == 0, done.stderr
    # Of a suite that there is no more.
    assert "best peer: oneDNN qlinear; lowbit is 1.44" in done.stdout
    text = made.read_text()
    assert text.count("<svg") == 2
    assert "narrow_sums" in text
    hidden = run_lowbit("report", str(kept), "--html", str(made), without="vl_convert")
    assert "a page with charts needs vl_convert" in error_line(hidden, 1)
