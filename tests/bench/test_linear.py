"""The benchmark of linear layers with 4-bit weights: everyone right, nothing lost, one record."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console
from tests.test_cli import call_lowbit, error_line, run_lowbit

import lowbit
from lowbit_lab.bench import Limits, Plan, Record, run
from lowbit_lab.bench.core import isolated, peak, runner
from lowbit_lab.bench.core.case import Implementation, Ready, find
from lowbit_lab.bench.core.cpu import PlainRead
from lowbit_lab.bench.core.record import COLD, Row, Spread
from lowbit_lab.bench.core.remote import RemoteError
from lowbit_lab.bench.peers import own_linear
from lowbit_lab.bench.suites.linear import ACTIVATIONS, Linear, LinearCase, LinearProblem, means

pytest.importorskip("threadpoolctl")

READ = PlainRead.name
QUICK = Limits(noise=0.5, seconds=0.02, least_rounds=3)
# Of the largest result: what float32, bfloat16 and 8 bits make of weights and activations.
BUDGETS = {"fp32": 1e-5, "A32": 1e-5, "bf16": 3e-2, "A16": 3e-2, "A8": 5e-2, "4bit": 5e-2}


@pytest.fixture(autouse=True, scope="module")
def _peak_measured_once() -> Iterator[None]:
    """It takes seconds, and says nothing of what is tested here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peak, "measure", cache(peak.measure))
        yield


def text_of(record: Record) -> str:
    console = Console(width=240)
    options = {name: record.context[name] for name in ("group_size", "zero_points")}
    shapes = tuple(dict.fromkeys(row.case for row in record.rows))
    with console.capture() as captured:
        console.print(Linear(shapes=shapes, **options).render(record))
    return captured.get()


def layer(m: int, k: int, n: int, group_size: int, zero_points: bool = False) -> LinearCase:
    sizes = {"M": m, "N": n, "K": k}
    name = f"{m}x{k}:{k}x{n}"
    options = {"group_size": group_size, "zero_points": zero_points}
    return LinearCase("linear", name, sizes=sizes, **options)


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("group_size", [8, 24, 0])
def test_the_right_answer_is_that_of_the_dequantized_weight(
    group_size: int, zero_points: bool
) -> None:
    shape = layer(3, 48, 5, group_size, zero_points)
    task = LinearProblem.make(shape, 7)
    wanted = np.zeros((3, 5))
    for k in range(48):
        group = k // (group_size or 48)
        weight = (task.values[k].astype(int) - task.zero[group]) * task.scale[group].astype(float)
        wanted += np.outer(task.x[:, k].astype(float), weight)
    np.testing.assert_allclose(task.ideal, wanted, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(task.x.astype(float) @ task.weight.astype(float), wanted, atol=1e-5)
    assert not (task.x.view(np.uint32) & 0xFFFF).any()  # what bfloat16 holds
    assert task.zero.min() == 8 or zero_points
    np.testing.assert_array_equal(LinearProblem.make(shape, 7).values, task.values)
    assert task.error(wanted + 0.5 * np.abs(wanted).max()) == pytest.approx(0.5)
    other = "the result has the shape (5, 3); expected (3, 5)"
    assert task.wrong(find("linear", "lowbit W8A8"), wanted.T) == other


@pytest.mark.deep("192-48-32-False")
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize(("k", "n", "group_size"), [(192, 48, 32), (64, 160, 64), (66, 33, 0)])
def test_everybody_is_right_and_so_is_a_copy(
    k: int, n: int, group_size: int, zero_points: bool
) -> None:
    task = LinearProblem.make(layer(5, k, n, group_size, zero_points), 1)
    right = set()
    for one in Linear().implementations():
        if one.available(task.case) is not None or one.name == READ:
            continue
        try:
            ready = one.prepare(task, 1)
            result = ready.read(ready.call())
        except (ValueError, RuntimeError):
            assert one.isolated, one.name
            continue
        suffix = next(end for end in BUDGETS if one.name.endswith(end))
        assert 0 < task.error(result) < BUDGETS[suffix], one.name
        assert ready.again is not None
        np.testing.assert_array_equal(ready.read(ready.again()()), result)
        assert ready.nbytes >= k * n // 2
        right.add(one.name)
    assert {"lowbit W4A32", "lowbit W4A8", "lowbit W8A8"} <= right


def test_a_copy_of_a_packed_weight_shares_nothing() -> None:
    task = LinearProblem.make(layer(1, 64, 33, 32, zero_points=True))
    ready = find("linear", "lowbit W4A32").prepare(task, 1)
    first, second = (call.args[1] for call in (ready.call, ready.again()))  # type: ignore[attr-defined]
    assert first.nbytes == second.nbytes
    for one, other in zip(first.addresses, second.addresses, strict=True):
        assert one != other
        assert other % 64 == 0


@pytest.mark.parametrize("activations", list(ACTIVATIONS))
def test_the_budget_is_for_the_chosen_columns_and_tells_a_wrong_one(activations: str) -> None:
    task = LinearProblem.make(layer(2, 64, 300, 32))
    expected = task.expected(activations)
    assert len(task.columns) == 128
    assert {0, 299} <= set(task.columns)
    ideal = task.ideal[:, task.columns]
    if activations != "int8":
        np.testing.assert_allclose(expected.reference, ideal, rtol=1e-12, atol=1e-12)
    storage = expected.dtype.storage
    assert expected.check(expected.reference.astype(storage)).ok
    wrong = expected.reference.copy()
    wrong[1, 5] += 0.05 * np.abs(ideal).max()
    assert not expected.check(wrong.astype(storage)).ok


def test_a_wrong_result_of_lowbit_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: Any, **options: Any) -> np.ndarray:
        return lowbit.linear_dynamic(*arguments, **options) + np.float32(1)

    monkeypatch.setattr(own_linear.lowbit, "linear_weight_only", wrong)
    with pytest.raises(RuntimeError, match=r"lowbit W4A32 computes .* wrongly: .* a bug"):
        run(Linear(("2x32:32x17",), "f32", 32), Plan(peers=False, limits=QUICK))


