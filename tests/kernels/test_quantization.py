"""The kernel that quantizes groups, against numerics.quantize: the same numbers, to the bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lowbit
from lowbit import numerics
from lowbit.isa import SETS, available, named
from lowbit.kernels.cpu.quantization.groups import quantize_groups, scratch_floats
from lowbit.kernels.cpu.quantization.search import leaves
from lowbit.numerics import IntDtype, int_format
from lowbit.weights.quantize import quantize_into

KINDS: list[tuple[IntDtype, bool]] = [
    ("int4", True),
    ("uint4", False),
    ("uint8", True),
    ("uint8", False),
]
LARGEST = np.finfo(np.float32).max


def _data(seed: int, groups: int, size: int) -> np.ndarray:
    """Normal data, long tails, and groups that leave a search little choice."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((groups, size))
    x[::3] = x[::3] ** 3 + 0.3
    odd = (0.0, -2.5, 1e-42, LARGEST, np.linspace(-1, 1, size) * LARGEST,
           np.where(np.arange(size) == 1, 3.0, 0.0), np.resize([1e-45, -1e-45], size),
           np.rint(7 * x[0] / np.abs(x[0]).max()) * 0.25)  # fmt: skip
    for row, given in zip(range(1, groups, 2), odd, strict=False):
        x[row] = given
    return x.astype(np.float32)


def _equal(one: numerics.QTensor, other: numerics.QTensor) -> None:
    for name in ("values", "scale", "zero_point"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert getattr(one, name).dtype == getattr(other, name).dtype
    assert (one.axis, one.group_size, one.group_axis) == (
        other.axis, other.group_size, other.group_axis,
    )  # fmt: skip


def _arrays(x: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    values = np.empty_like(x, int_format(dtype).storage)
    return values, np.empty(len(x), np.float32), np.empty(len(x), np.int32)


@pytest.mark.parametrize("isa", sorted({s.vector_bytes: name for name, s in SETS.items()}.values()))
@pytest.mark.parametrize(("dtype", "symmetric"), KINDS[:2])
@pytest.mark.parametrize("along", ["elements", "groups"])
def test_interpreted(isa: str, dtype: IntDtype, symmetric: bool, along: str) -> None:
    x = _data(1, 5, 22)
    if along == "groups":
        x = np.asfortranarray(x)
    values, scale, zero = _arrays(x, dtype)
    plan, bad = np.array(leaves(22), np.int64), np.zeros(1, np.int32)
    row, step = (stride // 4 for stride in x.strides)
    arguments = {
        "x": x, "group_stride": row, "stride": step, "groups": 5, "size": 22, "scale": scale,
        "zero": zero, "values": values.view(np.uint8), "plan": plan, "plan_count": len(plan),
        "scratch": np.empty(scratch_floats(22), np.float32), "thread_floats": 0, "bad": bad,
    }  # fmt: skip
    how: dict[str, Any] = {"fmt": int_format(dtype), "symmetric": symmetric, "along": along}
    expected = numerics.quantize(x, dtype, axis=0, symmetric=symmetric, range="mse")
    quantize_groups.interpret(named(isa), arguments, **how, searched=True)
    found = numerics.QTensor(values, scale, zero, int_format(dtype), 0)
    _equal(found, expected)
    assert not bad[0]


@pytest.mark.deep
@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize(("dtype", "symmetric"), KINDS[:2])
def test_every_instruction_set(isa: str, dtype: IntDtype, symmetric: bool) -> None:
    for groups, size in ((37, 5), (9, 300), (3, 8200)):
        x = _data(2, groups, size)
        values, scale, zero = _arrays(x, dtype)
        assert quantize_into(x, values, scale, zero, int_format(dtype), symmetric, "mse", isa)
        expected = numerics.quantize(x, dtype, axis=0, symmetric=symmetric, range="mse")
        _equal(numerics.QTensor(values, scale, zero, int_format(dtype), 0), expected)


@pytest.mark.deep("mse-*")
@pytest.mark.parametrize(("dtype", "symmetric"), KINDS)
@pytest.mark.parametrize("range_", ["minmax", "mse"])
def test_quantize_is_what_numerics_says(dtype: IntDtype, symmetric: bool, range_: Any) -> None:
    how: dict[str, Any] = {"symmetric": symmetric, "range": range_}
    for shape, groups in (
        ((31, 130), {"axis": 0}), ((31, 130), {"axis": 1}), ((31, 130), {}),
        ((31, 130), {"axis": 0, "group_size": 32}), ((1, 7), {"axis": 0}), ((7, 1), {"axis": 0}),
        ((70, 33), {"axis": 1, "group_size": 32, "group_axis": 0}),
        ((4, 3, 5, 6), {"axis": (0, 1)}), ((4, 3, 5, 6), {"axis": 1}), ((2, 20_001), {"axis": 0}),
        ((3, 40), {"group_size": 8}), ((0, 4), {"axis": 0}), ((), {}),
    ):  # fmt: skip
        flat = _data(3, max(1, shape[0] if shape else 1), int(np.prod(shape[1:])))
        x = np.resize(flat, shape)
        for given in (x, np.asfortranarray(x), (x / LARGEST).astype(ml_dtypes.bfloat16),
                      x.astype(np.float64)):  # fmt: skip
            _equal(lowbit.quantize(given, dtype, **groups, **how),
                   numerics.quantize(given, dtype, **groups, **how))  # fmt: skip


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("axis", [0, 1])
def test_what_is_not_finite_is_named(bad: float, axis: int) -> None:
    x = np.ones((40, 50), np.float32)
    x[33, 49] = bad
    with pytest.raises(ValueError, match=r"at index \(33, 49\)"):
        lowbit.quantize(x, "int4", axis=axis, range="mse")
