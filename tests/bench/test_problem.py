"""Shapes and dtypes as text, and the data of a problem."""

from __future__ import annotations

import numpy as np
import pytest

from lowbit.spec.operations.products import linear_dynamic, matmul, matmul_scaled
from lowbit_lab.bench.core.case import find
from lowbit_lab.bench.suites.matmul.problem import (
    SIGNATURES,
    MatmulProblem,
    find_gemm,
    parse_shape,
    product,
)


def test_shape() -> None:
    assert parse_shape("2x3:3x5") == {"M": 2, "N": 5, "K": 3}
    assert product("2x3:3x5", "u8:s8:s32").name == "2x3:3x5"


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("2x3", "not understood"),
        ("2x3:3x", "not understood"),
        ("2x3:3x5 ", "not understood"),
        ("-2x3:3x5", "not understood"),
        ("2x3:4x5", "inner sizes differ, 3 and 4"),
        ("0x3:3x5", "at least 1"),
    ],
)
def test_bad_shape_is_told(shape: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_shape(shape)
    assert "for example 256x512:512x1024" in str(caught.value)


def test_dtypes_name_the_operation() -> None:
    assert find_gemm("s8:s8:s32") is matmul
    assert find_gemm("u8:s8:f32") is matmul_scaled
    assert find_gemm("f32:s8:f32") is linear_dynamic
    assert len(SIGNATURES) == len(set(SIGNATURES))
    with pytest.raises(ValueError, match="known are u8:s8:s32"):
        find_gemm("u8:s8")


def test_too_large_is_told() -> None:
    with pytest.raises(ValueError, match="this machine has"):
        product("20000000x100:100x20000000", "u8:s8:s32")
    with pytest.raises(ValueError, match="can overflow"):
        product("1x100000:100000x1", "u8:s8:s32")


@pytest.mark.parametrize("dtypes", SIGNATURES)
def test_float_version_stands_for_the_same_numbers(dtypes: str) -> None:
    problem = MatmulProblem.make(product("6x40:40x9", dtypes), seed=2)
    result = problem.a_float.astype(np.float64) @ problem.b_float.astype(np.float64)
    assert problem.error(problem.from_real(result)) < 1e-6
    assert problem.a_float.dtype == problem.b_float.dtype == np.float32


@pytest.mark.parametrize("name", ["numpy fp32", "torch fp32", "torch _int_mm"])
def test_weights_are_elsewhere_each_time(name: str) -> None:
    """Also of those that pack nothing: cold weights are copies that others do not read."""
    one, problem = find("matmul", name), MatmulProblem.make(product("6x40:40x9", "u8:s8:s32"))
    if (reason := one.available(problem.case)) is not None:
        pytest.skip(reason)
    first, second = (np.asarray(one.prepare(problem, 1).call.args[1]) for _ in range(2))  # type: ignore[attr-defined]
    np.testing.assert_array_equal(first, problem.b)
    for other in (second, problem.b, problem.b_float):
        assert not np.shares_memory(first, other)


def test_error_is_a_share_of_the_largest_element() -> None:
    problem = MatmulProblem.make(product("6x40:40x9", "u8:s8:s32"))
    ideal = problem.ideal
    assert problem.error(ideal) == 0
    off = ideal.astype(np.float64)
    off[0, 0] += 0.25 * np.abs(ideal).max()
    assert problem.error(off) == pytest.approx(0.25)
