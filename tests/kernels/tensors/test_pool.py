"""Pools and reductions: against NumPy, to the bit, and windows against PyTorch's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.kernels.tensors.data import AFFINE, assert_same, data, poisoned, stored

from lowbit.graph.graph import Node
from lowbit.graph.operators.windows import divisors, windows
from lowbit.kernels.cpu.tensors.reductions import (
    Reduction,
    pool,
    pool_block,
    reduce_columns,
    reduce_rows,
)

RunAll = Callable[..., dict[str, np.ndarray]]
LEAST = {"u8": 0, "s8": -128, "f32": -np.inf, "bf16": -np.inf}


class Windows(NamedTuple):
    """places: [pixels, taps]. inside, padded: divisors without and with padding."""

    size: tuple[int, ...]
    places: np.ndarray
    inside: np.ndarray
    padded: np.ndarray


def _windows(
    size: Any, window: Any, stride: Any, before: Any, after: Any, dilation: Any, ceil: bool = False
) -> Windows:
    how = {"strides": stride, "pads": (*before, *after), "dilations": dilation, "ceil_mode": ceil}
    node = Node("AveragePool", ("x",), ("y",), how)
    where = windows(node, size, window)
    counts = [
        divisors(node.replaced(count_include_pad=pad), where).ravel().astype(np.int32)
        for pad in (0, 1)
    ]
    return Windows(where.output, where.places().astype(np.int32), *counts)


def _name(reduction: Reduction) -> str:
    return " ".join(map(str, reduction))


def _parameters(reduction: Reduction) -> np.ndarray | None:
    numbers: list[float] = []
    if reduction.converted:
        if reduction.format in AFFINE:
            numbers += AFFINE[reduction.format]
        if reduction.out in AFFINE:
            scale, zero = AFFINE[reduction.out]
            numbers += [float(np.float32(1) / np.float32(scale)), zero]
    return np.array(numbers, np.float32) if numbers else None


def _greater(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What a maximum keeps: the first NaN; of equals, such as zeros of both signs, the later."""
    return np.where(np.isnan(a) | (a > b), a, b)


def _finished(
    numbers: np.ndarray, counts: np.ndarray, divisors: np.ndarray, reduction: Reduction
) -> np.ndarray:
    """From an exact sum, or a float32 one, or a maximum, to what is stored."""
    kind, name, out, _ = reduction
    if not reduction.converted:
        return numbers.astype(stored(np.zeros(0, np.float32), out, AFFINE.get(out)).dtype)
    result = numbers
    if name in AFFINE:
        scale, zero = AFFINE[name]
        taken = 1 if kind == "max" else counts
        result = (numbers.astype(np.int64) - taken * zero).astype(np.float32) * np.float32(scale)
    if kind == "mean":
        result = result / divisors.astype(np.float32)
    return stored(result.astype(np.float32), out, AFFINE.get(out))


def _expected(
    x: np.ndarray, found: Windows, divisors: np.ndarray, reduction: Reduction
) -> np.ndarray:
    """Of [batch, pixels, channels], one tap after another."""
    batch, _, channels = x.shape
    integers = reduction.format in AFFINE
    numbers = x.astype(np.int64) if integers else x.astype(np.float32)
    shape = (batch, len(found.places), channels)
    start: Any = LEAST[reduction.format] if reduction.kind == "max" else 0
    total = np.full(shape, start, numbers.dtype)
    counts = np.zeros((1, shape[1], 1), np.int64)
    for tap in range(found.places.shape[1]):
        place = found.places[:, tap]
        inside = (place >= 0)[None, :, None]
        taken = numbers[:, np.maximum(place, 0)]
        both = _greater(total, taken) if reduction.kind == "max" else total + taken
        total = np.where(inside, both, total)
        counts += inside
    return _finished(total, counts, divisors[None, :, None], reduction)


# size, window, stride, before, after, dilation, ceil
GEOMETRIES = {
    "3x3, stride 2, padded": ((7, 9), (3, 3), (2, 2), (1, 1), (1, 1), (1, 1), False),
    "2x2, ceil": ((5, 7), (2, 2), (2, 2), (0, 0), (0, 0), (1, 1), True),
    "3x2, dilated, uneven": ((8, 9), (3, 2), (1, 3), (2, 0), (0, 1), (2, 3), False),
    "one dimension": ((23,), (5,), (3,), (2,), (2,), (1,), True),
    "three dimensions": ((4, 3, 5), (2, 3, 2), (2, 1, 2), (0, 1, 1), (1, 1, 0), (1, 1, 1), False),
    "all": ((4, 5), (4, 5), (1, 1), (0, 0), (0, 0), (1, 1), False),
}
REDUCTIONS = [
    Reduction("max", "u8", "u8"), Reduction("max", "s8", "s8"), Reduction("max", "f32", "f32"),
    Reduction("max", "bf16", "bf16"), Reduction("max", "u8", "s8", True),
    Reduction("mean", "u8", "u8"), Reduction("mean", "s8", "f32"), Reduction("mean", "f32", "f32"),
    Reduction("mean", "f32", "u8"), Reduction("mean", "bf16", "bf16"),
]  # fmt: skip
CHANNELS = (1, 3, 15, 16, 17, 63, 64, 65, 300)


