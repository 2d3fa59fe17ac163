"""Quantized tensors: granularity, inputs of every kind, errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lowbit.numerics import (
    QTensor,
    affine_parameters,
    int_format,
    quantize,
    quantize_affine,
)

FORMATS = ["uint8", "int8", "uint4", "int4"]


def normal(*shape: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(11).normal(size=shape).astype(np.float32)


@pytest.mark.deep
@given(
    x=hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=3, min_side=0, max_side=7),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    ),
    name=st.sampled_from(FORMATS),
    axis=st.sampled_from([None, 0, -2, (0,), (0, -2)]),
    group_size=st.sampled_from([None, 1, 2, 3, 100]),
    symmetric=st.booleans(),
)
@settings(deadline=None, max_examples=200)
def test_round_trip_is_within_half_a_step_of_its_own_scale(
    x: npt.NDArray[np.float32], name: Any, axis: Any, group_size: int | None, symmetric: bool
) -> None:
    if axis == (0, -2) and x.ndim == 2:
        axis = (0,)
    t = quantize(x, name, axis=axis, group_size=group_size, symmetric=symmetric)
    assert t.shape == x.shape
    back = t.dequantize()
    assert back.dtype == np.float32
    for index in np.ndindex(x.shape):
        kept = t.axis if isinstance(t.axis, tuple) else () if t.axis is None else (t.axis,)
        group = () if group_size is None else (index[-1] // group_size,)
        scale = float(t.scale[(*(index[i] for i in kept), *group)])
        budget = scale * (0.5 + 2.0**-16) + abs(float(x[index])) * 2.0**-23
        assert abs(float(back[index]) - float(x[index])) <= budget


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_per_channel_is_per_tensor_on_each_channel(name: Any, symmetric: bool) -> None:
    x = normal(5, 4, 6)
    for axis in range(3):
        t = quantize(x, name, axis=axis, symmetric=symmetric)
        assert t.scale.shape == (x.shape[axis],)
        for i in range(x.shape[axis]):
            alone = quantize(x.take(i, axis), name, symmetric=symmetric)
            np.testing.assert_array_equal(t.values.take(i, axis), alone.values)
            assert (t.scale[i], t.zero_point[i]) == (alone.scale, alone.zero_point)


@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_are_cut_from_the_last_axis_and_the_last_may_be_short(symmetric: bool) -> None:
    x = normal(3, 10)
    t = quantize(x, "int4", axis=0, group_size=4, symmetric=symmetric)
    assert t.scale.shape == t.zero_point.shape == (3, 3)
    for row in range(3):
        for g, cut in enumerate((slice(0, 4), slice(4, 8), slice(8, 10))):
            alone = quantize(x[row, cut], "int4", symmetric=symmetric)
            np.testing.assert_array_equal(t.values[row, cut], alone.values)
            assert (t.scale[row, g], t.zero_point[row, g]) == (alone.scale, alone.zero_point)


def test_groups_without_an_axis_and_two_axes() -> None:
    x = normal(2, 3, 8)
    groups = quantize(x, group_size=4)
    np.testing.assert_array_equal(groups.scale, np.abs(x).reshape(6, 2, 4).max((0, 2)) / 127)
    pairs = quantize(x, axis=(1, 0))
    assert pairs.axis == (0, 1)
    np.testing.assert_array_equal(pairs.scale, np.abs(x).max(axis=2) / 127)


@pytest.mark.parametrize("name", FORMATS)
def test_quantizing_what_was_dequantized_changes_nothing(name: Any) -> None:
    for scale in (1e-45, 1e-38, 1e-3, 1.0, 1e30):
        t = quantize(normal(7, 31) * np.float32(scale), name, axis=0)
        again = quantize(t.dequantize(), name, axis=0)
        np.testing.assert_array_equal(again.values, t.values)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("constant", [0.0, -0.0, 3.0, -2.5, 1e-3, 1e38])
def test_constant_channels(name: Any, symmetric: bool, constant: float) -> None:
    x = normal(3, 5)
    x[1] = constant
    t = quantize(x, name, axis=0, symmetric=symmetric)
    np.testing.assert_allclose(t.dequantize()[1], x[1], rtol=2.0**-22)
    if constant == 0.0:
        assert t.scale[1] == 1.0


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 3), (3, 0), (1, 1, 1)])
def test_small_and_empty_shapes(shape: tuple[int, ...]) -> None:
    t = quantize(np.full(shape, -1.5, np.float32))
    assert (t.shape, t.scale.shape, t.values.dtype) == (shape, (), np.int8)
    np.testing.assert_array_equal(t.values, np.full(shape, -127))
    assert t.dequantize().shape == shape


def test_empty_channels_and_groups() -> None:
    assert quantize(np.zeros((3, 0), np.float32), axis=0).scale.tolist() == [1.0, 1.0, 1.0]
    t = quantize(np.zeros((3, 0), np.float32), axis=0, group_size=4)
    assert t.scale.shape == (3, 0)
    assert t.dequantize().shape == (3, 0)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4"])
def test_float_dtypes_with_the_same_values_give_the_same_integers(dtype: Any) -> None:
    x = normal(6, 9).astype(np.float16)
    np.testing.assert_array_equal(
        quantize(x.astype(dtype), axis=0).values, quantize(x.astype(np.float64), axis=0).values
    )


def test_bfloat16() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = normal(6, 9).astype(ml_dtypes.bfloat16)
    for options in ({}, {"axis": 0, "group_size": 4, "symmetric": False}):
        expected = quantize(x.astype(np.float32), **options)
        np.testing.assert_array_equal(quantize(x, **options).values, expected.values)
    x[2, 3] = np.nan
    with pytest.raises(ValueError, match=r"nan at index \(2, 3\)"):
        quantize(x)


def test_strides_do_not_matter() -> None:
    x = normal(12, 10)
    for view in (x.T, x[::-1, ::-3], x[:, 4:5], np.broadcast_to(x[:1], (4, 10))):
        t = quantize(view, axis=0, group_size=3)
        assert t.values.flags.c_contiguous
        np.testing.assert_array_equal(t.values, quantize(view.copy(), axis=0, group_size=3).values)


def test_torch_tensors_and_parameters() -> None:
    torch = pytest.importorskip("torch")
    x = normal(4, 5)
    for tensor in (torch.from_numpy(x), torch.nn.Parameter(torch.from_numpy(x))):
        np.testing.assert_array_equal(quantize(tensor, axis=0).values, quantize(x, axis=0).values)
    with pytest.raises(TypeError, match="BFloat16"):
        quantize(torch.zeros(3, dtype=torch.bfloat16))


def test_agrees_with_torch_per_channel() -> None:
    torch = pytest.importorskip("torch")
    x = normal(64, 100)
    t = quantize(x, axis=0)
    fake = torch.fake_quantize_per_channel_affine(
        torch.from_numpy(x), torch.from_numpy(t.scale), torch.from_numpy(t.zero_point), 0, -128, 127
    ).numpy()
    np.testing.assert_allclose(fake, t.dequantize(), atol=float(t.scale.max()) * 1.001)
    assert (np.abs(fake - t.dequantize()) > 1e-6).mean() < 0.001


def test_nbytes_and_repr() -> None:
    t = quantize(normal(8, 16), "uint4", axis=0, group_size=4, symmetric=False)
    assert t.nbytes == 8 * 16 + 2 * (8 * 4 * 4)
    assert repr(t).startswith("QTensor(uint4 [8, 16], axis=0, group_size=4, scales [8, 4] from ")
    assert repr(t).endswith(", 384 bytes)")
    expected = "QTensor(int8 [2], scale=0.015748, zero_point=0, 10 bytes)"
    assert repr(quantize(np.array([1.0, -2.0]))) == expected
    assert "scales [0]" in repr(quantize(np.zeros((0, 2)), axis=0))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(3, np.int8), "got int8"),
        (np.zeros(3, np.bool_), "got bool"),
        (np.zeros(3, np.complex64), "got complex64"),
        (np.zeros(3, np.longdouble), f"got {np.dtype(np.longdouble)}"),
        (np.array([1.0], object), "got object"),
        ([1, 2, 3], "got int64"),
        ([[1.0], [2.0, 3.0]], "cannot read list"),
    ],
)
def test_what_is_not_floating_point_is_refused(array: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        quantize(array)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "int3"}, ValueError, "unknown integer format 'int3'"),
        ({"axis": 2}, ValueError, "axis 2 does not exist in an array of 2"),
        ({"axis": -3}, ValueError, "axis -3 does not exist"),
        ({"axis": (0, -2)}, ValueError, "each axis once"),
        ({"axis": 1.0}, TypeError, r"tuple of ints, got 1\.0"),
        ({"axis": True}, TypeError, "tuple of ints, got True"),
        ({"group_size": 0}, ValueError, "at least 1, got 0"),
        ({"group_size": 2.0}, TypeError, r"int, got 2\.0"),
        ({"group_size": 2, "axis": 1}, ValueError, "scale per index already"),
        ({"group_size": 2, "axis": (0, -1)}, ValueError, "scale per index already"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quantize(normal(3, 4), **options)


def test_bad_values_and_scalars() -> None:
    x = normal(3, 4)
    x[1, 2] = np.inf
    with pytest.raises(ValueError, match=r"found inf at index \(1, 2\)"):
        quantize(x, axis=0, group_size=2)
    with pytest.raises(ValueError, match="within float32"):
        quantize(np.array([1e39]))
    with pytest.raises(ValueError, match="no axis"):
        quantize(np.array(1.0), group_size=2)


def test_parts_that_do_not_fit_are_refused() -> None:
    good = quantize(normal(3, 4), "int4", axis=0)
    for change, error, message in (
        ({"scale": good.scale[:2]}, ValueError, r"scale of shape \(3,\), got \(2,\)"),
        ({"scale": good.scale.astype(np.float64)}, TypeError, "scale of dtype float32"),
        ({"scale": good.scale * 0}, ValueError, "positive and finite"),
        ({"zero_point": good.zero_point + 8}, ValueError, "zero_point within int4"),
        ({"values": good.values.astype(np.uint8)}, TypeError, "values of dtype int8"),
        ({"values": good.values + np.int8(9)}, ValueError, "values within int4"),
        ({"axis": -2}, ValueError, "non-negative ascending axes"),
        ({"axis": None}, ValueError, r"scale of shape \(\)"),
        ({"group_size": 4}, ValueError, r"scale of shape \(3, 1\)"),
    ):
        with pytest.raises(error, match=message):
            dataclasses.replace(good, **change)


def test_a_tensor_can_be_put_together_by_hand() -> None:
    x = normal(3, 4)
    fmt = int_format("uint8")
    scale, zero_point = affine_parameters(x.min(), x.max(), fmt, symmetric=False)
    t = QTensor(quantize_affine(x, scale, zero_point, fmt), scale, zero_point, fmt)
    np.testing.assert_array_equal(t.dequantize(), quantize(x, fmt, symmetric=False).dequantize())