deep_fixtures = ("record",)


@pytest.fixture(scope="module")
def record() -> Record:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_copies", lambda nbytes, least: 3)
        patch.setattr(runner, "_COLD_SHARE", 0.0)
        shapes = ("1x64:64x33", "3x64:64x33", "130x64:64x33", "1x64:64x33")
        return run(Linear(shapes, "f32,int8", 32), Plan(peers=False, cold=True, limits=QUICK))


@pytest.mark.deep
def test_a_record_holds_every_row(record: Record) -> None:
    names = ["lowbit W4A32", "lowbit W4A8", "lowbit W8A8", READ]
    shapes = ["1x64:64x33", "3x64:64x33", "130x64:64x33"]
    assert [(row.case, row.weights, row.implementation) for row in record.rows] == [
        (shape, weights, name) for shape in shapes for weights in ("warm", "cold") for name in names
    ]
    assert not record.absent
    for row in record.rows:
        assert row.seconds.p10 <= row.seconds.median <= row.seconds.p90
        reads = row.implementation == READ
        assert (row.error is None) == (row.operations == 0) == (row.limit_share is None) == reads
        assert set(row.ratios) == {"lowbit W4A32", "lowbit W4A8"} - {row.implementation}
        assert row.gbs == pytest.approx(row.weight_bytes / row.seconds.median / 1e9)
        assert row.calls == 1 or row.weights == "warm"
    assert len({row.name for row in record.rows}) == len(record.rows)
    parsed = json.loads(record.to_json())
    assert [one["run_name"] for one in parsed["benchmarks"]] == [row.name for row in record.rows]
    assert parsed["context"]["group_size"] == 32
    assert parsed["context"]["distribution"].startswith("4-bit weights uniform")
    assert len(parsed["summary"]) == 2 * 2 * 3  # of W8A8: warm and cold, two of ours, three sizes


def test_the_table_shows_rates_that_fit_the_size(record: Record) -> None:
    text = text_of(record)
    assert "4-bit weights, groups of 32, symmetric; seed 0" in text
    small, large = (
        text.split(f"linear {shape}, cold weights, 1 thread")[1].split("rounds in random order")[0]
        for shape in ("1x64:64x33", "130x64:64x33")
    )
    assert "% of read" in small
    assert "% of peak" in large
    assert "% of peak" not in small
    for name in ("lowbit W4A32", "lowbit W8A8", READ):
        assert name in small
    places = [text.rindex(sizes) for sizes in ("M = 1", "M from 2 to 127", "M from 128")]
    assert places == sorted(places)


