"""The ladders of steps: everyone exact, nobody timed who is not, one table, one record."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tests.test_cli import call_lowbit, error_line, run_lowbit

from lowbit import api
from lowbit import isa as instruction_sets
from lowbit_lab.bench import Limits, Plan, Record, run
from lowbit_lab.bench.core.case import STEP, Case, Implementation, implementations_of
from lowbit_lab.bench.peers.steps import NoSteps, Stepping, step_entries
from lowbit_lab.bench.peers.uint4 import LONGEST_FLOAT_SUM, Blas, NumKong
from lowbit_lab.bench.suites.steps import BASELINE, Task, Uint4Steps, suite_of
from lowbit_lab.steps.registry import steps

pytestmark = pytest.mark.slow

pytest.importorskip("threadpoolctl")

SHAPE = "5x33:33x67"
QUICK = Limits(noise=0.5, seconds=0.3, least_rounds=8)


def text_of(record: Record) -> str:
    console = Console(width=240)
    with console.capture() as captured:
        console.print(Uint4Steps(SHAPE).render(record))
    return captured.get()


@pytest.fixture(scope="module")
def record() -> Record:
    pytest.importorskip("numba")
    return run(Uint4Steps(SHAPE), Plan(peers=False, limits=QUICK))


def test_rows_stand_in_order_and_are_exact(record: Record) -> None:
    names = [row.implementation for row in record.rows]
    steps = [one.name for one in step_entries("uint4")]
    assert names == [*steps, "numpy einsum", "numpy fp32", "lowbit"]
    for row in record.rows:
        assert row.error == 0
        assert (row.case, row.dtypes, row.threads) == (SHAPE, "u4:u4:s32", 1)
        assert row.operations == 2 * 5 * 33 * 67
        assert row.bytes == -(-5 * 33 // 2) + -(-67 * 33 // 2) + 4 * 5 * 67
        assert row.peak_share == pytest.approx(record.ceilings[0].share(row.gops))
        assert set(row.ratios) == {"lowbit", BASELINE} - {row.implementation}
        assert row.kind == ("ours" if row.ours else "peer" if row.best_peer else STEP)
    assert [row.implementation for row in record.rows if row.best_peer] == ["numpy fp32"]
    assert not record.absent


def test_json_has_the_suites_own_fields(record: Record) -> None:
    parsed = json.loads(record.to_json())
    assert parsed["context"]["distribution"] == "uint4 uniform over 0 to 15"
    assert "numba" in parsed["context"]["versions"]
    ideas = [one["extra"]["idea"] for one in parsed["benchmarks"]]
    assert ideas == [row.extra["idea"] for row in record.rows]
    own = parsed["benchmarks"][-1]["ratios"][BASELINE]
    assert own["p10"] <= own["median"] <= own["p90"]


def test_table_shows_every_step(record: Record) -> None:
    text = text_of(record)
    assert "5 queries, 67 vectors, 33 dimensions; 1 thread" in text
    for row in record.rows:
        assert row.implementation in text
        assert row.extra["idea"] in text
    assert text.count("exact ") >= len(record.rows)
    assert "lowbit is" in text


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = api.matmul

    def wrong(*args: Any, **options: Any) -> np.ndarray:
        result = right(*args, **options)
        result[-1, -1] += 1
        return result

    monkeypatch.setattr(api, "matmul", wrong)
    told: list[str] = []
    with pytest.raises(RuntimeError, match=f"lowbit computes .* {SHAPE} wrongly: it is off"):
        run(WithoutNumba(SHAPE), PLAN, lambda what, share: told.append(what))
    assert any("packing and checking" in what for what in told)
    assert not any("timing" in what for what in told)


PLAN = Plan(peers=False, limits=QUICK)


class WithoutNumba(Uint4Steps):
    """As where Numba does not go with NumPy."""

    def implementations(self) -> Sequence[Implementation]:
        rest = [one for one in super().implementations() if not isinstance(one, Stepping)]
        return [NoSteps(ImportError("Numba needs NumPy 2.4 or less")), *rest]


def test_without_numba_the_rest_is_timed() -> None:
    record = run(WithoutNumba(SHAPE), PLAN)
    assert [row.implementation for row in record.rows] == ["numpy einsum", "numpy fp32", "lowbit"]
    assert "not run: the steps in Numba: Numba needs NumPy 2.4 or less" in text_of(record)


def case(m: int, n: int, k: int) -> Case:
    sizes = {"M": m, "N": n, "K": k}
    return Case("matmul", f"{m}x{k}:{k}x{n}", "u4:u4:s32", sizes=sizes)


@pytest.mark.parametrize("one", implementations_of("uint4_steps"), ids=lambda one: one.name)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 19, 64), (18, 1, 7), (17, 35, 129)], ids=str)
def test_every_implementation_is_exact(one: Implementation, sizes: tuple[int, int, int]) -> None:
    # In this process: each in one of its own would take seconds.
    task = Task.make(case(*sizes), seed=3)
    np.testing.assert_array_equal(task.ideal, task.a.astype(int) @ task.b.T.astype(int))
    reason = one.available(task.case)
    if reason is not None:
        pytest.skip(reason)
    ready = one.prepare(task, threads=1)
    assert task.wrong(one, ready.read(ready.call())) is None


def test_float_sums_are_exact_to_the_bound_and_refused_beyond() -> None:
    blas = Blas()
    at = np.full((1, LONGEST_FLOAT_SUM), 15, np.uint8)
    task = Task(case(1, 1, at.size), at, at)
    assert blas.available(task.case) is None
    ready = blas.prepare(task, threads=1)
    assert task.error(ready.read(ready.call())) == 0
    beyond = case(1, 1, at.size + 1)
    assert 15 * 15 * (at.size + 1) > 2**24
    assert blas.available(beyond) == "K is 74566; float32 sums only 74565 products of uint4 exactly"


def test_an_error_is_a_share_of_the_largest_sum() -> None:
    both = np.array([[2]], np.uint8), np.array([[3], [5]], np.uint8)
    task, one = Task(case(1, 2, 1), *both), NoSteps(ImportError("none"))
    assert task.error(np.array([[6, 10]])) == 0
    assert task.error(np.array([[6, 9.5]])) == 0.05
    assert "off by up to 5.0e-02" in (task.wrong(one, np.array([[6, 9.5]])) or "")
    shapes = "the result has the shape (2, 1); expected (1, 2)"
    assert task.wrong(one, np.array([[6], [10]])) == shapes


def test_what_cannot_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.registry.extras.installed", lambda name: False)
    reason = NumKong("uint4").available(case(1, 1, 1))
    assert reason == "numkong is not installed; in a clone of lowbit: pip install '.[peers]'"


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("3x4", "shape '3x4' is not understood; write MxK:KxN"),
        ("3x4:5x6", "the inner sizes differ, 4 and 5"),
        ("3x200000:200000x6", "can overflow int32"),
    ],
)
def test_bad_shape_is_told(shape: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Uint4Steps(shape).cases()


def test_command(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    options = ["--no-peers", "--time-limit", "0.2", "--threads", "2", "--json", str(file)]
    done = call_lowbit("bench", "uint4_steps", SHAPE, *options)
    assert done.returncode == 0, done.stderr
    assert "exact uint4 product: 5 queries, 67 vectors, 33 dimensions; 2 threads" in done.stdout
    rows = {one["implementation"]: one for one in json.loads(file.read_text())["benchmarks"]}
    assert rows["lowbit"]["threads"] == rows["numpy fp32"]["threads"] == 2
    text = call_lowbit("bench", "uint4_steps", "--help").stdout
    assert "Example: lowbit bench uint4_steps" in " ".join(text.split())


def test_command_refuses_in_one_line() -> None:
    done = call_lowbit("bench", "uint4_steps", "3x4:5x6")
    assert "the inner sizes differ, 4 and 5" in error_line(done, 2)


def test_other_ladders_have_steps_peers_and_lowbit_in_order() -> None:
    pytest.importorskip("numba")
    quick = Plan(peers=False, limits=QUICK)
    for ladder, base in (("cpu-int8", "numpy fp32"), ("cpu-float32", "torch")):
        pytest.importorskip("torch")
        suite = suite_of(ladder, "9x70:70x33")
        found = run(suite, quick)
        kinds = [row.kind for row in found.rows]
        assert kinds == sorted(kinds, key=[STEP, "peer", "ours"].index)
        assert [row.implementation for row in found.rows if row.kind != STEP] == [base, "lowbit"]
        done = {row.implementation for row in found.rows} | {
            one.implementation for one in found.absent
        }
        assert {one.name for one in steps(ladder)} <= done
        for row in found.rows:
            assert row.error is not None
            assert row.error < (1e-5 if ladder == "cpu-float32" else 1e-30) or row.kind == "peer"
        assert found.ceilings[0].dtype == ("float32" if ladder == "cpu-float32" else "int8")
    with pytest.raises(
        ValueError, match="no steps are called 'cpu'; known are cpu-float32, cpu-int8"
    ):
        suite_of("cpu")


def test_a_step_that_no_processor_here_runs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(instruction_sets, "active", lambda name=None: instruction_sets.GENERIC)
    reason = Stepping(steps("cpu-int8")[7]).available(case(1, 1, 1))
    assert reason == "int8_tiles is written for amx, and this is generic"


def test_a_gpu_is_asked_for_in_one_line() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "there is no GPU that PyTorch can use" in error_line(run_lowbit("steps", "gpu"), 2)
