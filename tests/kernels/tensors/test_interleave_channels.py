"""Planes of float32 as pixels of bytes: what a conversion with strides makes, to the bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.kernels.tensors.data import AFFINE, data, poisoned, stored

from lowbit.kernels.cpu.tensors.elementwise import parameters_array
from lowbit.kernels.cpu.tensors.loops import CHANNELS, interleave_channels

RunAll = Callable[..., dict[str, np.ndarray]]


@pytest.mark.parametrize("pixels", [0, 1, 15, 67, 4133])
@pytest.mark.parametrize("name", ["u8", "s8"])
@pytest.mark.parametrize("channels", CHANNELS)
def test_planes_become_pixels(run_all: RunAll, channels: int, name: str, pixels: int) -> None:
    x = data(np.random.default_rng(pixels), "f32", (2, channels, pixels))
    arguments = {
        "out": poisoned(name, (2, pixels, channels)), "x": x, "images": 2, "pixels": pixels,
        "parameters": parameters_array([], (), AFFINE[name]),
    }  # fmt: skip
    got = run_all(interleave_channels, arguments, interpret=pixels < 100, channels=channels,
                  format=name)["out"]  # fmt: skip
    with np.errstate(all="ignore"):
        expected = stored(np.moveaxis(x, 1, 2), name, AFFINE[name])
    np.testing.assert_array_equal(got, expected)
