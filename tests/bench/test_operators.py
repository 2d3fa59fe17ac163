"""The benchmark of GPU operators, as far as it goes without a GPU."""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("typer")

from rich.console import Console  # noqa: E402
from torch import Generator, Tensor  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from lowbit.spec.operations.rows import row_sum  # noqa: E402
from lowbit_lab.bench import Plan, Record  # noqa: E402
from lowbit_lab.bench.core import cuda, runner  # noqa: E402
from lowbit_lab.bench.core.case import LIMIT  # noqa: E402
from lowbit_lab.bench.core.clock import Samples  # noqa: E402
from lowbit_lab.bench.operators.registry import (  # noqa: E402
    Operator,
    OperatorCase,
    OperatorProblem,
    case,
    chosen,
    operation,
    operators,
)
from lowbit_lab.bench.suites.operators import Operators  # noqa: E402

ROWS = ["softmax", "softmax_backward", "row_sum", "rms_norm", "layer_norm", "layer_norm_backward"]


def never(case: OperatorCase, generator: Generator) -> OperatorProblem:
    """A maker that nothing should call."""
    raise AssertionError(f"{case} was made")


def small_case(name: str) -> OperatorCase:
    if name == "conv2d":
        sizes = {"B": 2, "C": 3, "H": 9, "O": 4, "K": 3, "stride": 2}
        return case(sizes, "float32", last=True)
    return case({"rows": 3, "length": 50}, "float32")


@pytest.mark.parametrize("name", [*ROWS, "conv2d"])
def test_all_implementations_agree(name: str) -> None:
    one = small_case(name)
    work = operators.get(name).make(one, Generator().manual_seed(0))
    assert work.ideal.dtype is torch.float64
    assert next(iter(work.calls)) == "lowbit"
    assert work.bytes > 0
    assert work.operations > 0
    for peer, call in work.calls.items():
        if peer != "torch.compile":  # needs a C++ compiler on a CPU
            assert work.error(call()) < 64 * 2.0**-24


def test_bytes_are_those_of_the_specification() -> None:
    work = operators.get("softmax").make(small_case("softmax"), Generator())
    assert work.bytes == 2 * 4 * 3 * 50
    work = operators.get("row_sum").make(small_case("row_sum"), Generator())
    assert work.bytes == 4 * (3 * 50 + 3)


COUNTED = {
    "attention": (4 * 6 * 8 * 8 * 16, 4 * 6 * 8 * 16),
    "attention_backward": (10 * 6 * 8 * 8 * 16, 8 * 6 * 8 * 16),
    "conv2d": (2 * 2 * 4 * 5 * 5 * 3 * 3 * 3, 2 * 3 * 9 * 9 + 4 * 3 * 3 * 3 + 2 * 4 * 5 * 5),
    "layer_norm_backward": (14 * 3 * 50, 3 * 3 * 50 + 3 * 50),
}


@pytest.mark.parametrize("name", COUNTED)
def test_the_specification_counts_at_other_strides_and_heads(name: str) -> None:
    """Of operations, and of elements that must be moved."""
    one, causal = small_case(name), [False]
    if name.startswith("attention"):
        one, causal = case({"B": 2, "heads": 3, "length": 8, "size": 16}, "bfloat16"), [False, True]
    for half in causal:
        each = replace(one, options={**one.options, "causal": half})
        work = operators.get(name).make(each, Generator())
        operations, elements = COUNTED[name]
        assert work.operations == operations // (1 + half)
        assert work.bytes == elements * (2 if one.dtype == "bfloat16" else 4)


def test_a_cache_is_read_once() -> None:
    sizes = {"B": 2, "heads": 6, "key_heads": 3, "length": 40, "size": 16}
    work = operators.get("attention_decode").make(case(sizes, "bfloat16"), Generator())
    assert work.operations == 4 * 2 * 6 * 40 * 16
    assert work.bytes == 2 * (2 * 2 * 6 * 16 + 2 * 2 * 3 * 40 * 16)
    assert work.error(work.calls["lowbit"]()) < 2.0**-6


def test_rows_of_1k_to_128k_are_timed() -> None:
    for name in ("softmax", "row_sum", "rms_norm"):
        bench = operators.get(name)
        for dtype in ("bfloat16", "float32"):
            lengths = {case.sizes["length"] for case in bench.cases if case.dtype == dtype}
            assert {2**power for power in range(10, 18)} <= lengths
        assert all(case.sizes["rows"] * case.sizes["length"] > 2**27 for case in bench.cases)


