"""Implementations, their trial in a process of their own, and whole runs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from lowbit import ops
from lowbit.bench import Limits, Plan, implementation, peak, probe, run, suite
from lowbit.bench.implementation import Implementation, Prepared, find, implementations
from lowbit.bench.peers.numpy_float import NumpyFloat
from lowbit.bench.peers.own import Lowbit
from lowbit.bench.problem import SIGNATURES, Problem, Reference, gemm_case
from lowbit.bench.record import COLD, Absent, Record, Row, Spread
from lowbit.bench.requantized import quantization_of
from lowbit.bench.table import (
    format_error,
    format_ratio,
    format_seconds,
    format_spread,
    render,
    three_digits,
)

pytestmark = pytest.mark.slow

QUICK = Limits(noise=0.5, seconds=0.5, least_rounds=8)
SHAPE = "9x70:70x33"


class Crashing(NumpyFloat):
    """Kills its process when called."""

    name = "crashing"
    isolated = True

    def prepare(self, problem: Problem, threads: int) -> Prepared:
        import os
        import signal

        return Prepared(partial(os.kill, os.getpid(), signal.SIGSEGV))


class Failing(NumpyFloat):
    """Raises when prepared."""

    name = "failing"
    isolated = True

    def prepare(self, problem: Problem, threads: int) -> Prepared:
        raise RuntimeError("no such engine")


@pytest.fixture
def known_in_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a child process know this file's implementations, through a start-up file."""
    lines = (
        "import importlib.util",
        "from lowbit.bench.implementation import implementation",
        f"spec = importlib.util.spec_from_file_location('extra', {__file__!r})",
        "extra = importlib.util.module_from_spec(spec)",
        "spec.loader.exec_module(extra)",
        "implementation(extra.Crashing)",
        "implementation(extra.Failing)",
    )
    (tmp_path / "sitecustomize.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("known_in_child")
def test_what_crashes_is_found_out_in_another_process() -> None:
    cases = [gemm_case(SHAPE, "u8:s8:s32")]
    assert probe.attempt(Crashing(), cases, 0) == probe.Trial(
        "crashed (SIGSEGV) when tried in a process of its own"
    )
    failed = probe.attempt(Failing(), cases, 0).reason
    assert failed is not None
    assert failed.endswith("RuntimeError: no such engine")
    assert probe.attempt(NumpyFloat(), cases, 0).reason is None


def test_onednn_names_its_kernel() -> None:
    line = (
        "onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx512_core_vnni,undef,"
        "src:u8:a:blocked:ab::f0 dst:f32:a:blocked:ab::f0,attr-scratchpad:user,,8x96:96x64,0.119"
    )
    match = probe._ONEDNN_EXEC.search(line)
    assert match is not None
    assert match["kernel"] == "brg_matmul:avx512_core_vnni"
    assert match["shape"] == "8x96:96x64"


def small_weights(problem: Problem) -> Problem:
    """The problem with weights of a quarter of the range: on a machine without VNNI some peers
    add pairs of products in 16 bits, and those must not saturate if wiring is to be tested."""
    inputs = dict(problem.reference.inputs)
    inputs["b"] = inputs["b"] // 4
    b_float = inputs["b"].astype(np.float32) * inputs.get("b_scale", np.float32(1))
    if problem.quantizes:
        scale, zero_point = quantization_of(problem.a_float @ b_float)
        inputs["out_scale"] = np.array(scale, np.float32)
        inputs["out_zero_point"] = np.array(zero_point, np.int32)
    reference = Reference(problem.case, inputs)
    return replace(problem, b=inputs["b"], b_float=b_float, reference=reference)


@pytest.mark.parametrize("one", implementations(), ids=lambda one: one.name)
def test_every_implementation_multiplies(one: Implementation) -> None:
    reasons: dict[str, str | None] = {}
    for signature in SIGNATURES:
        case = gemm_case(SHAPE, signature)
        reasons[signature] = one.available(case)
        if reasons[signature] is None and one.isolated:
            reasons[signature] = probe.attempt(one, [case], 0).reason
        if reasons[signature] is None:
            problem = small_weights(Problem.make(case))
            prepared = one.prepare(problem, threads=1)
            result = prepared.read(prepared.call())
            assert result.shape == (9, 33)
            # The coarsest rounds activation or result to 8 bits, for all rows together.
            assert problem.reference.error(result) < 0.03, signature
    if None not in reasons.values():
        pytest.skip(f"{one.name}: {set(reasons.values())}")
    assert all(reason is None or signature in reason for signature, reason in reasons.items())


def test_names_are_unique_and_looked_up() -> None:
    names = [one.name for one in implementations()]
    assert len(names) == len(set(names))
    assert find("lowbit").ours
    with pytest.raises(ValueError, match="known are lowbit"):
        find("no such library")
    with pytest.raises(ValueError, match="two implementations are called 'lowbit'"):
        implementation.implementation(Lowbit)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only lowbit and NumPy, which need no other process, on a machine with a tiny cache."""
    chosen = (find("lowbit"), find("numpy fp32"))
    monkeypatch.setattr(suite, "implementations", lambda: chosen)
    caches = {"L1d": 1 << 10, "L2": 1 << 11, "L3": 1 << 12}
    monkeypatch.setattr(peak.host, "caches", lambda: caches)


@pytest.fixture
def record(two: None) -> Record:
    cases = [gemm_case(SHAPE, "u8:s8:s32"), gemm_case("1x64:64x64", "u8:s8:s32")]
    return run(Plan(cases, threads=[1], seed=7, limits=QUICK))


def test_record_holds_rows_and_context(record: Record) -> None:
    assert [(row.shape, row.implementation) for row in record.rows] == [
        (SHAPE, "lowbit"),
        (SHAPE, "numpy fp32"),
        ("1x64:64x64", "lowbit"),
        ("1x64:64x64", "numpy fp32"),
    ]
    ours, numpy = record.rows[:2]
    assert ours.error == 0
    assert ours.lowbit_speedup is None
    assert not ours.best_peer
    assert numpy.best_peer
    assert numpy.lowbit_speedup is not None
    assert ours.operations == 2 * 9 * 70 * 33
    assert ours.isa == ops.active_kernel("matmul")[1]
    assert record.context.seed == 7
    assert record.context.versions["numpy"] == np.__version__


def test_json_holds_what_the_table_shows(record: Record) -> None:
    parsed = json.loads(record.to_json())
    console = Console(width=200)
    with console.capture() as captured:
        console.print(render(record))
    text = captured.get()
    assert len(parsed["benchmarks"]) == len(record.rows)
    for one in parsed["benchmarks"]:
        assert one["implementation"] in text
        assert one["real_time"] == pytest.approx(one["seconds"]["median"] * 1e9)
        assert one["gops"] == pytest.approx(one["operations"] / one["real_time"])
        line = next(
            line
            for line in text.split(one["shape"], 1)[1].splitlines()
            if line.strip().startswith(one["implementation"])
        )
        assert format_seconds(one["seconds"]["median"]) in line
        assert three_digits(one["gops"]) in line
        assert format_error(one["error"]) in line
    assert parsed["context"]["cpu"] in text
    assert parsed["context"]["isa"] in text
    names = [one["name"] for one in parsed["benchmarks"]]
    assert len(names) == len(set(names))


def test_csv_holds_a_line_for_each_row(record: Record) -> None:
    lines = list(csv.DictReader(io.StringIO(record.to_csv())))
    assert [line["implementation"] for line in lines] == [r.implementation for r in record.rows]
    for line, row in zip(lines, record.rows, strict=True):
        assert float(line["seconds_median"]) == row.seconds.median
        assert float(line["gops"]) == row.gops
        assert (line["lowbit_speedup_median"] == "") == (row.lowbit_speedup is None)


def test_every_thread_count_has_its_rows_and_limits(two: None) -> None:
    plan = Plan(
        [gemm_case(SHAPE, "u8:s8:u8")], threads=[1, 2], works={SHAPE: "a layer"}, limits=QUICK
    )
    record = run(plan)
    assert [(row.threads, row.implementation) for row in record.rows] == [
        (1, "lowbit"),
        (1, "numpy fp32"),
        (2, "lowbit"),
        (2, "numpy fp32"),
    ]
    assert {row.work for row in record.rows} == {"a layer"}
    assert [one.threads for one in record.ceilings] == [1, 2]
    for row in record.rows:
        ceiling = record.ceilings[row.threads - 1]
        assert row.peak_share == pytest.approx(ceiling.share(row.gops))
    assert len({row.name for row in record.rows}) == 4


def test_cold_weights_are_rows_of_their_own(two: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "_cold_copies", lambda size: 3)
    monkeypatch.setattr(suite, "_COLD_SHARE", 0.0)
    plan = Plan([gemm_case(SHAPE, "f32:s8:f32")], threads=[1], cold=True, limits=QUICK)
    rows = run(plan).rows
    assert [(row.implementation, row.weights) for row in rows] == [
        ("lowbit", "warm"),
        ("numpy fp32", "warm"),
        ("lowbit", "cold"),
        ("numpy fp32", "cold"),
    ]
    assert {row.calls for row in rows if row.weights == "cold"} == {1}


def test_cold_weights_that_cannot_be_seen_are_left_out(
    two: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "_COLD_SHARE", 1e9)
    plan = Plan([gemm_case(SHAPE, "u8:s8:s32")], threads=[1], cold=True, limits=QUICK)
    record = run(plan)
    assert {row.weights for row in record.rows} == {"warm"}
    assert [one.implementation for one in record.absent] == [COLD]
    assert "reading them from memory would take less than" in record.absent[0].reason


def test_one_row_is_compared_with_a_plain_read(two: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "_COLD_SHARE", 0.0)
    cases = [gemm_case("1x512:512x512", "u8:s8:s32"), gemm_case(SHAPE, "u8:s8:s32")]
    rows = run(Plan(cases, threads=[1], cold=True, limits=QUICK)).rows
    assert {(row.shape, row.weights) for row in rows if row.read_share is not None} == {
        ("1x512:512x512", "warm"),
        ("1x512:512x512", "cold"),
    }
    assert suite._READ not in {row.implementation for row in rows}


def test_cold_copies_exceed_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = {"L1d": 1 << 10, "L3": 1 << 20}
    monkeypatch.setattr(suite.isa, "report", lambda: {"caches": caches})
    for weights in (1000, 1 << 19, 1 << 22):
        copies = suite._cold_copies(weights)
        # Whichever copy is next, at least one cacheful of others was read since its last turn.
        assert (copies - 1) * weights >= 2 * caches["L3"]
    with pytest.raises(ValueError, match="a larger shape needs fewer"):
        suite._cold_copies(16)


def test_wrong_kernel_is_not_timed(two: None, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.matmul

    def wrong(*args: object, **options: object) -> np.ndarray:
        result = right(*args, **options)
        result[-1, -1] += 1
        return result

    monkeypatch.setattr(ops, "matmul", wrong)
    timed: list[str] = []
    with pytest.raises(RuntimeError, match=r"lowbit computes matmul .* wrongly: 1 of 297"):
        run(
            Plan([gemm_case(SHAPE, "u8:s8:s32")], threads=[1], limits=QUICK),
            lambda what, share: timed.append(what),
        )
    assert not any("timing" in what for what in timed)


def test_no_peers_runs_lowbit_alone() -> None:
    plan = Plan([gemm_case(SHAPE, "u8:s8:s32")], threads=[1], peers=False, limits=QUICK)
    record = run(plan)
    assert [row.implementation for row in record.rows] == ["lowbit"]
    assert not record.absent


def test_progress_grows_to_the_end(two: None) -> None:
    shares: list[float] = []
    plan = Plan([gemm_case(SHAPE, s) for s in ("u8:s8:s32",) * 2], threads=[1], limits=QUICK)
    run(plan, lambda what, share: shares.append(share))
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Plan([], threads=[1]), "at least one shape"),
        (lambda: Plan([gemm_case(SHAPE, "u8:s8:s32")], threads=[]), "give at least one"),
        (lambda: Plan([gemm_case(SHAPE, "u8:s8:s32")], threads=[1, 0]), "threads is 0"),
    ],
)
def test_bad_plan_is_told(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_reasons_and_few_rounds_are_shown(record: Record) -> None:
    row = Row(**{**vars(record.rows[1]), "noise": None, "rounds": 3})
    absent = (Absent(SHAPE, "u8:s8:s32", "some peer", "it is not here"),)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(render(Record(record.context, (record.rows[0], row), absent)))
    text = captured.get()
    assert "not run: some peer: it is not here" in text
    assert "numpy fp32: only 3 rounds in the time limit" in text
    assert json.loads(Record(record.context, (row,), absent).to_json())["absent"] == [
        vars(absent[0])
    ]


def test_overview_has_a_line_for_each_shape(record: Record) -> None:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(render(record, detailed=False))
    lines = captured.get().splitlines()
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
