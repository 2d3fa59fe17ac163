"""The benchmark of products, and what all suites share: trials in a process of their own, whole
runs, the record and its table."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import msgspec
import numpy as np
import pytest
from rich.console import Console

from lowbit import api
from lowbit.report.text import format_seconds, three_digits
from lowbit_lab.bench import Limits, Plan, Record, run
from lowbit_lab.bench.core import case as cases
from lowbit_lab.bench.core import isolated, peak, runner
from lowbit_lab.bench.core.case import Implementation, Ready, find, implementations_of
from lowbit_lab.bench.core.cpu import PlainRead
from lowbit_lab.bench.core.record import COLD, Absent, Spread
from lowbit_lab.bench.core.suite import suites
from lowbit_lab.bench.core.table import format_error, format_ratio, format_spread
from lowbit_lab.bench.peers.numpy_float import NumpyFloat
from lowbit_lab.bench.peers.own import LowbitMatmul, packed_weight
from lowbit_lab.bench.suites.matmul import Matmul
from lowbit_lab.bench.suites.matmul.problem import (
    SIGNATURES,
    MatmulProblem,
    product,
)
from lowbit_lab.explain.product import prepared_of

QUICK = Limits(noise=0.5, seconds=0.5, least_rounds=8)
SHAPE = "9x70:70x33"
INTEGERS = ("u8:s8:s32",)


class Crashing(NumpyFloat):
    """Kills its process when called."""

    name = "crashing"
    isolated = True

    def prepare(self, problem: MatmulProblem, threads: int) -> Ready:
        import os
        import signal

        return Ready(partial(os.kill, os.getpid(), signal.SIGSEGV))


class Failing(NumpyFloat):
    """Raises when prepared, but for one case."""

    name = "failing"
    isolated = True

    def prepare(self, problem: MatmulProblem, threads: int) -> Ready:
        if problem.case.sizes["M"] == 1:
            return super().prepare(problem, threads)
        raise RuntimeError("no such engine")


@pytest.mark.deep
def test_what_crashes_is_found_out_in_another_process() -> None:
    several = [product(SHAPE, "u8:s8:s32"), product("1x70:70x33", "u8:s8:s32")]
    crash = "tried in a process of its own: crashed with SIGSEGV"
    refused, _ = isolated.attempt(Matmul(), Crashing(), several, 0)
    assert refused == dict.fromkeys(several, crash)
    refused, _ = isolated.attempt(Matmul(), Failing(), several, 0)
    assert refused == {several[0]: "refused: no such engine"}
    assert isolated.attempt(Matmul(), NumpyFloat(), several, 0) == ({}, {})


def test_onednn_names_its_kernel() -> None:
    line = (
        "onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx512_core_vnni,undef,"
        "src:u8:a:blocked:ab::f0 dst:f32:a:blocked:ab::f0,attr-scratchpad:user,,8x96:96x64,0.119"
    )
    match = isolated._ONEDNN_EXEC.search(line)
    assert match is not None
    assert match["kernel"] == "brg_matmul:avx512_core_vnni"
    assert match["shape"] == "8x96:96x64"


def small_weights(problem: MatmulProblem) -> MatmulProblem:
    """The problem with weights of a quarter of the range: on a machine without VNNI some peers
    add pairs of products in 16 bits, and those must not saturate if wiring is to be tested."""
    inputs = {**problem.inputs, "b": problem.inputs["b"] // 4}
    if problem.quantizes:  # as for a fourth of the weights
        inputs["out_scale"] = inputs["out_scale"] / np.float32(4)
    return MatmulProblem(problem.case, inputs)


@pytest.mark.deep(
    "torch _int_mm",
    "oneDNN qlinear",
    "FBGEMM dynamic",
    "lowbit",
    "FBGEMM qlinear",
    "oneDNN dynamic",
)
@pytest.mark.parametrize("one", implementations_of("matmul"), ids=lambda one: one.name)
def test_every_implementation_multiplies(one: Implementation) -> None:
    cases = {signature: product(SHAPE, signature) for signature in SIGNATURES}
    reasons = {signature: one.available(case) for signature, case in cases.items()}
    if one.isolated:  # one process for those that it could do
        tried = [cases[signature] for signature in SIGNATURES if reasons[signature] is None]
        refused = isolated.attempt(Matmul(), one, tried, 0)[0]
        reasons |= {signature: refused.get(cases[signature], reasons[signature])
                    for signature in SIGNATURES}  # fmt: skip
    for signature, case in cases.items():
        if reasons[signature] is None:
            problem = small_weights(MatmulProblem.make(case))
            prepared = one.prepare(problem, threads=1)
            result = prepared.read(prepared.call())
            assert result.shape == (9, 33)
            # The coarsest rounds activation or result to 8 bits, for all rows together.
            assert problem.error(result) < 0.03, signature
    if None not in reasons.values():
        pytest.skip(f"{one.name}: {set(reasons.values())}")
    assert all(reason is None or signature in reason for signature, reason in reasons.items())


def test_names_are_unique_and_looked_up() -> None:
    assert implementations_of("matmul")[0].kind == cases.OURS
    assert find("matmul", "lowbit").kind == cases.OURS
    with pytest.raises(ValueError, match="no implementation is called 'matmul: no such library'"):
        find("matmul", "no such library")
    with pytest.raises(ValueError, match="there is a implementation called 'matmul: lowbit'"):
        cases.implementation("matmul")(LowbitMatmul)
    with pytest.raises(ValueError, match=r"no suite is called 'nothing'; known: .*matmul"):
        suites.get("nothing")


@dataclass(frozen=True)
class Two(Matmul):
    """Only lowbit and NumPy, which need no other process."""

    def implementations(self) -> Sequence[Implementation]:
        return (find("matmul", "lowbit"), find("matmul", "numpy fp32"), PlainRead())


def two(*shapes: str, dtypes: str = "u8:s8:s32") -> Two:
    return Two(shapes=shapes, dtype=(dtypes,))


@pytest.fixture(autouse=True, scope="module")
def _tiny_caches() -> Iterator[None]:
    """And limits of the machine measured once: no test here asks what they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peak.host, "caches", lambda: {"L1d": 1 << 10, "L2": 1 << 11, "L3": 1 << 12})
        patch.setattr(peak, "measure", cache(peak.measure))
        yield