def test_quick_takes_cases_from_first_to_last() -> None:
    cases = tuple(case({"n": n}, "float32") for n in range(7))
    bench = Operator(cases, False, never, 3)
    assert [case.sizes["n"] for case in bench.chosen(True)] == [0, 3, 6]
    assert bench.chosen(False) == cases


def test_names_are_unique_and_known() -> None:
    with pytest.raises(
        ValueError,
        match=r"no operation is called 'sotfmax' .*'softmax'.*known: .*softmax",
    ):
        Operators(op=("sotfmax",)).cases()
    with pytest.raises(ValueError, match="there is a operation called 'softmax'"):
        operation("softmax", [], copies=True)(never)


def test_relative_error() -> None:
    reference = torch.tensor([1.0, -4.0], dtype=torch.float64)

    def error(got: Tensor, wanted: Tensor = reference) -> float:
        return OperatorProblem(small_case(""), {}, lambda: wanted, (), {}).error(got)

    assert error(torch.tensor([1.5, -4.0])) == 0.125
    assert math.isinf(error(torch.tensor([1.0])))
    assert math.isnan(error(torch.tensor([math.nan, 0])))
    assert error(torch.zeros(2), torch.zeros(2)) == 0


class Fake(cuda.Cuda):
    """A clock without a GPU."""

    def __init__(self) -> None:
        pass

    @contextmanager
    def using(self, threads: int) -> Iterator[None]:
        yield

    def time(self, calls: Mapping[str, Any], limits: Any, **_: Any) -> dict[str, Samples]:
        seconds = {"lowbit": 2e-6, "slow": 6e-6, "copy": 1e-6}
        taken = {name: np.full(9, seconds[name]) for name in calls}
        return {name: Samples(name, one, one, 1) for name, one in taken.items()}

    def tidy(self) -> None:
        pass

    def context(self, plan: Plan) -> dict[str, Any]:
        return {"gpu": "none", "versions": {"torch": "0"}}


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    """What a case with a slow, a failing, and a wrong peer leaves, timed by a made-up clock."""

    def fail() -> Tensor:
        raise RuntimeError("not here\nsecond line")

    def make(one: OperatorCase, generator: Generator) -> OperatorProblem:
        x = torch.ones(one.sizes["n"])
        spec = chosen(row_sum, one)
        calls = {"lowbit": lambda: x, "slow": lambda: x * 1.5, "nan": lambda: x / 0 * 0}
        return OperatorProblem(one, {**calls, "fails": fail}, x.double, (spec,), {"N": 1, "T": 199})

    some = Operator((replace(case({"n": 5}, "float32"), operation="some"),), True, make)
    monkeypatch.setitem(operators.load(), "some", some)
    monkeypatch.setattr(Operators, "clock", lambda self: Fake())
    monkeypatch.setattr(cuda.Copy, "prepare", lambda *_: runner.Ready(lambda: None))
    return runner.run(Operators(device="cpu", op=("some",)), Plan())


def test_figures_of_a_case(record: Record) -> None:
    ours, slow, copy = record.rows
    assert (ours.implementation, ours.ours, ours.error) == ("lowbit", True, 0)
    assert ours.limit_share is not None
    assert ours.limit_share.median == pytest.approx(0.5)
    assert (ours.gbs, ours.gops) == pytest.approx((0.4, 0.0995))
    assert (slow.ratios["lowbit"].median, slow.error) == pytest.approx((3, 0.5))
    assert copy.kind == LIMIT
    assert ours.threads is None
    reasons = {one.implementation: one.reason for one in record.absent}
    assert reasons == {"nan": "the result is not finite", "fails": "not here"}


def test_record_is_json_and_a_table(record: Record) -> None:
    read = json.loads(record.to_json())
    assert [one["real_time"] for one in read["benchmarks"]] == pytest.approx([2e3, 6e3, 1e3])
    assert read["benchmarks"][1]["name"] == "some/float32/n=5/slow_median"
    assert len(read["absent"]) == 2
    text = io.StringIO()
    Console(file=text, width=160).print(Operators().render(record))
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
        cuda.require("cpu")


def test_every_registered_case_has_a_unique_text() -> None:
    for one in operators:
        texts = [str(case) for case in one.cases]
        assert len(set(texts)) == len(texts), texts[0]


def test_a_wait_hides_the_start_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes here."""
    monkeypatch.setattr(cuda.torch.cuda, "synchronize", lambda: None)
    made = list[float]()

    def slow() -> None:
        made.append(time.perf_counter())
        time.sleep(0.01)

    assert cuda._hiding(lambda: None) == cuda._HIDING_CYCLES
    assert cuda._hiding(slow) >= 3 * 0.01 * cuda._CLOCK
    assert len(made) == cuda._WARM_UPS