def _pooled(
    run_all: RunAll, x: np.ndarray, found: Windows, divisors: np.ndarray, reduction: Reduction,
    interpret: bool = True,
) -> np.ndarray:  # fmt: skip
    batch, pixels, channels = x.shape
    taps = found.places.shape[1]
    # The output is a slice of wider pixels, as where it is concatenated.
    out = poisoned(reduction.out, (batch, len(found.places), channels + 5))
    arguments = {
        "out": out[:, :, 2 : 2 + channels], "x": x, "places": found.places, "divisors": divisors,
        "parameters": _parameters(reduction), "batch": batch, "x_pixels": pixels,
        "pixels": len(found.places), "taps": taps, "channels": channels, "x_stride": channels,
        "out_stride": channels + 5, "block": min(7, pool_block(taps, channels)),
    }  # fmt: skip
    got = run_all(pool, arguments, interpret=interpret, reduction=reduction)["out"]
    whole = got.base
    assert isinstance(whole, np.ndarray)
    beside = np.delete(whole.reshape(out.shape), np.s_[2 : 2 + channels], axis=2)
    assert_same(beside, poisoned(reduction.out, beside.shape))
    return got


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("reduction", REDUCTIONS, ids=_name)
def test_pools(run_all: RunAll, reduction: Reduction, geometry: str) -> None:
    size, *rest = GEOMETRIES[geometry]
    found = _windows(size, *rest)
    x = data(np.random.default_rng(1), reduction.format, (2, int(np.prod(size)), 19))
    for counts in (found.inside, found.padded) if reduction.kind == "mean" else (found.inside,):
        got = _pooled(run_all, x, found, counts, reduction, interpret=geometry != "all")
        with np.errstate(all="ignore"):
            assert_same(got, _expected(x, found, counts, reduction))


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("reduction", REDUCTIONS[::2], ids=_name)
def test_channels(run_all: RunAll, reduction: Reduction, channels: int) -> None:
    found = _windows((4, 3), (3, 3), (2, 1), (1, 0), (1, 0), (1, 1))
    x = data(np.random.default_rng(channels), reduction.format, (1, 12, channels))
    got = _pooled(run_all, x, found, found.inside, reduction, interpret=channels < 100)
    with np.errstate(all="ignore"):
        assert_same(got, _expected(x, found, found.inside, reduction))


def test_windows_in_which_nothing_lies(run_all: RunAll) -> None:
    found = _windows((2,), (2,), (2,), (2,), (0,), (1,))
    assert found.places.tolist() == [[-1, -1], [0, 1]]
    assert found.inside.tolist() == [1, 2]
    x = np.array([[[5], [200]]], np.uint8)
    got = _pooled(run_all, x, found, found.inside, Reduction("max", "u8", "u8"))
    assert got.ravel().tolist() == [0, 200]


def _torch_cases() -> list[tuple[Any, ...]]:
    cases = []
    for size, window, stride, pad, dilation, ceil in itertools.product(
        (5, 6, 11), (2, 3), (1, 2, 3), (0, 1), (1, 2), (False, True)
    ):
        if dilation * (window - 1) < size + 2 * pad and pad <= window // 2:
            cases.append((size, window, stride, pad, dilation, ceil))
    return cases


def test_windows_are_pytorchs(run_all: RunAll) -> None:
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    rng = np.random.default_rng(2)
    for size, window, stride, pad, dilation, ceil in _torch_cases():
        sizes = size, size + 1
        image = rng.standard_normal((1, *sizes, 2)).astype(np.float32)
        found = _windows(
            sizes, (window,) * 2, (stride,) * 2, (pad,) * 2, (pad,) * 2, (dilation,) * 2, ceil
        )
        x, nchw = image.reshape(1, -1, 2), torch.from_numpy(image).permute(0, 3, 1, 2)
        greatest = functional.max_pool2d(nchw, window, stride, pad, dilation, ceil)
        expected = _expected(x, found, found.inside, Reduction("max", "f32", "f32"))
        assert tuple(greatest.shape[2:]) == found.size
        np.testing.assert_array_equal(greatest.permute(0, 2, 3, 1).reshape(1, -1, 2), expected)
        if dilation != 1:
            continue
        for padding, counts in ((False, found.inside), (True, found.padded)):
            mean = functional.avg_pool2d(nchw, window, stride, pad, ceil, padding)
            expected = _expected(x, found, counts, Reduction("mean", "f32", "f32"))
            np.testing.assert_allclose(
                mean.permute(0, 2, 3, 1).reshape(1, -1, 2), expected, rtol=1e-5, atol=1e-6
            )