@pytest.fixture(scope="module")
def record(_tiny_caches: None) -> Record:
    return run(two(SHAPE, "1x64:64x64"), Plan(seed=7, limits=QUICK))


def text_of(record: Record, suite: Matmul = Matmul(shapes=(SHAPE,))) -> str:  # noqa: B008
    console = Console(width=200)
    with console.capture() as captured:
        console.print(suite.render(record))
    return captured.get()


def test_record_holds_rows_and_context(record: Record) -> None:
    assert [(row.case, row.implementation) for row in record.rows] == [
        (SHAPE, "lowbit"),
        (SHAPE, "numpy fp32"),
        ("1x64:64x64", "lowbit"),
        ("1x64:64x64", "numpy fp32"),
        ("1x64:64x64", "plain read"),
    ]
    ours, numpy = record.rows[:2]
    assert ours.error == 0
    assert ours.speedup() is None
    assert not ours.best_peer
    assert numpy.best_peer
    assert numpy.speedup() == numpy.ratios["lowbit"]
    assert ours.operations == 2 * 9 * 70 * 33
    problem = MatmulProblem.make(product(SHAPE, "u8:s8:s32"))
    plan = prepared_of(problem, packed_weight(problem), 1).plan
    assert plan is not None
    assert ours.runs_on == plan.isa.name
    assert record.context["seed"] == 7
    assert record.context["versions"]["numpy"] == np.__version__


def test_json_holds_what_the_table_shows(record: Record) -> None:
    parsed = json.loads(record.to_json())
    text = text_of(record)
    assert len(parsed["benchmarks"]) == len(record.rows)
    for one in parsed["benchmarks"]:
        assert one["implementation"] in text
        assert one["real_time"] == pytest.approx(one["seconds"]["median"] * 1e9)
        assert one["gops"] == pytest.approx(one["operations"] / one["real_time"])
        line = next(
            line
            for line in text.split(one["case"], 1)[1].splitlines()
            if line.strip().startswith(one["implementation"])
        )
        assert format_seconds(one["seconds"]["median"]) in line
        if one["error"] is not None:
            assert three_digits(one["gops"]) in line
            assert format_error(one["error"]) in line
    assert parsed["context"]["cpu"] in text
    assert parsed["context"]["isa"] in text
    names = [one["name"] for one in parsed["benchmarks"]]
    assert len(names) == len(set(names))