def test_means_are_geometric_and_name_the_worst(record: Record) -> None:
    first = next(row for row in record.rows if row.implementation == "lowbit W8A8")

    def row(m: int, ratio: float) -> Row:
        ratios = {"lowbit W4A32": Spread(ratio, ratio, ratio)}
        return msgspec.structs.replace(first, case=f"{m}x8:8x8", sizes={"M": m}, ratios=ratios)

    rows = [row(128, 2.0), row(256, 8.0), row(1, 3.0)]
    large, one = sorted(means(rows), key=lambda mean: -mean["rows"])
    place = ("sizes", "rows", "worst_shape")
    assert tuple(large[name] for name in place) == ("M from 128", 2, "128x8:8x8")
    assert large["geometric_mean"] == pytest.approx(4)
    assert large["worst"] == 2
    assert (one["sizes"], one["geometric_mean"]) == ("M = 1", pytest.approx(3))


class Fake(Implementation):
    """A peer without a library, whose product is that of float32."""

    fallback = True

    def __init__(self, name: str) -> None:
        self.name = name

    def available(self, case: Any) -> str | None:
        return "it is elsewhere" if self.name == "absent" else None

    def library(self) -> tuple[str, str]:
        return "nobody's", "0"

    def note(self, case: Any) -> str:
        return "made up"

    def prepare(self, problem: LinearProblem, threads: int) -> Ready:
        call = partial(np.matmul, problem.x, problem.weight)
        return Ready(call, nbytes=problem.weight.nbytes, again=lambda: call)


class Some(Linear):
    """With two that are made up."""

    def implementations(self) -> Sequence[Implementation]:
        return find("linear", "lowbit W4A8"), Fake("fake"), Fake("absent"), PlainRead()


@pytest.mark.deep
@pytest.mark.parametrize("plain_loop", [True, False])
def test_a_plain_loop_is_measured_once(monkeypatch: pytest.MonkeyPatch, plain_loop: bool) -> None:
    monkeypatch.setattr(runner, "_PLAIN_LOOP", 0.0 if plain_loop else np.inf)
    suite = Some(("1x32:32x16", "2x32:32x16"), "int8", 8)
    record = run(suite, Plan(threads=(1, 2), cold=True, limits=QUICK))
    places = [(row.case, row.threads) for row in record.rows if row.implementation == "fake"]
    everywhere = [(shape, threads) for shape in suite.shapes for threads in (1, 2)]
    assert places == (everywhere[:1] if plain_loop else everywhere)
    text = text_of(record)
    assert "not run: absent: it is elsewhere" in text
    assert "fake: made up" in text
    loop = "a plain loop here: measured once, at 1x32:32x16 with 1 thread"
    assert (loop in text) == plain_loop
    assert "not run: cold weights" in text


def test_copies_that_memory_cannot_hold_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_COLD_SHARE", 0.0)
    monkeypatch.setattr(runner, "_MOST_MEMORY", 1e-6)
    monkeypatch.setattr(runner, "_MOST_COPIES", 1 << 30)  # however large the caches are
    suite = Linear(("1x512:512x512",), "int8")
    found = run(suite, Plan(peers=False, cold=True, limits=QUICK))
    (reason,) = (one.reason for one in found.absent if one.implementation == COLD)
    assert reason.startswith("copies that exceed the caches would take ")