def test_windows_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"windows of \(5,\) are larger than .* \(4,\)"):
        _windows((4,), (3,), (1,), (0,), (0,), (2,))
    with pytest.raises(ValueError, match="a window of 2 sizes does not fit an image of 1"):
        _windows((4,), (3, 3), (1,), (0,), (0,), (2,))


def _in_parts(x: np.ndarray, combine: Callable[[Any, Any], Any], start: Any) -> Any:
    """[rows, count] as rows are defined to be reduced."""
    parts = np.full((len(x), 32), start, x.dtype)
    whole = x.shape[1] // 32 * 32
    for at in range(0, whole, 32):
        parts = combine(parts, x[:, at : at + 32])
    vector = combine(parts[:, :16], parts[:, 16:])
    for half in (8, 4, 2, 1):
        vector = combine(vector, vector[:, np.arange(16) ^ half])
    total = vector[:, 0]
    for at in range(whole, x.shape[1]):
        total = combine(total, x[:, at])
    return total


def _by_64(x: np.ndarray, combine: Callable[[Any, Any], Any], start: Any) -> Any:
    """[outer, count, inner] as columns are defined to be reduced."""
    total = np.full((len(x), x.shape[2]), start, x.dtype)
    for first in range(0, x.shape[1], 64):
        part = np.full_like(total, start)
        for row in range(first, min(first + 64, x.shape[1])):
            part = combine(part, x[:, row])
        total = combine(total, part)
    return total


ALL = [*REDUCTIONS, Reduction("sum", "f32", "f32"), Reduction("sum", "u8", "f32")]


@pytest.mark.parametrize("count", [1, 15, 16, 17, 31, 32, 63, 65, 1000])
@pytest.mark.parametrize("reduction", ALL, ids=_name)
def test_rows(run_all: RunAll, reduction: Reduction, count: int) -> None:
    x = data(np.random.default_rng(count), reduction.format, (37, count))
    out = poisoned(reduction.out, (37,))
    arguments = {"out": out, "x": x, "parameters": _parameters(reduction), "rows": 37}
    got = run_all(reduce_rows, {**arguments, "count": count}, interpret=count < 70,
                  reduction=reduction)["out"]  # fmt: skip
    with np.errstate(all="ignore"):
        assert_same(got, _reduced(_in_parts, x, count, reduction))


@pytest.mark.parametrize("shape", [(2, 1, 5), (1, 49, 64), (3, 65, 17), (2, 200, 63), (1, 3, 1000)],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize("reduction", ALL, ids=_name)
def test_columns(run_all: RunAll, reduction: Reduction, shape: tuple[int, int, int]) -> None:
    outer, count, inner = shape
    x = data(np.random.default_rng(count), reduction.format, shape)
    arguments = {
        "out": poisoned(reduction.out, (outer, inner)), "x": x,
        "parameters": _parameters(reduction), "outer": outer, "count": count, "inner": inner,
    }  # fmt: skip
    got = run_all(reduce_columns, arguments, interpret=x.size < 4000, reduction=reduction)["out"]
    with np.errstate(all="ignore"):
        assert_same(got, _reduced(_by_64, x, count, reduction))


def _reduced(
    how: Callable[..., np.ndarray], x: np.ndarray, count: int, reduction: Reduction
) -> np.ndarray:
    numbers = x.astype(np.int64) if reduction.format in AFFINE else x.astype(np.float32)
    if reduction.kind == "max":
        total = how(numbers, _greater, LEAST[reduction.format])
    else:
        total = how(numbers, np.add, 0)
    if reduction.kind == "max" or reduction.format in AFFINE:
        return _finished(total, np.array(count), np.array(count), reduction)
    # What leaves float32 on its way is summed in float64, number after number.
    wide = numbers.astype(np.float64).cumsum(axis=1)[:, -1]
    divisor = count if reduction.kind == "mean" else 1
    made = np.where(np.isfinite(total), total / np.float32(divisor), wide / divisor)
    return stored(made.astype(np.float32), reduction.out, AFFINE.get(reduction.out))


def test_a_mean_of_many_numbers_is_accurate(run_all: RunAll) -> None:
    x = np.random.default_rng(3).uniform(0, 1, (1, 30_000)).astype(np.float32)
    exact = x.mean(dtype=np.float64)
    reduction = Reduction("mean", "f32", "f32")
    arguments = {"out": np.zeros(1, np.float32), "x": x, "parameters": None}
    rows = run_all(reduce_rows, {**arguments, "rows": 1, "count": x.size}, interpret=False,
                   reduction=reduction)["out"]  # fmt: skip
    columns = run_all(
        reduce_columns, {**arguments, "outer": 1, "count": x.size, "inner": 1},
        interpret=False, reduction=reduction,
    )["out"]  # fmt: skip
    # Adding 30,000 numbers one after another is off by 1.1e-6.
    assert abs(rows[0] - exact) < 2e-7
    assert abs(columns[0] - exact) < 5e-7