def test_json_is_read_back(record: Record) -> None:
    again = Record.from_json(record.to_json())
    assert again.rows == record.rows
    assert again.absent == record.absent
    assert again.to_json() == record.to_json()
    with pytest.raises(ValueError, match="missing required field"):
        Record.from_json('{"suite": "matmul", "context": {}, "benchmarks": [{}]}')


def test_csv_holds_a_line_for_each_row(record: Record) -> None:
    lines = list(csv.DictReader(io.StringIO(record.to_csv())))
    assert [line["implementation"] for line in lines] == [r.implementation for r in record.rows]
    for line, row in zip(lines, record.rows, strict=True):
        assert float(line["seconds_median"]) == row.seconds.median
        assert float(line["gops"]) == row.gops
        assert (line["time_over_lowbit_median"] == "") == (row.speedup() is None)


@pytest.mark.deep
def test_every_thread_count_has_its_rows_and_limits() -> None:
    plan = Plan(threads=[1, 2], limits=QUICK)
    record = run(two(SHAPE, dtypes="u8:s8:u8"), plan)
    assert [(row.threads, row.implementation) for row in record.rows] == [
        (1, "lowbit"),
        (1, "numpy fp32"),
        (2, "lowbit"),
        (2, "numpy fp32"),
    ]
    assert [one.threads for one in record.ceilings] == [1, 2]
    for row in record.rows:
        ceiling = record.ceilings[(row.threads or 0) - 1]
        assert row.peak_share == pytest.approx(ceiling.share(row.gops))
    assert len({row.name for row in record.rows}) == 4


def test_a_set_of_shapes_says_what_they_are_part_of() -> None:
    found = Matmul(suite="minilm").cases()
    assert {one.dtypes for one in found} == {"u8:s8:f32", "u8:s8:u8"}
    assert all(one.work.startswith("minilm: ") for one in found)
    assert Matmul(suite="minilm").cold_by_default
    assert not Matmul(shapes=(SHAPE,)).cold_by_default
    assert [one.work for one in Matmul(shapes=(SHAPE,)).cases()] == [""]


def test_cold_weights_are_rows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_copies", lambda nbytes, least: 3)
    monkeypatch.setattr(runner, "_COLD_SHARE", 0.0)
    rows = run(two(SHAPE, dtypes="f32:s8:f32"), Plan(cold=True, limits=QUICK)).rows
    assert [(row.implementation, row.weights) for row in rows] == [
        ("lowbit", "warm"),
        ("numpy fp32", "warm"),
        ("lowbit", "cold"),
        ("numpy fp32", "cold"),
    ]
    assert {row.calls for row in rows if row.weights == "cold"} == {1}


def test_cold_weights_that_cannot_be_seen_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_COLD_SHARE", 1e9)
    record = run(two(SHAPE), Plan(cold=True, limits=QUICK))
    assert {row.weights for row in record.rows} == {"warm"}
    assert [one.implementation for one in record.absent] == [COLD]
    assert "reading them from memory would take less than" in record.absent[0].reason


def test_one_row_is_compared_with_a_plain_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_COLD_SHARE", 0.0)
    rows = run(two("1x512:512x512", SHAPE), Plan(cold=True, limits=QUICK)).rows
    assert {(row.case, row.weights) for row in rows if row.limit_share is not None} == {
        ("1x512:512x512", "warm"),
        ("1x512:512x512", "cold"),
    }
    read = [row for row in rows if row.kind == cases.LIMIT]
    assert {row.case for row in read} == {"1x512:512x512"}
    assert all(row.error is None and row.peak_share is None for row in read)
    assert not any(row.best_peer for row in read)


def test_cold_copies_exceed_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = {"L1d": 1 << 10, "L3": 1 << 20}
    monkeypatch.setattr(runner.isa, "report", lambda: {"caches": caches})
    for weights in (1000, 1 << 19, 1 << 22):
        for least in (0, 1 << 23):
            copies = runner._copies(weights, least)
            # Whichever copy is next, so much of others was read since its last turn.
            assert (copies - 1) * weights >= max(2 * caches["L3"], least)
    assert "a larger shape needs fewer" in (runner._too_much(5000, 16) or "")
    assert runner._too_much(3, 1000) is None
    assert "copies that exceed the caches" in (runner._too_much(4000, 1 << 40) or "")


