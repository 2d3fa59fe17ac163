"""Groups along any axis: 4-bit weights [K, N] with scales [G, N]."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lowbit.numerics import quantize

TINY = np.finfo(np.float32).smallest_normal
KINDS = [("uint4", False), ("uint4", True), ("int4", True), ("int4", False)]


def weight(rows: int, columns: int) -> npt.NDArray[np.float32]:
    x = np.random.default_rng(rows).normal(size=(rows, columns))
    return (x * 10.0 ** np.arange(-3, columns - 3)).astype(np.float32)


@pytest.mark.parametrize(("name", "symmetric"), KINDS)
@pytest.mark.parametrize("group_size", [8, 24, 32, 64, 120, 128, 256, 1000])
def test_a_group_is_quantized_as_if_alone(name: Any, symmetric: bool, group_size: int) -> None:
    w = weight(256, 3)
    t = quantize(w, name, axis=1, group_size=group_size, group_axis=0, symmetric=symmetric)
    groups = -(-256 // group_size)
    assert t.scale.shape == t.zero_point.shape == (groups, 3)
    back = t.dequantize()
    for g in range(groups):
        rows = slice(g * group_size, min((g + 1) * group_size, 256))
        alone = quantize(w[rows], name, axis=1, symmetric=symmetric)
        np.testing.assert_array_equal(t.values[rows], alone.values)
        np.testing.assert_array_equal(t.scale[g], alone.scale)
        np.testing.assert_array_equal(t.zero_point[g], alone.zero_point)
        np.testing.assert_array_equal(back[rows], alone.dequantize())


@given(
    x=hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=7),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    ),
    kind=st.sampled_from(KINDS),
    group_size=st.sampled_from([1, 2, 3, 100]),
    data=st.data(),
)
@settings(deadline=None)
def test_groups_along_an_axis_are_groups_of_the_last_axis_of_a_transposed_view(
    x: npt.NDArray[np.float32], kind: tuple[Any, bool], group_size: int, data: Any
) -> None:
    group_axis = data.draw(st.integers(0, x.ndim - 1))
    others = [i for i in range(x.ndim) if i != group_axis]
    axis = tuple(data.draw(st.lists(st.sampled_from(others), unique=True)) if others else [])
    order = [*others, group_axis]
    options: dict[str, Any] = {"group_size": group_size, "symmetric": kind[1]}
    t = quantize(x, kind[0], axis=axis, group_axis=group_axis - x.ndim, **options)
    assert t.group_axis == group_axis
    moved = tuple(order.index(i) for i in axis)
    expected = quantize(x.transpose(order), kind[0], axis=moved, **options)
    np.testing.assert_array_equal(t.values.transpose(order), expected.values)
    np.testing.assert_array_equal(t.dequantize().transpose(order), expected.dequantize())
    position = sorted([*axis, group_axis]).index(group_axis)
    np.testing.assert_array_equal(np.moveaxis(t.scale, position, -1), expected.scale)
    np.testing.assert_array_equal(np.moveaxis(t.zero_point, position, -1), expected.zero_point)


@pytest.mark.parametrize(("name", "symmetric"), KINDS)
def test_degenerate_groups(name: Any, symmetric: bool) -> None:
    w = np.zeros((40, 2), np.float32)
    w[8:16] = -2.5
    w[16:24] = 1e-42
    w[24:32] = [[1e-45, -1e-45]]
    w[32:] = np.finfo(np.float32).max
    t = quantize(w, name, axis=1, group_size=8, group_axis=0, symmetric=symmetric)
    assert t.scale[0].tolist() == [1.0, 1.0]
    np.testing.assert_array_equal(t.values[:8], np.broadcast_to(t.zero_point[0], (8, 2)))
    assert t.scale[2:4].tolist() == [[TINY, TINY], [TINY, TINY]]
    back = t.dequantize().astype(np.float64)
    assert (back[:8] == 0).all()
    np.testing.assert_allclose(back[8:16], -2.5, rtol=2.0**-22)
    assert (np.abs(back[16:32] - w[16:32]) <= TINY / 2).all()
    np.testing.assert_allclose(back[32:], w[32:].astype(np.float64), rtol=2.0**-22)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_non_finite_value_is_named(bad: float) -> None:
    w = weight(64, 4)
    w[40, 0] = np.nan
    w[33, 2] = bad
    with pytest.raises(ValueError, match=rf"found {bad} at index \(33, 2\)"):
        quantize(w, "uint4", axis=1, group_size=32, group_axis=0, symmetric=False)


def test_a_huge_group_size_costs_no_memory() -> None:
    t = quantize(weight(8, 2), "int4", axis=1, group_size=2**40, group_axis=0)
    assert t.scale.shape == (1, 2)
    assert t.dequantize().shape == (8, 2)


def test_the_axis_of_groups_is_the_last_one_by_default() -> None:
    t = quantize(weight(4, 6), "int4", axis=0, group_size=2)
    assert t.group_axis == 1
    assert dataclasses.replace(t, group_axis=None).group_axis == 1
    assert quantize(weight(4, 6), "int4", axis=0).group_axis is None
    assert "group_axis" not in repr(t)
    assert "group_size=2, group_axis=0" in repr(
        quantize(weight(4, 6), axis=1, group_size=2, group_axis=0)
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"group_axis": 0}, ValueError, "group_axis=0 needs a group_size"),
        ({"group_size": 2, "group_axis": 2}, ValueError, "group_axis 2 does not exist"),
        ({"group_size": 2, "group_axis": -3}, ValueError, "group_axis -3 does not exist"),
        ({"group_size": 2, "group_axis": 0.0}, TypeError, r"group_axis to be .*, got 0\.0"),
        ({"group_size": 2, "group_axis": True}, TypeError, "group_axis to be .*, got True"),
        ({"group_size": 2, "group_axis": (0,)}, TypeError, r"group_axis to be .*, got \(0,\)"),
        ({"group_size": 2, "group_axis": 0, "axis": 0}, ValueError, "cuts axis 0, which has"),
        ({"group_size": -1}, ValueError, "at least 1, got -1; leave it out"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quantize(weight(4, 6), **options)


def test_parts_that_do_not_fit_are_refused() -> None:
    good = quantize(weight(4, 6), "uint4", axis=1, group_size=2, group_axis=0)
    bad_values = good.values.copy()
    bad_values[2, 1] = 16
    for change, message in (
        ({"group_axis": -2}, "expected a non-negative axis, got group_axis=-2"),
        ({"group_axis": None}, "cuts axis 1, which has a scale per index already"),
        ({"scale": good.scale.T.copy()}, r"scale of shape \(2, 6\), got \(6, 2\)"),
        ({"group_size": 3, "scale": good.scale[:1]}, r"scale of shape \(2, 6\), got \(1, 6\)"),
        ({"values": bad_values}, r"values within uint4, 0 to 15, found 16 at index \(2, 1\)"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(good, **change)
