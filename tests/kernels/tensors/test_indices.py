"""Order, elements written by indices, running sums and grouped products, against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.kernels.tensors.data import DTYPES, data, poisoned

from lowbit.kernels.cpu.tensors.grouped import grouped_product
from lowbit.kernels.cpu.tensors.indexing import BLOCK, ScatterForm, scatter
from lowbit.kernels.cpu.tensors.reductions import running_sums
from lowbit.kernels.cpu.tensors.sorting import ARRAYS, sort

RunAll = Callable[..., dict[str, np.ndarray]]
WHOLE = ("int16", "int32", "uint32", "int64", "uint64")
WIDE = {**DTYPES, **{name: np.dtype(name) for name in WHOLE}}


def numbers(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name in DTYPES:
        return data(rng, name, shape)
    limits = np.iinfo(name)
    return rng.integers(limits.min, limits.max, shape, WIDE[name], endpoint=True)


@pytest.mark.pairs
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(("count", "kept"), [(1, 1), (2, 1), (7, 7), (33, 5), (64, 64), (65, 2)])
@pytest.mark.parametrize("name", ["f32", "bf16", "u8", "s8", *WHOLE])
def test_order(run_all: RunAll, name: str, count: int, kept: int, descending: bool) -> None:
    x = numbers(np.random.default_rng(count), name, (6, count))
    x[3:] = x[3:, :1]  # equal numbers
    if name in ("f32", "bf16"):
        x[4, ::2] *= -1
        x[5] = np.where(np.arange(count) % 2, -0.0, 0.0)
    arguments = {
        "places": np.full((6, kept), -1, np.int64), "x": x,
        "scratch": np.zeros(3 * ARRAYS * count, np.int64), "rows": 6, "count": count, "kept": kept,
        "levels": (count - 1).bit_length(),
    }  # fmt: skip
    got = run_all(sort, arguments, apart=("scratch",), format=name, descending=descending)
    keys = x.astype(np.float32) if name == "bf16" else x
    wanted = np.argsort(keys, axis=1, kind="stable")
    if descending:
        wanted = count - 1 - np.argsort(keys[:, ::-1], axis=1, kind="stable")[:, ::-1]
    np.testing.assert_array_equal(got["places"], wanted[:, :kept])


_WRITE = {"add": np.add.at, "mul": np.multiply.at, "max": np.maximum.at, "min": np.minimum.at}


@pytest.mark.parametrize("inner", [1, 17, 70])
@pytest.mark.parametrize("reduction", ["none", *_WRITE])
@pytest.mark.parametrize("name", ["f32", "int16", "int32", "int64"])
def test_written_rows(run_all: RunAll, name: str, reduction: str, inner: int) -> None:
    rng = np.random.default_rng(inner)
    out = rng.integers(-9, 9, (1, 12, inner)).astype(WIDE[name])
    updates = rng.integers(-9, 9, (1, 9, inner)).astype(WIDE[name])
    indices = np.stack([rng.integers(-3, 3, 9), rng.integers(-4, 4, 9)], -1)
    wanted, places = out.copy(), tuple((indices % (3, 4)).T)
    if reduction == "none":
        wanted.reshape(3, 4, inner)[places] = updates[0]
    else:
        _WRITE[reduction](wanted.reshape(3, 4, inner), places, updates[0])
    raw = f"raw{out.itemsize}" if reduction == "none" else name
    got = run_all(scatter, _scattered(out, updates, indices, (3, 4)),
                  form=ScatterForm(raw, "s64", reduction))  # fmt: skip
    np.testing.assert_array_equal(got["out"], wanted)
    assert got["outside"][0] == 0


def _scattered(
    out: np.ndarray, updates: np.ndarray, indices: np.ndarray, sizes: tuple[int, ...], **more: Any
) -> dict[str, Any]:
    outer, rows, inner = out.shape
    return {
        "out": out, "updates": updates, "indices": indices, "sizes": np.array(sizes, np.int64),
        "outside": np.zeros(1, np.int32), "outer": outer, "rows": rows,
        "count": updates.shape[1], "inner": inner, "depth": len(sizes), "index_stride": 0, **more,
    }  # fmt: skip


def test_written_lines_and_long_rows(run_all: RunAll) -> None:
    rng = np.random.default_rng(2)
    out, updates = data(rng, "u8", (3, 5, 1)), data(rng, "u8", (3, 4, 1))
    indices = rng.integers(-5, 5, (3, 4)).astype(np.int32)
    wanted = out.copy()
    for line, own in enumerate(indices):
        wanted[line, own] = updates[line]
    form = ScatterForm("raw1", "s32", "none")
    got = run_all(scatter, _scattered(out, updates, indices, (5,), index_stride=4), form=form)
    np.testing.assert_array_equal(got["out"], wanted)
    out, updates = data(rng, "u8", (1, 2, BLOCK + 77)), data(rng, "u8", (1, 1, BLOCK + 77))
    got = run_all(scatter, _scattered(out, updates, np.array([[-1]], np.int32), (2,)),
                  interpret=False, form=form)  # fmt: skip
    np.testing.assert_array_equal(got["out"][0], [out[0, 0], updates[0, 0]])


@pytest.mark.parametrize("bad", [5, -6, 2**62, -(2**63)])
def test_what_is_out_of_range_is_not_written(run_all: RunAll, bad: int) -> None:
    out, updates = poisoned("u8", (1, 5, 8)), data(np.random.default_rng(3), "u8", (1, 2, 8))
    indices = np.array([[4], [bad]])
    got = run_all(scatter, _scattered(out, updates, indices, (5,)),
                  form=ScatterForm("raw1", "s64", "none"))  # fmt: skip
    assert got["outside"][0] == 1
    np.testing.assert_array_equal(got["out"][0, 4], updates[0, 0])
    assert (got["out"][0, :4] == 77).all()


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", ["f32", "int16", "int32", "int64"])
def test_running_sums(run_all: RunAll, name: str, exclusive: bool, reverse: bool) -> None:
    rng = np.random.default_rng(4)
    x = rng.integers(-(2**30), 2**30, (3, 19)).astype(WIDE[name])
    if name == "f32":
        x = rng.normal(size=(3, 19)).astype(np.float32)
    arguments = {"out": np.zeros_like(x), "x": x, "rows": 3, "count": 19}
    got = run_all(running_sums, arguments, format=name, exclusive=exclusive, reverse=reverse)["out"]
    turned = x[:, ::-1] if reverse else x
    kind = np.float64 if name == "f32" else WIDE[name]
    wanted = turned.astype(kind).cumsum(1, dtype=kind)
    wanted = wanted - turned if exclusive else wanted
    wanted = wanted[:, ::-1] if reverse else wanted
    if name == "f32":
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-7 * np.abs(wanted).max())
    else:
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(("groups", "depth", "n", "ends"), [
    (3, 5, 7, [2, 2, 10]), (4, 9, 70, [0, 5, 11, 12]), (1, 1, 1, [1]), (2, 8, 33, [0, 0]),
])  # fmt: skip
@pytest.mark.parametrize("indices", ["s32", "s64"])
def test_grouped_products(
    run_all: RunAll, indices: str, groups: int, depth: int, n: int, ends: list[int]
) -> None:
    rng = np.random.default_rng(5)
    rows = max(ends) + 1
    x, weight = rng.integers(-4, 5, (rows, depth)), rng.integers(-4, 5, (groups, depth, n))
    arguments = {
        "out": np.full((rows, n), np.nan, np.float32), "x": x.astype(np.float32),
        "weight": weight.astype(np.float32), "ends": np.array(ends, indices.replace("s", "int")),
        "rows": rows,
        "groups": groups, "k_size": depth, "n": n,
    }  # fmt: skip
    wanted, first = np.zeros((rows, n)), 0
    for matrix, end in zip(weight, ends, strict=True):
        wanted[first:end] = x[first:end] @ matrix
        first = end
    got = run_all(grouped_product, arguments, indices=indices, weight_kind="f32")["out"]
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_grouped_products_widen_weights(run_all: RunAll, kind: str) -> None:
    """Every number of 16 bits, in 1-element rows, is the float32 that it equals; NaN is NaN."""
    dtype = np.dtype(np.float16 if kind == "f16" else ml_dtypes.bfloat16)
    weight = np.arange(1 << 16, dtype=np.uint16).view(dtype)[::7].copy()
    n = len(weight)
    arguments = {
        "out": np.zeros((1, n), np.float32), "x": np.ones((1, 1), np.float32), "weight": weight,
        "ends": np.array([1]), "rows": 1, "groups": 1, "k_size": 1, "n": n,
    }  # fmt: skip
    static = {"indices": "s64", "weight_kind": kind}
    got = run_all(grouped_product, arguments, interpret=False, **static)["out"][0]
    with np.errstate(invalid="ignore"):
        wanted = weight.astype(np.float32) + np.float32(0)  # as it is added to a sum of 0
    np.testing.assert_array_equal(got, wanted)
    short = arguments | {"weight": weight[:40], "out": np.zeros((1, 40), np.float32), "n": 40}
    np.testing.assert_array_equal(run_all(grouped_product, short, **static)["out"][0], wanted[:40])
