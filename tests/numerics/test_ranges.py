"""Ranges of least squared error: never worse than the whole range, close to the best there is."""

from __future__ import annotations

import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lowbit.numerics import QTensor, affine_parameters, int_format, quantize
from lowbit.numerics.ranges import least_squares

TINY = np.finfo(np.float32).smallest_normal
KINDS = [("uint4", False), ("uint4", True), ("int4", True), ("int4", False), ("int8", True)]
Floats = npt.NDArray[np.float64]


def normal(*shape: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(5).standard_normal(shape, dtype=np.float32)


def squared_errors(x: npt.NDArray[Any], t: QTensor) -> Floats:
    """The sums over what shares a scale, element by element, in the shape of the scales."""
    kept = t.axis if isinstance(t.axis, tuple) else () if t.axis is None else (t.axis,)
    found: dict[tuple[int, ...], float] = dict.fromkeys(np.ndindex(t.scale.shape), 0.0)
    squares: Floats = (t.dequantize().astype(np.float64) - x.astype(np.float64)) ** 2
    for index in np.ndindex(x.shape):
        parts = {i: index[i] for i in kept}
        if t.group_axis is not None and t.group_size is not None:
            parts[t.group_axis] = index[t.group_axis] // t.group_size
        found[tuple(parts[i] for i in sorted(parts))] += float(squares[index])
    return np.array([found[i] for i in np.ndindex(t.scale.shape)]).reshape(t.scale.shape)


@pytest.mark.deep
@given(
    x=hnp.arrays(
        st.sampled_from([np.float16, np.float32]),
        hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=9),
        elements=st.floats(width=16, allow_nan=False, allow_infinity=False),
    ),
    exponent=st.sampled_from([-140, -126, -20, 0, 111]),
    kind=st.sampled_from(KINDS),
    group_size=st.sampled_from([None, 1, 2, 3, 5, 100]),
    data=st.data(),
)
@settings(deadline=None, max_examples=300)
def test_no_error_is_above_that_of_the_least_and_greatest_value(
    x: npt.NDArray[Any],
    exponent: int,
    kind: tuple[Any, bool],
    group_size: int | None,
    data: Any,
) -> None:
    if x.dtype == np.float32:
        x = np.ldexp(x, exponent)
    group_axis = None if group_size is None else data.draw(st.integers(0, x.ndim - 1))
    others = [i for i in range(x.ndim) if i != group_axis]
    axis = tuple(data.draw(st.lists(st.sampled_from(others), unique=True)) if others else [])
    options: dict[str, Any] = {"axis": axis, "group_size": group_size, "group_axis": group_axis}
    options["symmetric"] = kind[1]
    searched = quantize(x, kind[0], range="mse", **options)
    plain = quantize(x, kind[0], **options)
    # The sums of the search are of the same terms in another order.
    allowed = squared_errors(x, plain) * (1 + 1e-12)
    assert (squared_errors(x, searched) <= allowed).all()
    assert (searched.scale >= TINY).all()
    if kind[1]:
        np.testing.assert_array_equal(searched.zero_point, plain.zero_point)


@pytest.mark.parametrize(
    ("kind", "group_size", "most"),
    [
        (("uint4", False), 32, 0.92),
        (("uint4", False), 128, 0.91),
        (("uint4", False), None, 0.72),
        (("int4", True), 128, 0.77),
        (("int8", True), None, 1.0),
    ],
)
def test_normal_data(kind: tuple[Any, bool], group_size: int | None, most: float) -> None:
    w = normal(1100, 30)  # a short group at the end, and several blocks of rows
    options: dict[str, Any] = {"axis": 1, "group_size": group_size, "symmetric": kind[1]}
    if group_size is not None:
        options["group_axis"] = 0
    plain = squared_errors(w, quantize(w, kind[0], **options))
    searched = squared_errors(w, quantize(w, kind[0], range="mse", **options))
    assert (searched <= plain * (1 + 1e-12)).all()
    assert searched.sum() < most * plain.sum()
    if group_size is not None:
        assert searched[-1].sum() < plain[-1].sum()


def dense_search(x: Floats) -> float:
    """The least squared error of uint4 over many scales and all zero points."""
    scale = np.linspace(0.3, 1.3, 400)[:, None, None] * (x.max() - x.min()) / 15
    zero = np.arange(16)[:, None]
    q = np.clip(np.rint(x / scale) + zero, 0, 15)
    return float(((scale * (q - zero) - x) ** 2).sum(axis=2).min())


@pytest.mark.parametrize("size", [8, 31, 128])
def test_comes_close_to_all_scales_and_zero_points(size: int) -> None:
    w = normal(40, size)
    found = squared_errors(w, quantize(w, "uint4", axis=0, symmetric=False, range="mse"))
    best = sum(dense_search(row.astype(np.float64)) for row in w)
    plain = squared_errors(w, quantize(w, "uint4", axis=0, symmetric=False))
    assert found.sum() < plain.sum()
    assert found.sum() < best * 1.1


