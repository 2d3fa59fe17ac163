"""Row-wise quantization of activations."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lowbit.numerics import quantize_rows

TINY = np.float32(2.0**-126)
LARGEST = np.finfo(np.float32).max

rows = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=9),
    elements=st.floats(width=32, allow_nan=True, allow_infinity=True)
    | st.floats(-4.0, 4.0, width=32)
    | st.sampled_from([0.0, -0.0, 1e-45, float(TINY), float(LARGEST), -float(LARGEST)]),
)


def row_by_the_formula(
    x: npt.NDArray[np.float32], symmetric: bool
) -> tuple[list[int], np.float32, int]:
    """The docstring's formula on one row, scalar by scalar, each step rounded to float32."""
    f = np.float32
    if not all(math.isfinite(v) for v in x):
        return [128] * len(x), f(np.nan), 128
    high, low = max([f(0), *x]), min([f(0), *x])
    scale = max(high, -low) / f(127) if symmetric else high / f(255) - low / f(255)
    zeros = scale < TINY
    if zeros:
        scale = f(1)
    zero_point = 128 if symmetric or zeros else min(max(round(float(-low / scale)), 0), 255)
    least, greatest = (-127, 127) if symmetric else (-zero_point, 255 - zero_point)
    inverse = f(1) / scale
    q = [round(float(min(max(v * inverse, f(least)), f(greatest)))) + zero_point for v in x]
    return q, scale, zero_point


@pytest.mark.deep
@given(x=rows, symmetric=st.booleans())
@settings(deadline=None, max_examples=300)
@example(x=np.array([[LARGEST, -LARGEST, 1.0]], np.float32), symmetric=False)
@example(x=np.array([[TINY * 127, -1e-40], [1e-45, 0.0]], np.float32), symmetric=True)
@example(x=np.array([[np.nan, 1.0], [-np.inf, 1.0], [2.0, 1.0]], np.float32), symmetric=False)
def test_every_bit_is_that_of_the_scalar_formula(
    x: npt.NDArray[np.float32], symmetric: bool
) -> None:
    q, scale, zero_point = quantize_rows(x, symmetric)
    assert (q.dtype, scale.dtype, zero_point.dtype) == (np.uint8, np.float32, np.int32)
    assert q.shape == x.shape
    assert scale.shape == zero_point.shape == x.shape[:1]
    for m, row in enumerate(x):
        expected_q, expected_scale, expected_zero = row_by_the_formula(row, symmetric)
        assert q[m].tolist() == expected_q
        np.testing.assert_array_equal(scale[m], expected_scale)
        assert int(zero_point[m]) == expected_zero


@pytest.mark.parametrize("symmetric", [True, False])
def test_values_next_to_a_tie_are_rounded_as_the_formula_says(symmetric: bool) -> None:
    """Ties are where x · (1 / S) and x / S, or another order of steps, part ways."""
    halves = np.arange(0.5, 255.0)
    factors = np.random.default_rng(2).uniform(0.1, 10.0, 40)[:, None]
    if symmetric:
        x = np.concatenate([[127.0], halves - 127.0]) * factors
    else:
        # One row per zero point that is a tie itself, and within it every value that is.
        ends = np.stack([-halves, 255.0 - halves], axis=1)
        within = np.arange(255.0) - halves[:, None]
        x = np.concatenate([ends, within[:, ::7]], axis=1) * np.resize(factors, (255, 1))
    x = x.astype(np.float32)
    q, scale, zero_point = quantize_rows(x, symmetric)
    for m, row in enumerate(x):
        expected = row_by_the_formula(row, symmetric)
        assert (q[m].tolist(), scale[m], zero_point[m]) == expected


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1.0, 1e6, 1e37])
def test_within_one_step_of_float64(symmetric: bool, magnitude: float) -> None:
    x = (np.random.default_rng(3).normal(size=(50, 200)) * magnitude).astype(np.float32)
    x[10:20] = np.abs(x[10:20])
    x[20:30] = -np.abs(x[20:30])
    q, scale, zero_point = quantize_rows(x, symmetric)
    wide = x.astype(np.float64)
    low, high = wide.min(axis=1).clip(max=0), wide.max(axis=1).clip(min=0)
    exact = np.maximum(-low, high) / 127 if symmetric else (high - low) / 255
    np.testing.assert_allclose(scale, exact, rtol=3 * 2.0**-24)
    expected = np.rint(wide / exact[:, None]) + zero_point[:, None]
    assert np.abs(q - np.clip(expected, 0, 255)).max() <= 1
    back = scale[:, None].astype(np.float64) * (q.astype(int) - zero_point[:, None])
    assert (np.abs(back - wide) <= exact[:, None] * 0.501).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_zero_and_tiny_rows(symmetric: bool) -> None:
    x = np.array([[0.0, -0.0, 0.0], [1e-45, -1e-45, 1e-40]], np.float32)
    q, scale, zero_point = quantize_rows(x, symmetric)
    assert (q == 128).all()
    assert (scale == 1.0).all()
    assert (zero_point == 128).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_non_finite_row_is_marked_and_leaves_the_others_alone(symmetric: bool) -> None:
    x = np.random.default_rng(5).normal(size=(4, 33)).astype(np.float32)
    clean = quantize_rows(x, symmetric)
    x[1, 32], x[2, 0] = np.nan, -np.inf
    marked = quantize_rows(x, symmetric)
    assert np.isnan(marked[1]).tolist() == [False, True, True, False]
    for part, expected in zip(marked, clean, strict=True):
        np.testing.assert_array_equal(part[[0, 3]], expected[[0, 3]])


@pytest.mark.parametrize("symmetric", [True, False])
def test_rows_of_one_sign_use_the_whole_range(symmetric: bool) -> None:
    x = np.linspace(0.0, 1.0, 101, dtype=np.float32)
    q, _, zero_point = quantize_rows(np.stack([x, -x]), symmetric)
    assert zero_point.tolist() == ([128, 128] if symmetric else [0, 255])
    assert [q[0].max(), q[1].min()] == ([255, 1] if symmetric else [255, 0])


@pytest.mark.parametrize("symmetric", [True, False])
def test_strides_do_not_matter(symmetric: bool) -> None:
    x = np.random.default_rng(9).normal(size=(20, 30)).astype(np.float32)
    for view in (x.T, x[::-1, ::-2], x[3:4], x[:, 5:6], x[:0], x[:, :0]):
        for part, expected in zip(
            quantize_rows(view, symmetric), quantize_rows(view.copy(), symmetric), strict=True
        ):
            np.testing.assert_array_equal(part, expected)
            assert part.flags.c_contiguous


def test_the_input_is_left_alone() -> None:
    x = np.array([[np.nan, 1.0], [3.0, -4.0]], np.float32)
    kept = x.copy()
    quantize_rows(x, False)
    np.testing.assert_array_equal(x, kept)


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="float32 activations, got float64"):
        quantize_rows(np.zeros((2, 2)), True)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"\[M, K\], got \(3,\)"):
        quantize_rows(np.zeros(3, np.float32), True)
