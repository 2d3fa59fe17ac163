"""Tables of 256 bytes: read in every way, and made as `elementwise` computes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.kernels.tensors.data import AFFINE, DTYPES, SIZES, real, stored

from lowbit.isa import SETS, TABLE, active, available, get
from lowbit.isa.instruction_set import InstructionSet
from lowbit.kernels.cpu.tensors.elementwise import (
    byte_table,
    elementwise,
    lookup,
    lookup_pays,
    lookup_set,
    parameters_array,
    plan_elementwise,
)

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize("formats", [("u8", "u8"), ("s8", "u8"), ("u8", "s8"), ("s8", "s8")])
def test_a_table_is_what_elementwise_computes(formats: tuple[str, str], isa: str) -> None:
    (name, out), chosen = formats, get(isa)
    affine = AFFINE[name], AFFINE[out]
    x = np.arange(256).astype(np.uint8).view(DTYPES[name])
    for expression, numbers in (((0, "silu"), ()), ((0, "clamp", "number", "add"), (-1, 2, 0.3))):
        table = byte_table(chosen, formats, affine, expression, numbers)
        got = np.zeros(256, np.uint8)
        lookup.program(lookup_set(chosen))(1, got, x, table, 256)
        plan = plan_elementwise([name], out, expression, (256,), [(1,), (1,)])
        expected = np.zeros(256, DTYPES[out])
        parameters = parameters_array(affine[:1], numbers, affine[1])
        elementwise.program(chosen, form=plan.form)(
            1, expected, x, None, None, parameters, plan.geometry, plan.items
        )
        np.testing.assert_array_equal(got.view(DTYPES[out]), expected)
    bounded = np.clip(real(x, affine[0]), np.float32(-1), np.float32(2)) + np.float32(0.3)
    np.testing.assert_array_equal(got.view(DTYPES[out]), stored(bounded, out, affine[1]))


def test_where_it_pays() -> None:
    assert lookup_pays(SETS["generic"], (0, "silu"))
    assert not lookup_pays(SETS["generic"], (0, "relu"))
    best: InstructionSet = active(available()[0])
    assert lookup_pays(best, (0,)) == (lookup_set(best) is VBMI)
