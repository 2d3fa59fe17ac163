"""What users may give to convolutions, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lowbit


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"x": np.zeros((1, 5, 5, 3), np.uint8)}, ValueError, "4 channels.* got"),
        ({"x": np.zeros((1, 5, 4), np.uint8)}, ValueError, "2 sizes"),
        ({"x": np.zeros((1, 5, 5, 4), np.float32)}, TypeError, "int8 or uint8"),
        ({"stride": 0}, ValueError, "stride must be 2 integers of at least 1"),
        ({"stride": (1, 1, 1)}, ValueError, "stride must be 2 integers"),
        ({"padding": -1}, ValueError, "padding must be 2 integers of at least 0"),
        ({"dilation": 1.5}, TypeError, "dilation must be an integer"),
        ({"padding": 1.0}, TypeError, "padding must be an integer"),
        ({"padding": 1 << 40}, ValueError, "2³¹ pixels are the limit"),
        ({"weight": np.ones((5, 4, 3, 3), np.int8)}, TypeError, "lowbit.pack_convolution"),
        ({"padding_mode": "mirror"}, ValueError, "padding_mode must be one of constant"),
        ({"padding": 5, "padding_mode": "reflect"}, ValueError, "adds 4 at most"),
        ({"output_padding": 1}, ValueError, "belongs to transposed"),
        ({"zero_point": 300}, ValueError, "zero_point must lie between 0 and 255"),
        ({"bias": np.zeros(5, np.float32)}, ValueError, "need the scale of x"),
        ({"scale": 0.5}, ValueError, "weight has no scale"),
    ],
)
def test_bad_arguments(more: dict[str, Any], error: type[Exception], message: str) -> None:
    packed = lowbit.pack_convolution(np.ones((5, 4, 3, 3), np.int8))
    call: dict[str, Any] = {"x": np.zeros((1, 5, 5, 4), np.uint8), "weight": packed}
    lowbit.convolution(**call, padding=1)  # after which 1.0 is refused no less
    call |= more
    with pytest.raises(error, match=message):
        lowbit.convolution(**call)


def test_bad_weights() -> None:
    with pytest.raises(TypeError, match="must be int8, got uint8"):
        lowbit.pack_convolution(np.zeros((4, 4, 3), np.uint8))
    with pytest.raises(ValueError, match="groups must divide"):
        lowbit.pack_convolution(np.zeros((4, 4, 3), np.int8), groups=3)
    with pytest.raises(TypeError, match="must be int8, got int4"):
        lowbit.pack_convolution(lowbit.quantize(np.ones((4, 4, 3), np.float32), "int4", axis=0))
    assert lowbit.pack_convolution(np.zeros((4, 4, 3), np.int8), groups=np.int64(2)).groups == 2  # type: ignore[arg-type]
    weight = lowbit.quantize(np.random.default_rng(0).standard_normal((4, 4, 3)), axis=1)
    with pytest.raises(ValueError, match="axis=0"):
        lowbit.pack_convolution(weight)
    with pytest.raises(ValueError, match="symmetric"):
        lowbit.pack_convolution(lowbit.quantize(np.arange(16.0).reshape(2, 2, 4), symmetric=False))


def test_a_scale_means_the_same_whatever_holds_it() -> None:
    rng = np.random.default_rng(4)
    x = rng.integers(0, 256, (1, 9, 9, 16), dtype=np.uint8)
    kernels = rng.standard_normal((40, 16, 3, 3)).astype(np.float32)
    weight = lowbit.pack_convolution(lowbit.quantize(kernels, axis=0))
    scales: list[Any] = [2.0, 2, np.float32(2), np.array(2.0)]
    expected, *others = (
        lowbit.convolution(x, weight, scale=scale, out_dtype="uint8", out_scale=9.7)
        for scale in scales
    )
    for other in others:
        np.testing.assert_array_equal(other, expected)


def test_numbers_in_arrays_and_tensors_are_read_anew() -> None:
    x, weight = np.full((1, 4, 4, 16), 9, np.uint8), np.ones((4, 16, 3, 3), np.int8)
    packed = lowbit.pack_convolution(lowbit.quantize(weight.astype(np.float32), axis=0))
    torch = pytest.importorskip("torch")
    numbers: list[Any] = [np.array(100.0), torch.tensor(100.0)]
    where: dict[str, Any] = {"padding": np.array([1, 0]), "zero_point": np.array([1])}
    for number in numbers:
        results = []
        for value in 100.0, 200.0:
            number[...] = value
            made = [
                lowbit.convolution(x, packed, scale=1.0, out_dtype="uint8", out_scale=one, **where)
                for one in (number, value)
            ]
            np.testing.assert_array_equal(made[0], made[1])
            results.append(made[0])
        assert (results[0] > results[1]).any()
