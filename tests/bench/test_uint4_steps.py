"""The ladder of uint4 products: everyone exact, nobody timed who is not, one table, one record."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lowbit.bench.ladder import LadderPlan, LadderRow, run
from lowbit.bench.ladder_entries import (
    LONGEST_FLOAT_SUM,
    Blas,
    BytePeer,
    Entry,
    NumKong,
    Task,
    libraries,
    numba_rungs,
)
from lowbit.bench.ladder_table import render
from rich.console import Console
from tests.test_cli import error_line, run_lowbit

from lowbit import ops
from lowbit.bench import Limits, ladder, probe
from lowbit.bench.core.record import Record

pytestmark = pytest.mark.slow

pytest.importorskip("threadpoolctl")

SHAPE = "5x33:33x67"
QUICK = Limits(noise=0.5, seconds=0.3, least_rounds=8)


def text_of(record: Record) -> str:
    console = Console(width=240)
    with console.capture() as captured:
        console.print(render(record))
    return captured.get()


@pytest.fixture(scope="module")
def record() -> Record:
    pytest.importorskip("numba")
    return run(LadderPlan(SHAPE, peers=False, limits=QUICK))


def test_rows_stand_in_order_and_are_exact(record: Record) -> None:
    names = [row.implementation for row in record.rows]
    rungs = [one.name for one in numba_rungs()]
    assert names == [*rungs, "numpy einsum", "numpy fp32", "lowbit"]
    for row in record.rows:
        assert isinstance(row, LadderRow)
        assert row.error == 0
        assert (row.shape, row.dtypes, row.threads) == (SHAPE, "u4:u4:s32", 1)
        assert row.operations == 2 * 5 * 33 * 67
        assert row.bytes_moved == (5 + 67) * 17 + 4 * 5 * 67
        assert row.peak_share == pytest.approx(record.ceilings[0].share(row.gops))
        assert (row.blas_ratio is None) == (row.implementation == "numpy fp32")
        assert row.ours == (row.kind == "ours") == (row.lowbit_speedup is None)
    assert [row.implementation for row in record.rows if row.best_peer] == ["numpy fp32"]
    assert not record.absent


def test_json_has_the_ladders_own_fields(record: Record) -> None:
    parsed = json.loads(record.to_json())
    assert parsed["context"]["distribution"] == "uint4 uniform over 0 to 15"
    assert "numba" in parsed["context"]["versions"]
    assert [one["idea"] for one in parsed["benchmarks"]] == [
        row.idea for row in record.rows if isinstance(row, LadderRow)
    ]
    own = parsed["benchmarks"][-1]
    assert own["blas_ratio"]["p10"] <= own["blas_ratio"]["median"] <= own["blas_ratio"]["p90"]


def test_table_shows_every_rung(record: Record) -> None:
    text = text_of(record)
    assert "5 queries, 67 vectors, 33 dimensions; 1 thread" in text
    for row in record.rows:
        assert isinstance(row, LadderRow)
        assert row.implementation in text
        assert row.idea in text
    assert text.count("exact ") >= len(record.rows)
    assert "lowbit is" in text


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.matmul

    def wrong(*args: Any, **options: Any) -> np.ndarray:
        result = right(*args, **options)
        result[-1, -1] += 1
        return result

    monkeypatch.setattr(ops, "matmul", wrong)
    monkeypatch.setattr(ladder, "numba_rungs", tuple)
    told: list[str] = []
    with pytest.raises(RuntimeError, match=f"lowbit multiplies {SHAPE} wrongly: it is off"):
        run(
            LadderPlan(SHAPE, peers=False, limits=QUICK),
            lambda what, share: told.append(what),
        )
    assert "checking lowbit" in told
    assert "timing" not in told


def test_without_numba_the_rest_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> tuple[Entry, ...]:
        raise ImportError("Numba needs NumPy 2.4 or less")

    monkeypatch.setattr(ladder, "numba_rungs", missing)
    record = run(LadderPlan(SHAPE, peers=False, limits=QUICK))
    assert [row.implementation for row in record.rows] == ["numpy einsum", "numpy fp32", "lowbit"]
    assert "not run: the rungs in Numba: Numba needs NumPy 2.4 or less" in text_of(record)


@pytest.mark.parametrize("one", libraries(), ids=lambda one: one.name)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 19, 64), (18, 1, 7), (17, 35, 129)], ids=str)
def test_every_library_is_exact(
    one: Entry, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # In this process: each in one of its own would take seconds.
    monkeypatch.setattr(probe, "attempt", lambda *_: probe.Trial(None))
    task = Task.make(*sizes, seed=3)
    np.testing.assert_array_equal(task.expected, task.a.astype(int) @ task.b.T.astype(int))
    reason = one.available(task)
    if reason is not None:
        pytest.skip(reason)
    prepared = one.prepare(task, threads=1)
    assert task.error(prepared.read(prepared.call())) == 0


def test_float_sums_are_exact_to_the_bound_and_refused_beyond() -> None:
    blas = Blas()
    at = np.full((1, LONGEST_FLOAT_SUM), 15, np.uint8)
    task = Task(at, at)
    assert blas.available(task) is None
    prepared = blas.prepare(task, threads=1)
    assert task.error(prepared.read(prepared.call())) == 0
    beyond = np.full((1, LONGEST_FLOAT_SUM + 1), 15, np.uint8)
    assert 15 * 15 * beyond.size > 2**24
    assert blas.available(Task(beyond, beyond)) == (
        "K is 74566; float32 sums only 74565 products of uint4 exactly"
    )


def test_an_error_is_a_share_of_the_largest_sum() -> None:
    task = Task(np.array([[2]], np.uint8), np.array([[3], [5]], np.uint8))
    assert task.error(np.array([[6, 10]])) == 0
    assert task.error(np.array([[6, 9.5]])) == 0.05
    with pytest.raises(ValueError, match=r"has the shape \(2, 1\); expected \(1, 2\)"):
        task.error(np.array([[6], [10]]))


def test_a_peer_that_refuses_unsigned_bytes_gets_signed_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")

    def only_signed(peer: Any, cases: Any, seed: int) -> probe.Trial:
        signed = cases[0].dtypes.startswith("s8")
        return probe.Trial(None if signed else "takes no unsigned bytes")

    monkeypatch.setattr(probe, "attempt", only_signed)
    task = Task.make(17, 35, 129)
    one = BytePeer("torch _int_mm", "an idea")
    assert one.available(task) is None
    prepared = one.prepare(task, threads=1)
    assert task.error(prepared.read(prepared.call())) == 0

    monkeypatch.setattr(probe, "attempt", lambda *_: probe.Trial("crashed"))
    assert BytePeer("torch _int_mm", "an idea").available(task) == "crashed"


def test_what_cannot_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = partial(NumKong, "uint4", "an idea", np.ascontiguousarray)
    monkeypatch.setattr("lowbit.registry.extras.installed", lambda name: False)
    reason = nowhere().available(Task.make(1, 1, 1))
    assert reason == "numkong is not installed; in a clone of lowbit: pip install '.[peers]'"


@pytest.mark.parametrize(
    ("shape", "threads", "message"),
    [
        ("3x4", 1, "shape '3x4' is not understood; write MxK:KxN"),
        ("3x4:5x6", 1, "the inner sizes differ, 4 and 5"),
        ("3x200000:200000x6", 1, "can overflow s32"),
        (SHAPE, 0, "threads is 0; it must be at least 1"),
    ],
)
def test_bad_plan_is_told(shape: str, threads: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LadderPlan(shape, threads=threads)


def test_command(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    options = ["--no-peers", "--time-limit", "0.2", "--threads", "2", "--json", str(file)]
    done = run_lowbit("bench", "ladder", SHAPE, *options)
    assert done.returncode == 0, done.stderr
    assert "exact uint4 product: 5 queries, 67 vectors, 33 dimensions; 2 threads" in done.stdout
    rows = {one["implementation"]: one for one in json.loads(file.read_text())["benchmarks"]}
    assert rows["lowbit"]["threads"] == rows["numpy fp32"]["threads"] == 2
    assert rows["numpy einsum"]["threads"] == 1
    text = run_lowbit("bench", "ladder", "--help").stdout
    assert "Example: lowbit bench ladder" in " ".join(text.split())


def test_command_refuses_in_one_line() -> None:
    done = run_lowbit("bench", "ladder", "3x4:5x6")
    assert "the inner sizes differ, 4 and 5" in error_line(done, 2)
