"""The benchmark of GPU operators, as far as it goes without a GPU."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("typer")

from lowbit.bench.ops import registry, suite  # noqa: E402
from lowbit.bench.ops.record import OpsRecord, Row  # noqa: E402
from lowbit.bench.ops.registry import Case, OperationBench, Work, benches, operation  # noqa: E402
from rich.console import Console  # noqa: E402
from torch import Generator, Tensor  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

ROWS = ["softmax", "softmax_backward", "row_sum", "rms_norm", "layer_norm", "layer_norm_backward"]
CONTEXT = {"gpu": "none", "versions": {"torch": "0"}}


def never(case: Case, generator: Generator) -> Work:
    """A maker that nothing should call."""
    raise AssertionError(f"{case} was made")


def small_case(name: str) -> Case:
    if name == "conv2d":
        sizes = {"B": 2, "C": 3, "H": 9, "O": 4, "K": 3, "stride": 2}
        return Case(sizes, "float32", {"last": True})
    return Case({"rows": 3, "length": 50}, "float32")


@pytest.mark.parametrize("name", [*ROWS, "conv2d"])
def test_all_implementations_agree(name: str) -> None:
    (bench,) = benches([name])
    work = bench.make(small_case(name), Generator().manual_seed(0))
    expected = work.reference()
    assert expected.dtype is torch.float64
    assert next(iter(work.calls)) == suite.OURS
    assert work.bytes > 0
    assert work.operations > 0
    for peer, call in work.calls.items():
        if peer != "torch.compile":  # needs a C++ compiler on a CPU
            assert suite.relative_error(call(), expected) < 64 * 2.0**-24


def test_rows_of_1k_to_128k_are_timed() -> None:
    for name in ("softmax", "row_sum", "rms_norm"):
        (bench,) = benches([name])
        for dtype in ("bfloat16", "float32"):
            lengths = {case.sizes["length"] for case in bench.cases if case.dtype == dtype}
            assert {2**power for power in range(10, 18)} <= lengths
        assert all(case.sizes["rows"] * case.sizes["length"] > 2**27 for case in bench.cases)


def test_quick_takes_cases_from_first_to_last() -> None:
    cases = tuple(Case({"n": n}, "float32") for n in range(7))
    bench = OperationBench("some", cases, False, never, 3)
    assert [case.sizes["n"] for case in bench.chosen(True)] == [0, 3, 6]
    assert bench.chosen(False) == cases


def test_names_are_unique_and_known() -> None:
    with pytest.raises(ValueError, match="two benchmarks are called 'softmax'"):
        operation("softmax", [], copies=True)(never)
    with pytest.raises(ValueError, match=r"no operation 'sotfmax'; known are .*softmax"):
        benches(["sotfmax"])


def test_relative_error() -> None:
    reference = torch.tensor([1.0, -4.0], dtype=torch.float64)
    assert suite.relative_error(torch.tensor([1.5, -4.0]), reference) == 0.125
    assert math.isinf(suite.relative_error(torch.tensor([1.0]), reference))
    assert math.isnan(suite.relative_error(torch.tensor([math.nan, 0]), reference))
    assert suite.relative_error(torch.zeros(2), torch.zeros(2)) == 0


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Row], list[Any]]:
    """What a case with a slow, a failing, and a wrong peer leaves, timed by a made-up clock."""

    def fail() -> Tensor:
        raise RuntimeError("not here\nsecond line")

    def make(case: Case, generator: Generator) -> Work:
        x = torch.ones(case.sizes["n"])
        calls = {"lowbit": lambda: x, "slow": lambda: x * 1.5, "nan": lambda: x / 0 * 0}
        return Work({**calls, "fails": fail}, x.double, 800, 100)

    def timed(calls: Mapping[str, Any], *_: Any) -> dict[str, Any]:
        seconds = {"lowbit": 2e-6, "slow": 6e-6, "copy": 1e-6}
        return {name: np.full(9, seconds[name]) for name in calls}

    monkeypatch.setattr(suite, "interleave", timed)
    monkeypatch.setattr(suite, "Flush", lambda device: None)
    monkeypatch.setattr(suite, "_copy", lambda size: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    bench = OperationBench("some", (), True, make)
    case = Case({"n": 5}, "float32")
    absent: list[Any] = []
    work = make(case, Generator())
    return suite._case(suite.OpsPlan(), bench, case, work, absent), absent


def test_figures_of_a_case(rows: tuple[list[Row], list[Any]]) -> None:
    (ours, slow), absent = rows
    assert (ours.implementation, ours.ours, ours.error) == ("lowbit", True, 0)
    assert (ours.copy_share, ours.lowbit_speedup) == pytest.approx((0.5, 1))
    assert (ours.gigabytes, ours.teraflops) == pytest.approx((0.4, 5e-5))
    assert (slow.lowbit_speedup, slow.error) == pytest.approx((3, 0.5))
    reasons = {one.implementation: one.reason for one in absent}
    assert reasons == {"nan": "the result is not finite", "fails": "not here"}


def test_record_is_json_and_a_table(rows: tuple[list[Row], list[Any]]) -> None:
    record = OpsRecord(CONTEXT, tuple(rows[0]), tuple(rows[1]))
    read = json.loads(record.to_json())
    assert [one["real_time"] for one in read["benchmarks"]] == pytest.approx([2e3, 6e3])
    assert read["benchmarks"][1]["name"] == "some/float32,n=5/slow_median"
    assert len(read["absent"]) == 2
    text = io.StringIO()
    Console(file=text, width=160).print(record.to_table())
    assert "slow" in text.getvalue()
    assert "3.00" in text.getvalue()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it does without a GPU")
def test_without_a_gpu_one_line_and_exit_code_2() -> None:
    from lowbit.cli import app

    result = CliRunner().invoke(app, ["bench", "ops", "--device", "cuda"])
    assert result.exit_code == 2
    assert result.output.startswith("lowbit: there is no GPU")
    assert result.output.count("\n") == 1


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="device is 'cpu'; these operators are timed on cuda"):
        suite.require_gpu("cpu")


def test_every_registered_case_has_a_unique_text() -> None:
    for bench in registry.benches():
        texts = [str(case) for case in bench.cases]
        assert len(set(texts)) == len(texts), bench.name
