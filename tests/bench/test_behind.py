"""The page of the rows in which a peer is ahead, made from records."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.bench.test_summary import row
from tests.test_cli import call_lowbit, error_line, run_lowbit

from lowbit_lab.bench import Record
from lowbit_lab.bench.core.compare import EVERY_ROW, page_behind, rows_behind
from lowbit_lab.bench.core.record import Row, Spread

ROOT = Path(__file__).parent.parent.parent
CONTEXT: dict[str, Any] = {
    "date": "2026-01-02T03:04:05+00:00",
    "seed": 7,
    "commit": "abc",
    "cpu": "somelake",
    "isa": "some",
    "threads": [1, 2],
    "thread_runtime": "libgomp",
    "versions": {"lowbit": "0.1.0"},
    "set": "random",
}


def pair(shape: str, ratio: float, **changes: object) -> list[Row]:
    """Rows of lowbit's, of a peer, and of others that must not be taken for it."""
    return [
        row(shape, "lowbit", None, **changes),
        row(shape, "fast", ratio, **changes),
        row(shape, "slow", 2 * ratio, best_peer=False, **changes),
        row(shape, "plain read", ratio / 9, kind="limit", best_peer=False, **changes),
    ]


def record(*rows: Row) -> Record:
    made = Record("matmul", CONTEXT, rows)
    return Record.from_json(made.to_json())


def lines(text: str) -> list[list[str]]:
    """The cells of the lines of all tables."""
    found = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in cells] for cells in found]


def test_page_has_figures_of_all_rows_and_those_behind_the_worst_first() -> None:
    one = [*pair("8x8:8x8", 0.8), *pair("9x8:8x8", 4.0), *pair("7x8:8x8", 0.5)]
    two = pair("8x8:8x8", 2.0, threads=2)
    made = {"records/a.json": record(*one, *two)}
    text = page_behind(made) + rows_behind(made)
    assert "## somelake: matmul random" in text
    link = "[somelake: matmul random](records/a.json)"
    assert "[Record](records/a.json) of 2026-01-02T03:04:05+00:00, seed 7, commit abc" in text
    where = "lowbit matmul u8:s8:s32, warm weights, "
    assert lines(text) == [
        ["record", "which", "rows", "geometric mean", "tenth percentile", "worst", "rows behind"],
        ["---", "---", "--:", "--:", "--:", "--:", "--:"],
        [link, where + "1 thread", "3", "1.17", "0.56", "0.50", "2"],
        [link, where + "2 threads", "1", "2.00", "2.00", "2.00", "0"],
        ["case", "lowbit's time", "best peer", "the peer's time", "times as fast"],
        ["---", "--:", "---", "--:", "--:"],
        ["7x8:8x8", "1.00 s", "fast", "1.00 s", "0.50 (0.25 to 1.00)"],
        ["8x8:8x8", "1.00 s", "fast", "1.00 s", "0.80 (0.40 to 1.60)"],
    ]
    assert f"### {where}1 thread" in text
    assert f"### {where}2 threads" not in text
    assert "plain read" not in text


def test_each_of_several_of_lowbits_own_is_compared() -> None:
    own = [row("8x8:8x8", name, None) for name in ("lowbit a", "lowbit b")]
    peer = row("8x8:8x8", "peer", 2.0)
    ahead = peer.ratios["lowbit"]
    behind = Spread(1 / ahead.p90, 1 / ahead.median, 1 / ahead.p10)
    ratios = {"lowbit a": ahead, "lowbit b": behind}
    made = record(*own, row("8x8:8x8", "peer", 2.0, ratios=ratios))
    text = rows_behind({"a.json": made})
    assert "### lowbit b matmul" in text
    assert "### lowbit a matmul" not in text


def test_records_of_several_machines_stand_one_after_another() -> None:
    made = record(*pair("8x8:8x8", 0.5))
    text = rows_behind({"a.json": made, "b.json": made})
    assert re.findall(r"\[Record\]\((.*?)\)", text) == ["a.json", "b.json"]


@pytest.mark.deep
def test_the_command_writes_the_page_and_names_what_is_no_record(tmp_path: Path) -> None:
    pytest.importorskip("typer")
    kept, page = tmp_path / "records" / "a.json", tmp_path / "behind.md"
    kept.parent.mkdir()
    made = record(*pair("8x8:8x8", 0.5))
    kept.write_text(made.to_json())
    done = run_lowbit("bench", "behind", str(kept), "--page", str(page))
    assert done.returncode == 0, done.stderr
    written = page.read_text(encoding="utf-8")
    whole = {"records/a.json": made}
    assert written == page_behind(whole).replace(EVERY_ROW, rows_behind(whole))
    short = call_lowbit("bench", "behind", str(kept), "--no-rows", "--page", str(page) + "2")
    assert short.returncode == 0
    assert Path(f"{page}2").read_text(encoding="utf-8") == page_behind(whole)
    for text in ("[]", "{}", '{"benchmarks": 3}', "no JSON"):
        kept.write_text(text)
        line = error_line(call_lowbit("bench", "behind", str(kept), "--page", str(page)), 2)
        assert f"lowbit: {kept}: " in line
    assert page.read_text(encoding="utf-8") == written


def test_the_page_of_the_documentation_is_what_its_records_make() -> None:
    page = ROOT / "docs" / "behind.md"
    if not page.exists():
        pytest.skip("there is no page yet")
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\((records/.*?)\)", text)
    records = {link: Record.from_json((page.parent / link).read_text()) for link in links}
    assert page_behind(records) == text
    assert "| times as fast |" in rows_behind(records)
