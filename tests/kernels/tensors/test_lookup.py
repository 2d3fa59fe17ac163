"""Tables of 256 bytes, read in every way."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.kernels.tensors.data import SIZES

from lowbit.isa import TABLE
from lowbit.kernels.cpu.tensors.elementwise import lookup

RunAll = Callable[..., dict[str, np.ndarray]]
VBMI = TABLE.get("avx512_vbmi")


@pytest.mark.parametrize("size", [*SIZES, 100_003])
def test_sizes(run_all: RunAll, size: int) -> None:
    rng = np.random.default_rng(size)
    table, x = rng.permutation(256).astype(np.uint8), rng.integers(0, 256, size).astype(np.uint8)
    arguments = {"out": np.zeros(size, np.uint8), "x": x, "table": table, "count": size}
    got = run_all(lookup, arguments, interpret=size < 1500)["out"]
    np.testing.assert_array_equal(got, table[x])


@pytest.mark.parametrize("size", [*SIZES, 100_003])
def test_permutations_of_whole_registers(size: int) -> None:
    rng = np.random.default_rng(size)
    table, x = rng.permutation(256).astype(np.uint8), rng.integers(0, 256, size).astype(np.uint8)
    if size < 1500:
        out = np.zeros(size, np.uint8)
        lookup.interpret(VBMI, {"out": out, "x": x, "table": table, "count": size})
        np.testing.assert_array_equal(out, table[x])
    if not VBMI.missing():
        for threads in (1, 3):
            in_place = x.copy()
            lookup.program(VBMI)(threads, in_place, in_place, table, size)
            np.testing.assert_array_equal(in_place, table[x])
