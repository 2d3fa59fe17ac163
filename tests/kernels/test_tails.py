"""Vectors of which only the first lanes are stored: all counts, on every set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lowbit.isa import SETS, available
from lowbit.isa.types import F32Pointer, Int, U8Pointer
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.shared.epilogue import store_left


@kernel
def store_floats(k: Builder, x: F32Pointer, out: F32Pointer, left: Int, *, lanes: int) -> None:
    """The first `left` of some lanes."""
    store_left(k, x.load(lanes), out, left)


@kernel
def store_bytes(k: Builder, x: U8Pointer, out: U8Pointer, left: Int, *, lanes: int) -> None:
    """The same for bytes."""
    store_left(k, x.load(lanes), out, left)


@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize(("text", "dtype"), [(store_floats, np.float32), (store_bytes, np.uint8)])
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_so_many_lanes_are_stored(isa: str, text: Any, dtype: type, lanes: int) -> None:
    x = np.arange(1, lanes + 1).astype(dtype)
    for left in range(-2, lanes + 3):
        count = min(max(left, 0), lanes)
        expected = np.r_[x[:count], np.full(lanes + 1 - count, 99, dtype)]
        compiled, interpreted = (np.full(lanes + 1, 99, dtype) for _ in range(2))
        text.program(SETS[isa], lanes=lanes)(1, x, compiled, left)
        # Memory behind what is stored need not exist.
        text.interpret(SETS[isa], {"x": x, "out": interpreted[:count], "left": left}, lanes=lanes)
        np.testing.assert_array_equal(compiled, expected)
        np.testing.assert_array_equal(interpreted, expected)
