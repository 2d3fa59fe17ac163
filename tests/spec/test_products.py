"""The specifications: that they derive what they claim to, and catch kernels that are wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.numerics import longest_sum, quantize_rows
from lowbit.spec import DTYPES, EDGE_SIZES, Case, Expected, Operation, edge_cases, fills_of
from lowbit.spec.operations import operations
from lowbit.spec.operations.products import linear_dynamic, matmul, matmul_scaled
from lowbit.spec.post_ops import FUNCTIONS as MEANINGS

SPECIFICATIONS = (matmul, matmul_scaled, linear_dynamic)
SIZES = {"M": 5, "N": 7, "K": 33}
Inputs = dict[str, np.ndarray[Any, Any]]


def kernel(case: Case, inputs: Inputs) -> np.ndarray:
    """A plain correct kernel: int64 sums, then float32."""
    if case.spec is linear_dynamic:
        q, row_scale, zero = quantize_rows(inputs["x"], case.static["symmetric"])
        left, right = q.astype(np.int64) - zero[:, None], inputs["b"].astype(np.int64)
        return finished(case, inputs, left @ right, row_scale)
    left, right = inputs["a"].astype(np.int64), inputs["b"].astype(np.int64)
    if case.spec is matmul:
        return (left @ right).astype(np.int32)
    left = left - inputs.get("a_zero_point", np.zeros(len(left), np.int32))[:, None]
    right = right - inputs.get("b_zero_point", np.int32(0))
    return finished(case, inputs, left @ right, inputs["a_scale"])


def finished(case: Case, inputs: Inputs, total: np.ndarray, row_scale: np.ndarray) -> np.ndarray:
    """Scales and post-operations, each step rounded to float32, and the output."""
    y = total.astype(np.float32) * row_scale[:, None] * inputs["b_scale"]
    for step in case.static["post_ops"] or ("bias", "residual"):
        if not isinstance(step, str):
            y = np.clip(y, np.float32(step[0]), np.float32(step[1]))
        elif step in MEANINGS:
            y = MEANINGS[step].meaning(y.astype(np.float64)).astype(np.float32)
        elif step in inputs:
            y = y + inputs[step]
    out = case.dtype("c")
    if out.is_float:
        return y.astype(out.storage)
    steps = np.rint(y * (np.float32(1) / inputs["out_scale"])) + inputs["out_zero_point"]
    return np.clip(steps, out.low, out.high).astype(out.storage)


def small_cases() -> list[Case]:
    """Every edge case whose product takes no time."""
    cases = (case for spec in SPECIFICATIONS for case in edge_cases(spec, rounds=2))
    return [case for case in cases if case.operations < 3_000_000]


@pytest.mark.deep("linear_dynamic *M=1000 K=3 N=129*")
@pytest.mark.parametrize("case", small_cases(), ids=str)
def test_correct_kernel_is_within_budget(case: Case) -> None:
    for fill in fills_of(case.operation):
        case = replace(case, fill=fill)
        inputs = case.inputs(seed=3)
        with np.errstate(all="ignore"):
            result = kernel(case, inputs)
        verdict = case.expect(inputs).check(result)
        assert verdict.ok, f"{fill}: {verdict.message}"


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
    case = matmul.case(SIZES)
    inputs = case.inputs(seed=1)
    result = WRONG[wrong](case, inputs, kernel(case, inputs)).astype(np.int32)
    verdict = case.expect(inputs).check(result)
    assert not verdict.ok
    assert "are wrong" in verdict.message


def test_wrong_float_kernels_are_caught() -> None:
    case = matmul_scaled.case(SIZES, without=["residual"])
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
    case = matmul_scaled.case(SIZES, without=["bias", "residual"])
    inputs = case.inputs(seed=2)
    inputs["a_scale"][:] = np.float32(1e-40)
    inputs["b_scale"][:] = np.float32(0.37)
    verdict = case.expect(inputs).check(kernel(case, inputs))
    assert verdict.ok, verdict.message


def test_budget_is_tight() -> None:
    """The budget is not many times what correct rounding uses, or it would let errors pass."""
    case = matmul_scaled.case({"M": 64, "N": 64, "K": 300}, without=["residual"])
    inputs = case.inputs(seed=4)
    expected = case.expect(inputs)
    error = np.abs(kernel(case, inputs) - expected.reference)
    assert 0.3 < float(np.max(error / expected.budget)) <= 1


def test_nan_is_right_only_where_expected() -> None:
    case = linear_dynamic.case(SIZES, without=["residual"])
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
    case = matmul.case(SIZES)
    inputs = case.inputs()
    expected = case.expect(inputs)
    result = kernel(case, inputs)
    assert "expected int32[5, 7]" in expected.check(result[:4]).message
    assert not expected.check(result.astype(np.int64)).ok
    assert expected.check(result).ok


def test_integer_errors_do_not_vanish_in_float() -> None:
    """A difference of one beside 2**31 is seen."""
    expected = Expected(np.array([[2**31 - 1]]), np.zeros(()), DTYPES["int32"])
    assert expected.check(np.array([[2**31 - 1]], np.int32)).ok
    assert not expected.check(np.array([[2**31 - 2]], np.int32)).ok


@pytest.mark.parametrize("signature", matmul.signatures)
def test_longest_sum_is_the_last_that_fits(signature: str) -> None:
    variant = matmul.variant(dtypes=signature)
    left, right = (variant.tensor(name).format for name in "ab")
    longest = longest_sum(left.name, right.name)
    corners = [x * y for x in (left.low, left.high) for y in (right.low, right.high)]
    low, high = DTYPES["int32"].low, DTYPES["int32"].high
    assert all(low <= longest * corner <= high for corner in corners)
    assert any(not low <= (longest + 1) * corner <= high for corner in corners)
    assert matmul.case({"M": 1, "N": 1, "K": longest}, dtypes=signature).reduction == longest
    with pytest.raises(ValueError, match="can overflow int32"):
        matmul.case({"M": 1, "N": 1, "K": longest + 1}, dtypes=signature)


def test_zero_points_shorten_the_longest_sum() -> None:
    assert longest_sum("int8", "int8", shifted=(True, False)) == longest_sum("uint8", "int8")
    bare = matmul_scaled.variant(dtypes="s8:s8:f32", without=["a_zero_point", "b_zero_point"])
    assert bare.longest_reduction() == longest_sum("int8", "int8")
    assert linear_dynamic.longest_reduction() == longest_sum("uint8", "int8")


def test_operations_and_bytes() -> None:
    case = matmul.case(SIZES)
    assert case.operations == 2 * 5 * 7 * 33
    assert case.bytes_moved == 5 * 33 + 33 * 7 + 4 * 5 * 7
    dynamic = linear_dynamic.case(SIZES, without=["residual"])
    assert dynamic.operations == case.operations
    assert dynamic.bytes_moved == 4 * 5 * 33 + 33 * 7 + 2 * 4 * 7 + 4 * 5 * 7
    assert (
        dynamic.bytes_moved - linear_dynamic.case(SIZES, without=["bias", "residual"]).bytes_moved
        == 4 * 7
    )


@pytest.mark.parametrize("spec", SPECIFICATIONS, ids=str)
def test_edge_cases_cover_every_size_in_every_dimension(spec: Operation) -> None:
    cases = edge_cases(spec, rounds=2)
    for dim in spec.names:
        assert Counter(case.sizes[dim] for case in cases) == Counter(EDGE_SIZES * 2)
    assert {case.dtypes for case in cases} == set(spec.signatures)
    assert cases == edge_cases(spec, rounds=2)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_inputs_are_as_specified(data: st.DataObject) -> None:
    spec = data.draw(st.sampled_from(list(operations)))
    dtypes = data.draw(st.sampled_from(spec.signatures))
    without = data.draw(st.sampled_from(spec.subsets))
    static = data.draw(st.sampled_from(spec.switches))
    variant = spec.variant(dtypes=dtypes, without=without, static=static)
    sizes = {name: data.draw(st.integers(1, 9)) for name in variant.names}
    fill, seed = data.draw(st.sampled_from(fills_of(variant))), data.draw(st.integers(0, 2**32))
    case = Case(variant, variant.fitted(sizes), fill)
    inputs, again = case.inputs(seed), case.inputs(seed)
    assert list(inputs) == [tensor.name for tensor in variant.inputs]
    for tensor in variant.inputs:
        array = inputs[tensor.name]
        assert array.shape == tensor.shape(case.sizes)
        assert array.dtype == tensor.format.storage
        assert array.tobytes() == again[tensor.name].tobytes()


def test_full_fill_holds_every_value() -> None:
    inputs = matmul.case({"M": 100, "N": 100, "K": 100}).inputs()
    assert set(np.unique(inputs["a"])) == set(range(256))
    assert set(np.unique(inputs["b"])) == set(range(-128, 128))


def test_saturating_fill_is_at_the_ends() -> None:
    inputs = matmul.case(SIZES, fill="max*min").inputs()
    assert (inputs["a"] == 255).all()
    assert (inputs["b"] == -128).all()


def test_zero_points_reach_both_ends() -> None:
    inputs = matmul_scaled.case(SIZES, dtypes="s8:u8:f32").inputs()
    assert {-128, 127} <= set(inputs["a_zero_point"].tolist())
    assert {0, 255} <= set(inputs["b_zero_point"].tolist())
    dynamic = linear_dynamic.case(SIZES, without=["residual"]).inputs()
    zero_points = quantize_rows(dynamic["x"], symmetric=False)[2]
    assert zero_points[1] == 0
    assert zero_points[2] == 255


def test_ideal_is_the_product_without_quantization() -> None:
    case = linear_dynamic.case(SIZES, without=["residual"])
    inputs = case.inputs(seed=5)
    weight = inputs["b"] * inputs["b_scale"].astype(np.float64)
    ideal = inputs["x"].astype(np.float64) @ weight + inputs["bias"]
    np.testing.assert_allclose(case.ideal(inputs), ideal, rtol=1e-12, atol=1e-12)
    assert not np.array_equal(case.ideal(inputs), case.expect(inputs).reference)
    exact = matmul.case(SIZES)
    product = exact.inputs()
    np.testing.assert_array_equal(exact.ideal(product), exact.expect(product).reference)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: matmul.case({"M": 1, "N": 1}), "has the sizes M, K, N; got M, N"),
        (lambda: matmul.case({"M": 0, "N": 1, "K": 1}), "M is 0"),
        (lambda: matmul.case(SIZES, dtypes="f32:s8:s32"), "known are u8:s8:s32"),
        (lambda: matmul.case(SIZES, without=["a"]), "no optional input 'a'"),
        (lambda: matmul_scaled.case(SIZES, without=["out_scale"]), "no optional input 'out_scale'"),
        (lambda: matmul.case(SIZES, static={"symmetric": True}), "no static parameter 'symmetric'"),
        (lambda: matmul.case(SIZES, fill="half"), "known are normal"),
    ],
)
def test_bad_input_is_told(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_unknown_names_are_told() -> None:
    with pytest.raises(KeyError, match="it has a, b"):
        matmul.tensor("d")
    with pytest.raises(ValueError, match="unknown integer format 'float32'"):
        longest_sum("float32", "int8")
