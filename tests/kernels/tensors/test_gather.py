"""Rows by their numbers, and the places of maxima, against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.kernels.tensors.data import AFFINE, DTYPES, assert_same, data, poisoned, real, stored

from lowbit.kernels.cpu.tensors.indexing import GatherForm, flat_indices, gather, gather_block
from lowbit.kernels.cpu.tensors.sorting import argmax, argmax_block

RunAll = Callable[..., dict[str, np.ndarray]]


def _arguments(
    table: np.ndarray, indices: np.ndarray, out: np.ndarray, **others: Any
) -> dict[str, Any]:
    outer, rows, inner = table.shape
    return {
        "out": out, "table": table, "indices": indices,
        "table_parameters": None, "parameter_stride": 0, "out_parameters": None,
        "outside": np.zeros(1, np.int32), "outer": outer, "rows": rows, "count": len(indices),
        "inner": inner, "index_stride": 0, "block": min(3, gather_block(inner)), **others,
    }  # fmt: skip


@pytest.mark.parametrize("indices", ["s32", "s64"])
@pytest.mark.parametrize("inner", [1, 15, 16, 17, 63, 65, 1000])
@pytest.mark.parametrize("dtype", ["u1", "u2", "f4", "i8"])
def test_rows_as_they_are(run_all: RunAll, dtype: str, inner: int, indices: str) -> None:
    rng = np.random.default_rng(inner)
    size = np.dtype(dtype).itemsize
    table = rng.integers(0, 256, (1, 9, inner * size)).astype(np.uint8).view(dtype)
    wanted = rng.integers(-9, 9, 20).astype(DTYPES["s32"] if indices == "s32" else np.int64)
    out = np.zeros((1, 20, inner), dtype)
    form = GatherForm(f"raw{size}", f"raw{size}", indices)
    got = run_all(gather, _arguments(table, wanted, out), interpret=inner < 100, form=form)
    assert got["out"].tobytes() == table[:, wanted].tobytes()
    assert got["outside"][0] == 0


def test_an_axis_in_the_middle(run_all: RunAll) -> None:
    table = data(np.random.default_rng(1), "u8", (3, 7, 20))
    wanted = np.array([6, 0, -1, 3], np.int64)
    arguments = _arguments(table, wanted, np.zeros((3, 4, 20), np.uint8))
    got = run_all(gather, arguments, form=GatherForm("raw1", "raw1"))["out"]
    np.testing.assert_array_equal(got, table[:, wanted])


@pytest.mark.deep
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_indices_of_several_axes(run_all: RunAll, dtype: str) -> None:
    sizes = np.array([3, 4, 5], np.int64)
    indices = np.random.default_rng(5).integers(-sizes, sizes, (5000, 3)).astype(dtype)
    expected = np.asarray(np.ravel_multi_index(tuple((indices % sizes).T), (3, 4, 5)))
    for row, axis, wrong in ((2, 0, 3), (7, 1, -5), (4999, 2, 5)):
        indices[row, axis], expected[row] = wrong, 60
    got = run_all(flat_indices, {
        "flat": np.zeros(5000, np.int64), "indices": indices, "sizes": sizes, "count": 5000,
    }, axes=3, format="s32" if dtype == "int32" else "s64")["flat"]  # fmt: skip
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("inner", [1, 20])
def test_indices_of_each_layer(run_all: RunAll, inner: int) -> None:
    rng = np.random.default_rng(4)
    table, wanted = data(rng, "u8", (3, 7, inner)), rng.integers(-7, 7, (3, 5))
    arguments = _arguments(table, wanted, np.zeros((3, 5, inner), np.uint8))
    arguments |= {"count": 5, "index_stride": 5}
    got = run_all(gather, arguments, form=GatherForm("raw1", "raw1"))["out"]
    np.testing.assert_array_equal(got, [one[own] for one, own in zip(table, wanted, strict=True)])


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("formats", ["u8 f32", "s8 bf16", "bf16 f32", "f32 u8", "s8 u8"])
def test_rows_of_another_format(run_all: RunAll, formats: str, own: bool) -> None:
    """`own`: every row of the table has its scale and zero point."""
    name, out = formats.split()
    rng = np.random.default_rng(2)
    table, wanted = data(rng, name, (1, 11, 37)), rng.integers(0, 11, 25)
    affine = [AFFINE[name]] * 11 if name in AFFINE else []
    if own:
        affine = [(scale * (1 + r), zero + r) for r, (scale, zero) in enumerate(affine)]
    inverse = [float(np.float32(1) / np.float32(AFFINE[out][0])), AFFINE[out][1]] \
        if out in AFFINE else []  # fmt: skip
    arguments = _arguments(
        table, wanted, poisoned(out, (1, 25, 37)),
        table_parameters=np.array(affine, np.float32), parameter_stride=2 * own,
        out_parameters=np.array(inverse, np.float32),
    )  # fmt: skip
    got = run_all(gather, arguments, form=GatherForm(name, out))["out"]
    with np.errstate(all="ignore"):
        numbers = np.stack([
            real(table[0, r], affine[r] if affine else None) for r in wanted
        ])  # fmt: skip
        assert_same(got[0], stored(numbers, out, AFFINE.get(out)))


@pytest.mark.parametrize("bad", [5, -6, 2**40, -(2**63), 2**63 - 1])
def test_what_is_out_of_range(run_all: RunAll, bad: int) -> None:
    table = data(np.random.default_rng(3), "u8", (1, 5, 8))
    wanted = np.array([4, bad, -5], np.int64)
    got = run_all(gather, _arguments(table, wanted, poisoned("u8", (1, 3, 8))),
                  form=GatherForm("raw1", "raw1"))  # fmt: skip
    assert got["outside"][0] == 1
    np.testing.assert_array_equal(got["out"][0, [0, 2]], table[0, [4, 0]])
    assert (got["out"][0, 1] == 77).all()


@pytest.mark.parametrize("count", [1, 15, 16, 17, 63, 65, 1000])
@pytest.mark.parametrize("name", ["f32", "bf16", "u8", "s8", "s32"])
def test_places_of_maxima(run_all: RunAll, name: str, count: int) -> None:
    rng = np.random.default_rng(count)
    x = data(rng, name, (40, count))
    if name in ("f32", "bf16"):
        x[10:20] = np.where(np.isnan(x[10:20].astype(np.float32)), 1, x[10:20])
        x[20:25] = np.where(x[20:25].astype(np.float32) > 0, 0.0, -0.0)
        x[25:30] = -np.inf
    x[30:35] = x[30, 0]
    arguments = {"places": np.full(40, -1, np.int64), "x": x, "rows": 40, "count": count}
    got = run_all(argmax, {**arguments, "block": min(7, argmax_block(count))},
                  interpret=count < 100, format=name)["places"]  # fmt: skip
    order = x.astype(np.float32) if name == "bf16" else x
    np.testing.assert_array_equal(got, order.argmax(axis=1))