def test_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = api.matmul

    def wrong(*args: object, **options: object) -> np.ndarray:
        result = right(*args, **options)  # type: ignore[arg-type]
        result[-1, -1] += 1
        return result

    monkeypatch.setattr(api, "matmul", wrong)
    timed: list[str] = []
    with pytest.raises(RuntimeError, match=r"lowbit computes matmul .* wrongly: 1 of 297"):
        run(two(SHAPE), Plan(limits=QUICK), lambda what, share: timed.append(what))
    assert not any("timing" in what for what in timed)


def test_a_peer_whose_sums_are_cut_off_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = NumpyFloat.prepare

    def saturating(self: NumpyFloat, problem: MatmulProblem, threads: int) -> Ready:
        ready, most = honest(self, problem, threads), 0.9 * np.abs(problem.ideal).max()
        return replace(ready, read=lambda made: np.clip(ready.read(made), -most, most))

    monkeypatch.setattr(NumpyFloat, "prepare", saturating)
    record = run(two(SHAPE), Plan(limits=QUICK))
    (name,) = {one.name for one in implementations_of("matmul") if type(one) is NumpyFloat}
    assert name not in {row.implementation for row in record.rows}
    (reason,) = {one.reason for one in record.absent if one.implementation == name}
    assert reason == "wrong on this CPU, by 10% of the largest value"


def test_no_peers_runs_lowbit_alone() -> None:
    record = run(Matmul(shapes=(SHAPE,)), Plan(peers=False, limits=QUICK))
    assert [row.implementation for row in record.rows] == ["lowbit"]
    assert not record.absent


@pytest.mark.deep
def test_progress_grows_to_the_end() -> None:
    shares: list[float] = []
    plan = Plan(threads=(1, 2), limits=QUICK)
    run(two(SHAPE, "2x3:3x4"), plan, lambda what, share: shares.append(share))
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Matmul().cases(), "give shapes MxK:KxN, or --suite NAME"),
        (lambda: Plan(threads=[]), "threads is empty"),
        (lambda: Plan(threads=[1, 0]), "threads is 0"),
    ],
)
def test_bad_plan_is_told(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_reasons_and_few_rounds_are_shown(record: Record) -> None:
    row = msgspec.structs.replace(record.rows[1], noise=None, rounds=3)
    absent = (Absent(SHAPE, "u8:s8:s32", "some peer", "it is not here"),)
    changed = msgspec.structs.replace(record, rows=(record.rows[0], row), absent=absent)
    text = text_of(changed)
    assert "not run: some peer: it is not here" in text
    assert "only 3 rounds in the time limit: numpy fp32" in text
    (told,) = json.loads(changed.to_json())["absent"]
    assert told == {
        "case": SHAPE,
        "dtypes": "u8:s8:s32",
        "implementation": "some peer",
        "reason": "it is not here",
    }


def test_overview_has_a_line_for_each_shape(record: Record) -> None:
    lines = text_of(record, Matmul(suite="seed")).splitlines()
    for shape in (SHAPE, "1x64:64x64"):
        (line,) = (line for line in lines if line.strip().startswith(shape))
        assert "numpy fp32" in line
    assert any("geometric mean" in line for line in lines)


def test_formats() -> None:
    assert [format_seconds(s) for s in (2.5, 0.0321, 456e-6, 7.89e-9)] == [
        "2.50 s",
        "32.1 ms",
        "456 µs",
        "7.89 ns",
    ]
    assert format_error(0) == "exact"
    assert format_error(0.00123) == "1.2e-03"
    assert format_ratio(Spread(0.9, 1.5, 12.34)) == "1.50 (0.90 to 12.3)"
    assert format_spread(Spread(0.9e-3, 1.5e-3, 12.34e-3)) == "0.90 to 12.3"
    assert [three_digits(x) for x in (0.0123, 0.5, 3.14159, 314.159)] == [
        "0.012",
        "0.50",
        "3.14",
        "314",
    ]