def test_peers_that_refuse_or_crash_are_left_out_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    suite = Linear(("1x32:32x16",), "int8", 32)
    several = [layer(m, 32, n, 32) for m, n in ((1, 16), (900, 16), (1, 17), (1, 18), (1, 19))]
    asked: list[list[tuple[int, int]]] = []
    answers: Iterator[Sequence[str | None]] = iter(
        [[None, "odd N", "!crashed with SIGSEGV"], ["!KeyError: 'x'"]]
    )

    class Process:
        def __init__(self, *_: object, **__: str) -> None:
            asked.append([])
            self.answers = iter(next(answers))

        def answer(self, seconds: float) -> None:
            pass

        def ask(self, case: LinearCase, seconds: float) -> str | None:
            asked[-1].append((case.sizes["M"], case.sizes["N"]))
            said = next(self.answers)
            if said is not None and said.startswith("!"):
                raise RemoteError(said[1:])
            return said

        def printed(self) -> str:
            return ""

        def close(self) -> None:
            pass

    monkeypatch.setattr(isolated, "Remote", Process)
    found, _ = isolated.attempt(suite, Fake("fake"), [*several[:1], *several[2:]], 0)
    assert asked == [[(1, 16), (1, 17), (1, 18)], [(1, 19)]]
    assert found == {
        several[2]: "odd N",
        several[3]: "tried in a process of its own: crashed with SIGSEGV",
        several[4]: "tried in a process of its own: KeyError: 'x'",
    }
    answers = iter([[None, "too many rows"]])
    tried, _ = isolated.attempt(suite, Fake("fake"), several[:2], 0)
    assert tried == {several[1]: "too many rows"}
    assert asked[-1] == [(1, 16), (16, 16)]


@pytest.mark.deep
def test_torchs_own_refusal_is_one_line() -> None:
    pytest.importorskip("torch")
    one = find("linear", "torch int4pack bf16")
    for size in (48, 0):
        suite = Linear(("1x48:48x16",), group_size=size)
        (reason,) = isolated.attempt(suite, one, suite.cases(), 0)[0].values()
        assert reason.startswith("refused: ")
        assert "expect qGroupSize to be 32, 64, 128 or 256" in reason
    suite = Linear(("1x64:64x16",), group_size=32)
    assert not isolated.attempt(suite, one, suite.cases(), 0)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shapes": ()}, "shapes is empty; give at least one"),
        ({"activations": "f64"}, "activations 'f64' are not known; known are f32, bf16, int8"),
        (
            {"group_size": -8},
            "a positive multiple of 8, got -8; 0 is one scale a column",
        ),
        ({"group_size": 12}, "group_size must be a positive multiple of 8, got 12"),
        ({"shapes": ("1x8:9x8",)}, "the inner sizes differ, 8 and 9"),
        ({"shapes": ("1x96:96x8",)}, "K = 96 must be a multiple of the group size, 64"),
        ({"shapes": ("900000x64:64x9000000",)}, "and this machine has"),
    ],
)
def test_plans_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        Linear(**{"shapes": ("1x64:64x8",), "group_size": 64, **change})


@pytest.mark.deep
def test_the_command_works_without_torch_and_says_so(tmp_path: Path) -> None:
    target = tmp_path / "record.json"
    arguments = ["bench", "linear", "2x64:64x32", "--group-size", "32", "--no-cold"]
    limits = ["--time-limit", "0.02", "--threads", "1", "--zero-points", "--json", str(target)]
    done = run_lowbit(*arguments, *limits, without="torch")
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "not run: lowbit W4A16: torch is not installed" in text
    assert "not run: torch fp32: torch is not installed" in text
    assert "4-bit weights, groups of 32, with zero points" in text
    parsed = json.loads(target.read_text())
    assert [one["implementation"] for one in parsed["benchmarks"]] == [
        "lowbit W4A32", "lowbit W4A8", "lowbit W8A8", READ
    ]  # fmt: skip
    again = run_lowbit(*arguments, "--activations", "bf16", without="torch")
    assert "lowbit itself cannot run: torch is not installed" in again.stderr
    assert again.returncode == 2


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["8x8"], 2, "shape '8x8' is not understood; write MxK:KxN"),
        (["--activations", "fp8"], 2, "activations 'fp8' are not known"),
        (["--group-size", "100"], 2, "group_size must be a positive multiple of 8, got 100"),
        (["--threads", "one"], 2, "threads 'one' is not understood"),
        (["--json", "missing/record.json"], 1, "missing/record.json: No such file or directory"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], code: int, message: str) -> None:
    assert message in error_line(call_lowbit("bench", "linear", *arguments), code)


def test_help_has_an_example() -> None:
    done = call_lowbit("bench", "linear", "--help")
    assert "Example: lowbit bench linear" in " ".join(done.stdout.split())
