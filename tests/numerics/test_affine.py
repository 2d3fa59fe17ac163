"""The affine map: its parameters, both directions, and what is degenerate."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lowbit.numerics import (
    affine_parameters,
    check_finite,
    dequantize_affine,
    int_format,
    quantize_affine,
)

FORMATS = ["uint8", "int8", "uint4", "int4"]
TINY = float(np.finfo(np.float32).smallest_normal)
LARGEST = float(np.finfo(np.float32).max)

formats = st.sampled_from(FORMATS).map(int_format)
floats32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def half_even(value: Fraction) -> int:
    """Python rounds fractions exactly, half to even."""
    return round(value)


@given(a=floats32, b=floats32, fmt=formats)
@settings(deadline=None)
@example(a=0.0, b=0.0, fmt=int_format("uint8"))
@example(a=-LARGEST, b=LARGEST, fmt=int_format("int8"))
@example(a=0.0, b=1e-45, fmt=int_format("int4"))
@example(a=5.0, b=5.0, fmt=int_format("uint4"))
def test_asymmetric_parameters_follow_the_formula(a: float, b: float, fmt: Any) -> None:
    low, high = min(a, b), max(a, b)
    scale, zero_point = affine_parameters(low, high, fmt, symmetric=False)
    assert (scale.dtype, zero_point.dtype, scale.shape) == (np.float32, np.int32, ())
    low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        assert float(scale) == 1.0
    else:
        exact = (Fraction(high) - Fraction(low)) / (fmt.qmax - fmt.qmin)
        expected = max(exact, Fraction(TINY))
        assert abs(Fraction(float(scale)) - expected) <= expected / 2**23
    expected_zero = fmt.qmin - half_even(Fraction(low) / Fraction(float(scale)))
    assert int(zero_point) == min(max(expected_zero, fmt.qmin), fmt.qmax)


@given(a=floats32, b=floats32, fmt=formats)
@settings(deadline=None)
def test_symmetric_parameters_follow_the_formula(a: float, b: float, fmt: Any) -> None:
    low, high = min(a, b), max(a, b)
    scale, zero_point = affine_parameters(low, high, fmt, symmetric=True)
    assert int(zero_point) == (0 if fmt.signed else 2 ** (fmt.bits - 1))
    absmax = max(abs(low), abs(high))
    if absmax == 0.0:
        assert float(scale) == 1.0
    else:
        expected = max(Fraction(absmax) / (2 ** (fmt.bits - 1) - 1), Fraction(TINY))
        assert abs(Fraction(float(scale)) - expected) <= expected / 2**23


@given(values=st.lists(floats32, min_size=1, max_size=20), fmt=formats, symmetric=st.booleans())
@settings(deadline=None)
@example(values=[-LARGEST, LARGEST], fmt=int_format("uint8"), symmetric=False)
@example(values=[LARGEST, 1.0], fmt=int_format("int8"), symmetric=True)
@example(values=[-1e-45, 1e-40], fmt=int_format("uint8"), symmetric=False)
@example(values=[-0.5, 0.5], fmt=int_format("uint4"), symmetric=False)
def test_round_trip_is_within_half_a_step(values: list[float], fmt: Any, symmetric: bool) -> None:
    x = np.array(values, dtype=np.float32)
    scale, zero_point = affine_parameters(x.min(), x.max(), fmt, symmetric)
    q = quantize_affine(x, scale, zero_point, fmt)
    back = dequantize_affine(q, scale, zero_point).astype(np.float64)
    # S is rounded to float32, and so is the result: 2⁻¹⁶ of a step covers 255 · 2⁻²⁴.
    budget = float(scale) * (0.5 + 2.0**-16) + np.abs(x.astype(np.float64)) * 2.0**-23
    assert (np.abs(back - x) <= budget).all()


@given(
    x=floats32,
    scale=st.floats(TINY, 2.0**100, width=32),
    offset=st.integers(0, 255),
    fmt=formats,
)
@settings(deadline=None)
@example(x=2.5, scale=1.0, offset=0, fmt=int_format("int8"))
@example(x=-3.5, scale=1.0, offset=9, fmt=int_format("uint8"))
def test_quantized_is_the_nearest_integer_half_to_even(
    x: float, scale: float, offset: int, fmt: Any
) -> None:
    zero_point = fmt.qmin + offset % (fmt.qmax - fmt.qmin + 1)
    q = quantize_affine(np.array(x, np.float32), np.float32(scale), zero_point, fmt)
    ratio = Fraction(x) / Fraction(scale)
    assert int(q) == min(max(half_even(ratio) + zero_point, fmt.qmin), fmt.qmax)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("scale", [TINY, 1e-3, 0.1, 1.0, 3e30])
def test_every_integer_survives_the_way_back(name: str, scale: float) -> None:
    fmt = int_format(name)
    every = np.arange(fmt.qmin, fmt.qmax + 1).astype(fmt.storage)
    for zero_point in (fmt.qmin, fmt.qmin + 3, fmt.midpoint, fmt.qmax):
        real = dequantize_affine(every, scale, zero_point)
        assert real.dtype == np.float32
        np.testing.assert_array_equal(quantize_affine(real, scale, zero_point, fmt), every)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_zero_is_exact(name: str, symmetric: bool) -> None:
    fmt = int_format(name)
    low, high = np.array([-3.0, -7.1, 2.0, -1e-44]), np.array([5.0, -0.1, 9.0, 1e-45])
    scale, zero_point = affine_parameters(low, high, fmt, symmetric)
    q = quantize_affine(np.zeros(4, np.float32), scale, zero_point, fmt)
    np.testing.assert_array_equal(q, zero_point)
    np.testing.assert_array_equal(dequantize_affine(q, scale, zero_point), np.zeros(4))


@pytest.mark.parametrize("name", FORMATS)
def test_symmetric_never_reaches_the_least_value(name: str) -> None:
    fmt = int_format(name)
    x = np.linspace(-2.0, 2.0, 4001, dtype=np.float32)
    q = quantize_affine(x, *affine_parameters(-2.0, 2.0, fmt, True), fmt)
    assert (q.min(), q.max()) == (fmt.qmin + 1, fmt.qmax)


def test_parameters_broadcast_and_keep_shape() -> None:
    low, high = np.zeros((3, 1)), np.arange(4.0)
    scale, zero_point = affine_parameters(low, high, int_format("uint8"), False)
    assert scale.shape == zero_point.shape == (3, 4)
    empty, _ = affine_parameters(np.zeros((0, 2)), np.zeros((0, 2)), int_format("int8"), True)
    assert empty.shape == (0, 2)


def test_values_outside_of_the_range_saturate() -> None:
    x = np.array([-1e308, -1000.0, 1000.0, 1e308])
    q = quantize_affine(x, np.float32(1e-30), 3, int_format("int4"))
    np.testing.assert_array_equal(q, [-8, -8, 7, 7])


def test_products_beyond_float32_become_the_largest() -> None:
    back = dequantize_affine(np.array([0, 255], np.uint8), np.float32(LARGEST / 100), 128)
    np.testing.assert_array_equal(back, np.array([-LARGEST, LARGEST], np.float32))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_any_float_dtype_and_stride(dtype: type) -> None:
    x = np.arange(-60, 60, dtype=dtype).reshape(10, 12)[::-2, ::-3].T
    q = quantize_affine(x, 0.5, 0, int_format("int8"))
    assert q.flags.c_contiguous
    np.testing.assert_array_equal(q, np.clip(x.astype(np.float64) * 2, -128, 127))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_non_finite_value_is_named(bad: float) -> None:
    x = np.zeros((3, 4), np.float32)
    x[2, 0] = np.nan
    x[1, 2] = bad
    with pytest.raises(ValueError, match=rf"found {bad} at index \(1, 2\)"):
        check_finite(x)
    with pytest.raises(ValueError, match=r"index \(1, 2\)"):
        quantize_affine(x, 1.0, 0, int_format("int8"))
    with pytest.raises(ValueError, match=r"index \(\)"):
        check_finite(np.array(bad))
    with pytest.raises(ValueError, match=r"index \(1, 2\)"):
        affine_parameters(x, 1.0, int_format("int8"), True)


def test_check_finite_accepts_finite_and_empty() -> None:
    check_finite(np.array([[LARGEST, -LARGEST, 1e-45]], np.float32))
    check_finite(np.zeros((0, 3)))


def test_bad_ranges() -> None:
    fmt = int_format("int8")
    with pytest.raises(ValueError, match="low <= high"):
        affine_parameters([0.0, 2.0], [1.0, 1.0], fmt, True)
    with pytest.raises(ValueError, match="within float32"):
        affine_parameters(0.0, 1e39, fmt, True)
    with pytest.raises(ValueError, match="within float32"):
        affine_parameters(-1e39, 0.0, fmt, False)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
def test_bad_scales(scale: float) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        quantize_affine(np.zeros(3), scale, 0, int_format("int8"))
    with pytest.raises(ValueError, match="positive and finite"):
        dequantize_affine(np.zeros(3, np.int8), scale, 0)


def test_bad_zero_points_shapes_and_dtypes() -> None:
    fmt = int_format("uint4")
    with pytest.raises(ValueError, match="within uint4, 0 to 15, got -1 to 16"):
        quantize_affine(np.zeros(2), 1.0, np.array([-1, 16]), fmt)
    with pytest.raises(TypeError, match="integer dtype, got float64"):
        quantize_affine(np.zeros(2), 1.0, 0.0, fmt)
    with pytest.raises(ValueError, match=r"scale to broadcast .* \(2, 3\), got \(2,\)"):
        quantize_affine(np.zeros((2, 3)), np.ones(2), 0, fmt)
    with pytest.raises(ValueError, match=r"zero_point to broadcast .* \(3,\), got \(2, 3\)"):
        dequantize_affine(np.zeros(3, np.uint8), 1.0, np.zeros((2, 3), int))
    with pytest.raises(TypeError, match="int8 or uint8, got float64"):
        dequantize_affine(np.zeros(3), 1.0, 0)


@pytest.mark.parametrize("name", ["uint8", "int8"])
def test_agrees_with_torch(name: str) -> None:
    torch = pytest.importorskip("torch")
    fmt = int_format(name)
    x = np.random.default_rng(7).normal(0.0, 3.0, 20_000).astype(np.float32)
    scale, zero_point = affine_parameters(x.min(), x.max(), fmt, symmetric=False)
    q = quantize_affine(x, scale, zero_point, fmt)
    fake = torch.fake_quantize_per_tensor_affine(
        torch.from_numpy(x), float(scale), int(zero_point), fmt.qmin, fmt.qmax
    ).numpy()
    difference = np.abs(fake - dequantize_affine(q, scale, zero_point)) / scale
    # torch multiplies by a rounded reciprocal, so a value next to a tie may go the other way.
    assert difference.max() <= 1.0 + 1e-4
    ratio = x.astype(np.float64) / scale
    away_from_ties = np.abs(ratio - np.floor(ratio) - 0.5) > 1e-4
    assert away_from_ties.mean() > 0.99
    assert difference[away_from_ties].max() <= 1e-4
