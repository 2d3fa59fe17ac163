"""The specifications: that they derive what they claim to, and catch kernels that are wrong."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.numerics import quantize_rows
from lowbit.spec import (
    DTYPES,
    EDGE_SIZES,
    FILLS,
    LINEAR_DYNAMIC,
    MATMUL,
    MATMUL_SCALED,
    Case,
    Expected,
    Specification,
    Tensor,
    edge_cases,
    longest_sum,
)

SPECIFICATIONS = (MATMUL, MATMUL_SCALED, LINEAR_DYNAMIC)
SIZES = {"M": 5, "N": 7, "K": 33}
Inputs = dict[str, np.ndarray[Any, Any]]


def scaled_in_float32(inputs: Inputs, total: np.ndarray, row_scale: np.ndarray) -> np.ndarray:
    """The epilogue as a kernel does it, each step rounded to float32."""
    result = total.astype(np.float32) * row_scale[:, None] * inputs["b_scale"]
    return result + inputs["bias"] if "bias" in inputs else result


def kernel(case: Case, inputs: Inputs) -> np.ndarray:
    """A plain correct kernel: int64 sums, then float32."""
    if case.spec is LINEAR_DYNAMIC:
        q, row_scale, zero = quantize_rows(inputs["x"], "symmetric" in case.options)
        left, right = q.astype(np.int64) - zero[:, None], inputs["b"].astype(np.int64)
        return scaled_in_float32(inputs, left @ right, row_scale)
    left, right = inputs["a"].astype(np.int64), inputs["b"].astype(np.int64)
    if case.spec is MATMUL:
        return (left @ right).astype(np.int32)
    left = left - inputs.get("a_zero_point", np.zeros(len(left), np.int32))[:, None]
    right = right - inputs.get("b_zero_point", np.int32(0))
    return scaled_in_float32(inputs, left @ right, inputs["a_scale"])


def small_cases() -> list[Case]:
    """Every edge case whose product takes no time."""
    cases = (case for spec in SPECIFICATIONS for case in edge_cases(spec, rounds=2))
    return [case for case in cases if case.operations < 3_000_000]


@pytest.mark.parametrize("case", small_cases(), ids=str)
@pytest.mark.parametrize("fill", FILLS)
def test_correct_kernel_is_within_budget(case: Case, fill: str) -> None:
    inputs = case.inputs(seed=3, fill=fill)
    verdict = case.expect(inputs).check(kernel(case, inputs))
    assert verdict.ok, verdict.message


def saturated(inputs: Inputs) -> np.ndarray:
    """What vpmaddubsw does to neighbouring products."""
    a, b = inputs["a"].astype(np.int64), inputs["b"].astype(np.int64)
    pairs = [a[:, k : k + 2] @ b[k : k + 2] for k in range(0, a.shape[1], 2)]
    return np.sum([np.clip(pair, -(2**15), 2**15 - 1) for pair in pairs], axis=0)


WRONG: dict[str, Callable[[Case, Inputs, np.ndarray], np.ndarray]] = {
    "one element off by one": lambda case, inputs, c: (
        c + (np.arange(c.size) == 17).reshape(c.shape)
    ),
    "rows swapped": lambda case, inputs, c: c[[1, 0, *range(2, len(c))]],
    "last column not written": lambda case, inputs, c: np.where(
        np.arange(c.shape[1]) == c.shape[1] - 1, 0, c
    ),
    "last product left out": lambda case, inputs, c: (
        c - np.outer(inputs["a"][:, -1].astype(np.int64), inputs["b"][-1].astype(np.int64))
    ),
    "pairs of products saturated to int16": lambda case, inputs, c: saturated(inputs),
    "a taken for signed": lambda case, inputs, c: (
        inputs["a"].view(np.int8).astype(np.int64) @ inputs["b"].astype(np.int64)
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_integer_kernel_is_caught(wrong: str) -> None:
    case = MATMUL.case(SIZES)
    inputs = case.inputs(seed=1)
    result = WRONG[wrong](case, inputs, kernel(case, inputs)).astype(np.int32)
    verdict = case.expect(inputs).check(result)
    assert not verdict.ok
    assert "are wrong" in verdict.message


def test_wrong_float_kernels_are_caught() -> None:
    case = MATMUL_SCALED.case(SIZES)
    inputs = case.inputs(seed=1)
    expected = case.expect(inputs)
    good = kernel(case, inputs)
    for name in ("bias", "a_zero_point", "b_zero_point"):
        without = {key: value for key, value in inputs.items() if key != name}
        assert not expected.check(kernel(case, without)).ok, f"{name} ignored"
    assert expected.check(good).ok
    # Eight units in the last place of the largest element are more than four roundings.
    worst = np.unravel_index(np.argmax(np.abs(good)), good.shape)
    good[worst] *= np.float32(1 + 8 * 2.0**-24)
    assert not expected.check(good).ok


def test_budget_holds_where_steps_underflow() -> None:
    case = MATMUL_SCALED.case(SIZES, without=["bias"])
    inputs = case.inputs(seed=2)
    inputs["a_scale"][:] = np.float32(1e-40)
    inputs["b_scale"][:] = np.float32(0.37)
    verdict = case.expect(inputs).check(kernel(case, inputs))
    assert verdict.ok, verdict.message


def test_budget_is_tight() -> None:
    """The budget is not many times what correct rounding uses, or it would let errors pass."""
    case = MATMUL_SCALED.case({"M": 64, "N": 64, "K": 300})
    inputs = case.inputs(seed=4)
    expected = case.expect(inputs)
    error = np.abs(kernel(case, inputs) - expected.reference)
    assert 0.3 < float(np.max(error / expected.budget)) <= 1


def test_nan_is_right_only_where_expected() -> None:
    case = LINEAR_DYNAMIC.case(SIZES)
    inputs = case.inputs(seed=1)
    inputs["x"][2, 3] = np.inf
    expected = case.expect(inputs)
    result = kernel(case, inputs)
    assert np.isnan(result[2]).all()
    assert expected.check(result).ok
    hidden = result.copy()
    hidden[2, 0] = 0
    assert not expected.check(hidden).ok
    spread = result.copy()
    spread[1, 0] = np.nan
    assert not expected.check(spread).ok


def test_wrong_shape_or_dtype_is_caught() -> None:
    case = MATMUL.case(SIZES)
    inputs = case.inputs()
    expected = case.expect(inputs)
    result = kernel(case, inputs)
    assert "expected int32[5, 7]" in expected.check(result[:4]).message
    assert not expected.check(result.astype(np.int64)).ok
    assert expected.check(result).ok


def test_integer_errors_do_not_vanish_in_float() -> None:
    """A difference of one beside 2**31 is seen."""
    expected = Expected(np.array([[2**31 - 1]]), np.zeros(()), DTYPES["s32"])
    assert expected.check(np.array([[2**31 - 1]], np.int32)).ok
    assert not expected.check(np.array([[2**31 - 2]], np.int32)).ok


@pytest.mark.parametrize("signature", MATMUL.signatures)
def test_longest_sum_is_the_last_that_fits(signature: str) -> None:
    left, right, _ = signature.split(":")
    longest = longest_sum(left, right)
    corners = [x * y for x, y in itertools.product(DTYPES[left].limits, DTYPES[right].limits)]
    low, high = DTYPES["s32"].limits
    assert all(low <= longest * corner <= high for corner in corners)
    assert any(not low <= (longest + 1) * corner <= high for corner in corners)
    assert MATMUL.case({"M": 1, "N": 1, "K": longest}, dtypes=signature).reduction == longest
    with pytest.raises(ValueError, match="can overflow s32"):
        MATMUL.case({"M": 1, "N": 1, "K": longest + 1}, dtypes=signature)


def test_zero_points_shorten_the_longest_sum() -> None:
    assert longest_sum("s8", "s8", shifted=(True, False)) == longest_sum("u8", "s8")
    bare = MATMUL_SCALED.longest_reduction("s8:s8:f32", ["a_zero_point", "b_zero_point"])
    assert bare == longest_sum("s8", "s8")
    assert LINEAR_DYNAMIC.longest_reduction("f32:s8:f32") == longest_sum("u8", "s8")


def test_operations_and_bytes() -> None:
    case = MATMUL.case(SIZES)
    assert case.operations == 2 * 5 * 7 * 33
    assert case.bytes_moved == 5 * 33 + 33 * 7 + 4 * 5 * 7
    dynamic = LINEAR_DYNAMIC.case(SIZES)
    assert dynamic.operations == case.operations
    assert dynamic.bytes_moved == 4 * 5 * 33 + 33 * 7 + 2 * 4 * 7 + 4 * 5 * 7
    assert dynamic.bytes_moved - LINEAR_DYNAMIC.case(SIZES, without=["bias"]).bytes_moved == 4 * 7


@pytest.mark.parametrize("spec", SPECIFICATIONS, ids=str)
def test_edge_cases_cover_every_size_in_every_dimension(spec: Specification) -> None:
    cases = edge_cases(spec, rounds=2)
    for dim in spec.dims:
        assert Counter(case.sizes[dim] for case in cases) == Counter(EDGE_SIZES * 2)
    assert {case.dtypes for case in cases} == set(spec.signatures)
    assert cases == edge_cases(spec, rounds=2)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(SPECIFICATIONS),
    st.tuples(*[st.integers(1, 40)] * 3),
    st.sampled_from(FILLS),
    st.integers(0, 2**32),
)
def test_inputs_are_as_specified(
    spec: Specification, sizes: tuple[int, ...], fill: str, seed: int
) -> None:
    case = spec.case(dict(zip(spec.dims, sizes, strict=True)))
    inputs = case.inputs(seed, fill)
    again = case.inputs(seed, fill)
    assert list(inputs) == [tensor.name for tensor in case.tensors]
    for tensor in case.tensors:
        array = inputs[tensor.name]
        assert array.shape == case.shape(tensor)
        assert array.dtype == case.dtype(tensor).storage
        np.testing.assert_array_equal(array, again[tensor.name])


def test_full_fill_holds_every_value() -> None:
    inputs = MATMUL.case({"M": 100, "N": 100, "K": 100}).inputs()
    assert set(np.unique(inputs["a"])) == set(range(256))
    assert set(np.unique(inputs["b"])) == set(range(-128, 128))


def test_saturating_fill_is_at_the_ends() -> None:
    inputs = MATMUL.case(SIZES).inputs(fill="max*min")
    assert (inputs["a"] == 255).all()
    assert (inputs["b"] == -128).all()


def test_zero_points_reach_both_ends() -> None:
    inputs = MATMUL_SCALED.case(SIZES, dtypes="s8:u8:f32").inputs()
    assert {-128, 127} <= set(inputs["a_zero_point"].tolist())
    assert {0, 255} <= set(inputs["b_zero_point"].tolist())
    dynamic = LINEAR_DYNAMIC.case(SIZES).inputs()
    zero_points = quantize_rows(dynamic["x"], symmetric=False)[2]
    assert zero_points[1] == 0
    assert zero_points[2] == 255


def test_ideal_is_the_product_without_quantization() -> None:
    case = LINEAR_DYNAMIC.case(SIZES)
    inputs = case.inputs(seed=5)
    weight = inputs["b"] * inputs["b_scale"].astype(np.float64)
    ideal = inputs["x"].astype(np.float64) @ weight + inputs["bias"]
    np.testing.assert_allclose(case.ideal(inputs), ideal, rtol=1e-12, atol=1e-12)
    assert not np.array_equal(case.ideal(inputs), case.expect(inputs).reference)
    exact = MATMUL.case(SIZES)
    product = exact.inputs()
    np.testing.assert_array_equal(exact.ideal(product), exact.expect(product).reference)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MATMUL.case({"M": 1, "N": 1}), "expected M, N, K"),
        (lambda: MATMUL.case({"M": 0, "N": 1, "K": 1}), "M is 0"),
        (lambda: MATMUL.case(SIZES, dtypes="f32:s8:s32"), "known are u8:s8:s32"),
        (lambda: MATMUL.case(SIZES, without=["a"]), "no optional input 'a'"),
        (lambda: MATMUL.case(SIZES, options=["symmetric"]), "no option 'symmetric'"),
        (lambda: MATMUL.case(SIZES).inputs(fill="half"), "known are full"),
        (lambda: Tensor.parse("a u8[M]"), "write it as"),
        (lambda: Tensor.parse("a: u7[M]"), "no dtype 'u7'"),
    ],
)
def test_bad_input_is_told(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_unknown_names_are_told() -> None:
    with pytest.raises(KeyError, match="it has a, b"):
        MATMUL.tensor("c")
    with pytest.raises(TypeError, match="not an integer format"):
        longest_sum("f32", "s8")
