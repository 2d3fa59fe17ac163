"""The benchmark of search: right answers, recall, records, and the command."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tests.test_cli import call_lowbit, error_line, run_lowbit

from lowbit_lab.bench import Limits, Plan, run
from lowbit_lab.bench.core.suite import chosen
from lowbit_lab.bench.suites.search import Data, Index, Search, _data, nearest

HAS_FAISS = importlib.util.find_spec("faiss") is not None
QUICK = Limits(noise=0.5, seconds=0.05, least_rounds=3)


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
def test_the_right_answers(metric: Any) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((70_000, 3)).astype(np.float32) + np.float32(0.2)
    queries = rng.standard_normal((4, 3)).astype(np.float32)
    wide, left = vectors.astype(np.float64), queries.astype(np.float64)
    scores = left @ wide.T
    if metric == "cosine":
        scores /= np.linalg.norm(wide, axis=1)
    if metric == "l2":
        scores = -np.square(left[:, None] - wide).sum(axis=2)
    found = nearest(vectors, queries, 5, metric)
    # Different by rounding only, if at all: what is found scores as high as what is sought.
    best = np.sort(scores, axis=1)[:, -5:]
    taken = np.sort(np.take_along_axis(scores, found, axis=1), axis=1)
    np.testing.assert_allclose(taken, best, rtol=1e-5, atol=1e-5)


def test_recall_counts_what_was_found() -> None:
    problem = _data(Search(50, 4, k=2, candidates=0, batch="1"), 0)
    assert problem.recall(problem.exact[:, ::-1]) == 1
    half = problem.exact.copy()
    half[:, 0] = -1
    assert problem.recall(half) == 0.5
    _data.cache_clear()
    again = _data(Search(50, 4, k=2, candidates=0, batch="1"), 0)
    np.testing.assert_array_equal(again.vectors, problem.vectors)
    np.testing.assert_array_equal(again.queries, problem.queries)


def _recall(one: Any, data: Data) -> float:
    assert isinstance(one, Index)
    return data.recall(one.fill(data, 1).search(data.queries, None))


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
@pytest.mark.parametrize("bits", [8, 4])
def test_everybody_finds_most_of_the_nearest(bits: Any, metric: Any) -> None:
    suite = Search(3000, 65, bits, metric=metric)
    data = _data(suite, 0)
    recalls = {one.name: _recall(one, data) for one in chosen(suite, Plan(peers=HAS_FAISS))}
    assert recalls["lowbit"] < recalls["lowbit, rescored"], recalls
    if bits == 8:
        assert recalls["lowbit, rescored"] > 0.999, recalls
    if HAS_FAISS:
        assert recalls["faiss float32"] > 0.999, recalls
        assert recalls["lowbit"] > recalls[f"faiss QT_{bits}bit"] - 0.05, recalls


@pytest.mark.deep
def test_filling_adding_and_filters_are_cases() -> None:
    suite = Search(500, 20, batch="1,3", candidates=20, also="fill,one,0.1")
    record = run(suite, Plan(peers=HAS_FAISS, limits=QUICK))
    several = len(chosen(suite, Plan(peers=HAS_FAISS)))
    cases = [(row.operation, tuple(row.sizes.values())) for row in record.rows]
    for case, count in (
        (("fill", (500,)), several - 1), (("add", (1,)), several - 1),
        (("search", (1, 50)), several), (("search", (3, 50)), several),
    ):  # fmt: skip
        assert cases.count(case) == count
    console = Console(width=200)
    with console.capture() as captured:
        console.print(suite.render(record))
    assert captured.get().count("time / unfiltered") == 2


def test_a_record_holds_every_row() -> None:
    suite = Search(500, 20, batch="1,3", candidates=20)
    plan = Plan(peers=HAS_FAISS, limits=QUICK)
    told: list[tuple[str, float]] = []
    record = run(suite, plan, lambda what, share: told.append((what, share)))
    names = [one.name for one in chosen(suite, plan)]
    assert [(row.implementation, row.sizes["batch"]) for row in record.rows] == [
        (name, batch) for batch in (1, 3) for name in names
    ]
    for row in record.rows:
        assert row.seconds.p10 <= row.seconds.median <= row.seconds.p90
        assert (not row.ratios) == (row.implementation == "lowbit")
        assert 0 < row.extra["recall"] <= 1
        assert row.extra["build_seconds"] > 0
    # An index is filled once, for all batches.
    fills = {(row.implementation, row.extra["build_seconds"]) for row in record.rows}
    assert len(fills) == len(names)
    assert [share for _, share in told] == sorted(share for _, share in told)
    parsed = json.loads(record.to_json())
    assert [one["run_name"] for one in parsed["benchmarks"]] == [row.name for row in record.rows]
    assert parsed["context"]["vectors"] == 500
    assert "centres" in parsed["context"]["distribution"]
    console = Console(width=200)
    with console.capture() as captured:
        console.print(suite.render(record))
    assert "10 nearest (dot) of 500 x 20, 4 bits" in captured.get()
    lines = captured.get().splitlines()
    assert sum(line.strip().startswith("lowbit, rescored") for line in lines) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vectors": 0}, "vectors is 0; it must be at least 1"),
        ({"k": 0}, "k is 0"),
        ({"batch": ""}, "batch '' is not understood"),
        ({"also": "fill,two"}, "also 'two' is not understood; write fill, one, or a share"),
        ({"also": "1.5"}, "also '1.5' is not understood"),
        ({"batch": "1,0"}, "a batch is 0"),
        ({"candidates": 9}, "candidates is 9; it must be 0, or at least k = 10"),
        ({"k": 99, "candidates": 101}, "must not exceed the 100 vectors"),
    ],
)
def test_plans_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Search(**{"vectors": 100, "dim": 4, **change})


@pytest.mark.deep
def test_the_command_writes_what_it_shows_and_says_what_is_missing(tmp_path: Path) -> None:
    target = tmp_path / "record.json"
    arguments = ["--vectors", "300", "--dim", "9", "--batch", "2", "--time-limit", "0.05"]
    done = run_lowbit("bench", "search", *arguments, "--json", str(target), without="faiss")
    assert done.returncode == 0, done.stderr
    assert "lowbit, rescored" in done.stdout
    text = " ".join(done.stdout.split())
    assert (
        "not run: faiss QT_4bit: faiss is not installed; in a clone of lowbit: pip install" in text
    )
    parsed = json.loads(target.read_text())
    assert [one["sizes"]["batch"] for one in parsed["benchmarks"]] == [2, 2]
    assert [one["implementation"] for one in parsed["absent"]] == ["faiss QT_4bit", "faiss float32"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--bits", "3"], 2, "bits must be one of (8, 4), got 3"),
        (["--batch", "1,x"], 2, "batch '1,x' is not understood; write 16, or 1,16"),
        (["--metric", "ip"], 2, "metric must be one of"),
        (["--vectors", "5"], 2, "must not exceed the 5 vectors"),
        (["--json", "missing/record.json"], 1, "missing/record.json: No such file or directory"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], code: int, message: str) -> None:
    assert message in error_line(call_lowbit("bench", "search", *arguments), code)


def test_help_has_an_example() -> None:
    assert "Example: lowbit bench search" in " ".join(
        call_lowbit("bench", "search", "--help").stdout.split()
    )
