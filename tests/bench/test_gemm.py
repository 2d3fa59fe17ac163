"""The benchmark of float products: the same data for all, each judged against float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from rich.console import Console
from tests.test_cli import error_line, run_lowbit

from lowbit_lab.bench import Limits, Plan, run
from lowbit_lab.bench.core.case import find, implementations_of
from lowbit_lab.bench.suites.gemm import DTYPES, SETS, Gemm, GemmProblem
from lowbit_lab.bench.suites.matmul.problem import parse_shape

QUICK = Limits(noise=0.5, seconds=0.02, least_rounds=3)


def problem(dtypes: str = DTYPES[0], transposed: bool = False) -> GemmProblem:
    shape = "5x70:70x21"
    suite = Gemm(shapes=(shape,), dtype=(dtypes,), transposed=transposed)
    return suite.make(suite.cases()[0], 7)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtypes", DTYPES)
def test_all_implementations_compute_the_product(dtypes: str, transposed: bool) -> None:
    given = problem(dtypes=dtypes, transposed=transposed)
    exact = given.a.astype(float) @ given.b.astype(float)
    budget = 1e-5 if dtypes == DTYPES[0] else 1e-2
    done = []
    for one in implementations_of("gemm"):
        if one.available(given.case):
            continue
        ready = one.prepare(given, 1)
        result = ready.read(ready.call())
        assert np.abs(result.astype(float) - exact).max() <= budget * np.abs(exact).max()
        assert given.wrong(one, result) is None
        assert given.error(result) < budget
        done.append(one.name)
    assert done[0] == "lowbit"
    assert given.b.flags.f_contiguous == transposed


def test_data_are_of_the_dtypes_and_of_the_seed() -> None:
    given, again = problem(dtypes=DTYPES[1]), problem(dtypes=DTYPES[1])
    assert given.a.dtype == given.b.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(given.b.view(np.uint16), again.b.view(np.uint16))
    assert (given.operations, given.bytes) == (2 * 5 * 70 * 21, 2 * (5 * 70 + 70 * 21 + 5 * 21))


def test_a_wrong_result_of_lowbit_cannot_be_let_pass() -> None:
    given, ours = problem(), find("gemm", "lowbit")
    result = given.expected.reference.astype(np.float32)
    assert given.wrong(ours, result) is None
    result[3, 4] *= np.float32(1.001)
    assert given.wrong(ours, result)
    assert given.wrong(find("gemm", "numpy"), result) is None


@pytest.mark.deep
def test_a_record_of_a_few_shapes() -> None:
    pytest.importorskip("threadpoolctl")
    suite = Gemm(shapes=("9x33:33x40", "1x64:64x64"), dtype=DTYPES[:2])
    record = run(suite, Plan(limits=QUICK))
    ours = [row for row in record.rows if row.ours]
    assert [(row.case, row.dtypes) for row in ours] == [
        (shape, dtypes) for dtypes in DTYPES[:2] for shape in suite.shapes
    ]
    assert all(row.error is not None and row.error < 1e-2 for row in record.rows)
    assert {one["dtypes"] for one in record.summary} >= set(DTYPES[:1])
    console = Console(width=200)
    with console.capture() as captured:
        console.print(suite.render(record))
    assert "geometric mean" in captured.get()
    assert "gemm f32:f32:f32 9x33:33x40, 1 thread" in captured.get()


def test_the_sets_are_shapes_and_the_default_is_all_of_them() -> None:
    names = [case.name for case in Gemm().cases()]
    assert names == [shape for shapes in SETS.values() for shape in shapes]
    assert all(parse_shape(name) for name in names)
    assert [case.name for case in Gemm(suite="thin").cases()] == list(SETS["thin"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shapes": ("3x4",)}, "shape '3x4' is not understood"),
        ({"dtype": ("f16:f16:f16",)}, "dtypes 'f16:f16:f16' are not known; known are f32"),
        ({"suite": "long"}, "no set of shapes is called 'long'; known are square, thin and all"),
    ],
)
def test_what_is_not_known(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Gemm(**options)


def test_the_command_says_in_one_line_what_is_wrong() -> None:
    assert "is not understood" in error_line(run_lowbit("bench", "gemm", "3x4"), 2)