@pytest.mark.parametrize(("name", "symmetric"), [("uint4", False), ("int4", True)])
def test_finds_the_scale_that_data_were_made_with(name: Any, symmetric: bool) -> None:
    rng = np.random.default_rng(3)
    q = rng.integers(-5, 6, (4, 2000))
    w = 0.25 * q + rng.normal(0, 0.01, q.shape)
    w[:, 7] = 3.0  # one outlier in two thousand
    t = quantize(w, name, axis=0, symmetric=symmetric, range="mse")
    np.testing.assert_allclose(t.scale, 0.25, rtol=0.01)
    inside = np.arange(2000) != 7
    values = t.values.astype(np.int64) - t.zero_point[:, None]
    np.testing.assert_array_equal(values[:, inside], q[:, inside])


@pytest.mark.parametrize(("name", "symmetric"), KINDS)
def test_degenerate_groups(name: Any, symmetric: bool) -> None:
    w = np.zeros((48, 2), np.float32)
    w[8:16] = -2.5
    w[16:24] = 1e-42
    w[24:32] = [[1e-45, -1e-45]]
    w[32:40] = np.finfo(np.float32).max
    w[40:, 1] = np.linspace(-1, 1, 8) * np.finfo(np.float32).max
    options: dict[str, Any] = {"group_size": 8, "group_axis": 0, "symmetric": symmetric}
    t = quantize(w, name, axis=1, range="mse", **options)
    assert t.scale[0].tolist() == [1.0, 1.0]
    back = t.dequantize().astype(np.float64)
    assert (back[:8] == 0).all()
    np.testing.assert_allclose(back[8:16], -2.5, rtol=2.0**-22)
    assert (np.abs(back[16:32] - w[16:32]) <= TINY / 2).all()
    np.testing.assert_allclose(back[32:40], w[32:40].astype(np.float64), rtol=2.0**-22)
    assert np.isfinite(back).all()


@pytest.mark.parametrize(("name", "sign"), [("uint4", 1), ("uint4", -1), ("int4", 1), ("int8", -1)])
def test_zero_points_of_what_is_far_from_0_stay_in_the_format(name: Any, sign: int) -> None:
    """There a zero point beyond the format would have less error."""
    x = (sign * (1 + np.random.default_rng(2).exponential(2, (6, 64)))).astype(np.float32)
    t = quantize(x, name, axis=0, symmetric=False, range="mse")
    fmt = int_format(name)
    assert ((fmt.qmin <= t.zero_point) & (t.zero_point <= fmt.qmax)).all()
    plain = squared_errors(x, quantize(x, name, axis=0, symmetric=False))
    assert (squared_errors(x, t) <= plain).all()


def test_shapes_and_dtypes() -> None:
    w = normal(6, 70)
    expected = quantize(w, "uint4", axis=0, group_size=16, symmetric=False, range="mse")
    options: dict[str, Any] = {"group_size": 16, "symmetric": False, "range": "mse"}
    for same in (w.astype(np.float64), np.asfortranarray(w), np.repeat(w, 2, axis=1)[:, ::2]):
        t = quantize(same, "uint4", axis=0, **options)
        np.testing.assert_array_equal(t.values, expected.values)
        np.testing.assert_array_equal(t.scale, expected.scale)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        assert quantize(w.astype(dtype), "uint4", axis=0, **options).scale.shape == (6, 5)
    assert quantize(w, range="mse").scale.shape == ()
    assert quantize(np.float32(3), range="mse").dequantize() == pytest.approx(3)
    for shape in ((0, 3), (3, 0)):
        t = quantize(np.zeros(shape, np.float32), axis=0, range="mse")
        assert t.scale.tolist() == [1.0] * shape[0]
    assert quantize(np.zeros((3, 0)), axis=0, group_size=4, range="mse").scale.shape == (3, 0)


def test_memory_is_a_few_blocks() -> None:
    x = normal(1 << 14, 128)
    fmt = int_format("uint4")
    scale, zero_point = affine_parameters(x.min(axis=1), x.max(axis=1), fmt, False)
    tracemalloc.start()
    least_squares(x, scale, zero_point, fmt, False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < x.nbytes / 4


def test_arguments_stay_as_they_are() -> None:
    x, fmt = normal(20, 33), int_format("int4")
    scale, zero_point = affine_parameters(x.min(axis=1), x.max(axis=1), fmt, False)
    before = scale.copy(), zero_point.copy(), x.copy()
    found = least_squares(x, scale, zero_point, fmt, False)
    assert (found[0] != scale).any()
    for array, kept in zip((scale, zero_point, x), before, strict=True):
        np.testing.assert_array_equal(array, kept)


def test_bad_input() -> None:
    w = normal(4, 8)
    with pytest.raises(ValueError, match="unknown range 'median'; pass 'minmax' or 'mse'"):
        quantize(w, range="median")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="range must be 'minmax' or 'mse', got None"):
        quantize(w, range=None)  # type: ignore[arg-type]
    w[2, 5] = np.nan
    with pytest.raises(ValueError, match=r"found nan at index \(2, 5\)"):
        quantize(w, "uint4", axis=0, group_size=4, range="mse")
