"""Observers: what each claims of its range, and histograms that lose nothing as they grow."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lowbit.numerics import affine_parameters, dequantize_affine, int_format, quantize_affine
from lowbit.numerics.observers import Observer, divergences, observers

KINDS = [("int8", True), ("uint8", False), ("uint4", False), ("int4", True)]
TINY = float(np.finfo(np.float32).smallest_normal)
Floats = npt.NDArray[np.float64]
STEPS = hnp.arrays(np.int16, st.integers(1, 60), elements=st.integers(-2047, 2047))


def seen(name: str, *batches: Any, **parameters: Any) -> Observer:
    observer = observers.get(name)(**parameters)
    for batch in batches:
        observer.observe(batch)
    return observer


def error(observer: Observer, x: npt.NDArray[Any], dtype: str, symmetric: bool) -> float:
    scale, zero_point = observer.quantization(dtype, symmetric)
    q = quantize_affine(x, scale, zero_point, int_format(dtype))
    return float(np.mean((dequantize_affine(q, scale, zero_point) - x.astype(np.float64)) ** 2))


def with_outliers() -> Floats:
    x = np.random.default_rng(1).normal(size=20_000)
    x[7], x[11] = 60, -25
    return x


def test_their_names() -> None:
    assert set(observers.names()) == {"minmax", "moving_average", "percentile", "entropy", "mse"}


@pytest.mark.parametrize("name", observers.names())
@pytest.mark.parametrize(("dtype", "symmetric"), KINDS)
@given(
    steps=STEPS,
    scaled=st.sampled_from([("float16", -8), ("float32", -149), ("float32", 90), ("float64", 0)]),
    cut=st.integers(0, 60),
)
@settings(deadline=None, max_examples=12)
def test_any_data_have_a_range_within_their_own(
    name: str,
    dtype: str,
    symmetric: bool,
    steps: npt.NDArray[np.int16],
    scaled: tuple[str, int],
    cut: int,
) -> None:
    x = np.ldexp(steps.astype(scaled[0]), scaled[1])
    observer = seen(name, x[:cut], x[cut:])
    low, high = observer.range(dtype, symmetric)
    assert low.shape == high.shape == ()
    wide = np.abs(x).max() if symmetric else 0
    assert min(x.min(), -wide, 0) <= low <= high <= max(x.max(), wide, 0)
    scale, zero_point = observer.quantization(dtype, symmetric)
    expected = affine_parameters(low, high, int_format(dtype), symmetric)
    assert (scale, zero_point) == expected


def test_minmax_and_the_moving_average() -> None:
    batches = [np.array(b, np.float32) for b in ([-1, 3], [-2, 1], [5, 5])]
    assert seen("minmax", *batches).range() == (-2, 5)
    low, high = seen("moving_average", *batches, rate=0.25).range()
    assert (low, high) == (-1.25 + 0.25 * 6.25, 2.5 + 0.25 * 2.5)
    assert seen("moving_average", *batches, rate=1).range() == (5, 5)


@pytest.mark.parametrize("percentile", [50, 90, 99.9, 99.99, 100])
@pytest.mark.parametrize("symmetric", [False, True])
def test_percentile_is_the_narrowest_that_holds_its_share(
    percentile: float, symmetric: bool
) -> None:
    x = with_outliers()
    observer = seen("percentile", x[:300], x[300:], percentile=percentile)
    low, high = observer.range("int8", symmetric)
    share = percentile / 100
    assert ((x >= low) & (x <= high)).mean() >= share - 1e-12
    edges = observer.summary().edges
    assert edges is not None
    step = edges[1] - edges[0]
    if symmetric:
        assert low == -high
        assert (np.abs(x) < high - step).mean() < share
    else:
        assert (x < low + step).mean() > (1 - share) / 2
        assert (x > high - step).mean() > (1 - share) / 2
    if percentile == 99.9:
        assert -5 < low < high < 5
    if percentile == 100:
        assert (low, high) == ((-60, 60) if symmetric else (-25, 60))


@pytest.mark.parametrize(("dtype", "symmetric"), KINDS)
@pytest.mark.parametrize("kind", ["normal", "laplace", "relu", "uniform", "outliers", "few"])
def test_mse_has_no_more_error_than_minmax(dtype: str, symmetric: bool, kind: str) -> None:
    rng = np.random.default_rng(2)
    x: Floats = {
        "normal": rng.normal(size=20_000),
        "laplace": rng.laplace(size=20_000),
        "relu": np.maximum(rng.normal(size=20_000), 0),
        "uniform": rng.uniform(-1, 3, 20_000),
        "outliers": with_outliers(),
        "few": rng.integers(-7, 8, 1000) / 7,
    }[kind]
    found, plain = (error(seen(n, x), x, dtype, symmetric) for n in ("mse", "minmax"))
    assert found <= plain * (1 + 1e-9)
    if kind in ("normal", "laplace", "outliers"):
        assert found < plain * (0.97 if dtype.endswith("8") else 0.7)


@pytest.mark.parametrize(("dtype", "symmetric"), KINDS)
@pytest.mark.parametrize("outlier", [0, 150])
def test_mse_comes_close_to_the_best_of_many_ranges(
    dtype: str, symmetric: bool, outlier: float
) -> None:
    x = np.append(np.random.default_rng(3).laplace(size=5000) + 0.3, outlier)
    fmt = int_format(dtype)
    best = np.inf
    low, high = -np.abs(x).max() if symmetric else x.min(), x.max()
    for a in np.geomspace(0.01, 1, 40):
        for b in [a] if symmetric else np.geomspace(0.01, 1, 40):
            scale, zero_point = affine_parameters(a * low, b * high, fmt, symmetric)
            q = quantize_affine(x, scale, zero_point, fmt)
            best = min(best, float(np.mean((dequantize_affine(q, scale, zero_point) - x) ** 2)))
    assert error(seen("mse", x), x, dtype, symmetric) <= best * 1.03


def plain_divergence(counts: Floats, begin: int, end: int, levels: int) -> float:
    """KL(P ‖ Q) as the papers write it down, bin by bin."""
    inside = counts[begin:end]
    p, q = inside.copy(), np.zeros_like(inside)
    p[0] += counts[:begin].sum()
    p[-1] += counts[end:].sum()
    for level in range(levels):
        bins = [i for i in range(len(p)) if i * levels // len(p) == level and p[i] > 0]
        for i in bins:
            q[i] = sum(inside[j] for j in bins) / len(bins)
    p, q = p / p.sum(), q / q.sum()
    with np.errstate(divide="ignore"):
        return sum(
            a * np.log(a / b) if b > 0 else np.inf for a, b in zip(p, q, strict=True) if a > 0
        )


def test_divergence_of_known_histograms() -> None:
    rng = np.random.default_rng(4)
    for _ in range(40):
        counts = rng.integers(0, 6, 40).astype(np.float64)
        begin, end = np.arange(10), 40 - np.arange(10)
        levels = int(rng.integers(2, 20))
        expected = [plain_divergence(counts, i, 40 - i, levels) for i in range(10)]
        np.testing.assert_allclose(divergences(counts, begin, end, levels), expected, atol=1e-12)
    # Even counts lose nothing by merging; with a quarter cut off at each end P is 5 1 1 1 1 1 1 5.
    found = divergences(np.ones(16), np.array([0, 4]), np.array([16, 12]), 4)
    expected = [0, 10 / 16 * np.log(5 / 2) + 6 / 16 * np.log(1 / 2)]
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize(("dtype", "symmetric"), KINDS)
def test_entropy_keeps_even_data_whole_and_cuts_few_outliers(dtype: str, symmetric: bool) -> None:
    even = np.linspace(-1, 1, 40_001)
    assert seen("entropy", even).range(dtype, symmetric) == (-1, 1)
    tails = np.random.default_rng(5).standard_t(4, size=50_000)
    low, high = seen("entropy", tails).range(dtype, symmetric)
    assert np.abs(tails).max() > 2 * high > 2
    assert ((tails >= low) & (tails <= high)).mean() > 0.95


def test_a_peak_of_zeros_does_not_change_the_entropy_range() -> None:
    x = np.abs(np.random.default_rng(6).normal(size=20_000))
    _, high = seen("entropy", x).range("uint8", False)
    zeros = np.zeros(500_000, np.float32)
    assert seen("entropy", x, zeros).range("uint8", False) == (0, high)


@given(
    steps=STEPS,
    exponents=st.lists(st.integers(-60, 60), min_size=60, max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    seed=st.integers(0, 9),
)
@settings(deadline=None, max_examples=100)
def test_histograms_count_all_whatever_the_order(
    steps: npt.NDArray[np.int16], exponents: list[int], cuts: list[int], seed: int
) -> None:
    x = np.ldexp(steps.astype(np.float64), exponents[: len(steps)])
    whole = seen("mse", x, bins=64).summary()
    mixed = np.random.default_rng(seed).permutation(x)
    parts = np.split(mixed, sorted(cuts))
    summary = seen("mse", *parts, bins=64).summary()
    left, right = (seen("mse", *some, bins=64) for some in (parts[:2], parts[2:]))
    left.merge(right)
    counts, edges = whole.counts, whole.edges
    assert counts is not None
    assert edges is not None
    for other in (summary, left.summary()):
        np.testing.assert_array_equal(other.counts, counts)  # type: ignore[arg-type]
        np.testing.assert_array_equal(other.edges, edges)  # type: ignore[arg-type]
        assert (other.low, other.high, other.elements) == (x.min(), x.max(), len(x))
    assert counts.sum() == len(x)
    negative = [((x > a) & (x <= b) & (x < 0)).sum() for a, b in pairwise(edges[:33])]
    positive = [((x >= a) & (x < b)).sum() for a, b in pairwise(edges[32:])]
    assert counts.tolist() == negative + positive


@pytest.mark.parametrize("name", observers.names())
def test_a_channel_is_as_a_tensor_of_its_own(name: str) -> None:
    rng = np.random.default_rng(7)
    batches = [rng.normal(size=(5, 3, 40)) * [[1], [1e-3], [50]] for _ in range(2)]
    batches[1][:, 2] = 0.5  # constant there
    observer = seen(name, *batches, axis=1)
    negative = seen(name, *batches, axis=-2)
    for dtype, symmetric in KINDS:
        low, high = observer.range(dtype, symmetric)
        assert low.shape == (3,)
        for channel in range(3):
            one = seen(name, *(batch[:, channel] for batch in batches))
            assert one.range(dtype, symmetric) == (low[channel], high[channel])
        np.testing.assert_array_equal(negative.range(dtype, symmetric), (low, high))
    assert observer.quantization()[0].shape == (3,)
    assert observer.summary().elements == 400


@pytest.mark.parametrize("name", observers.names())
@pytest.mark.parametrize(("dtype", "symmetric"), KINDS)
def test_degenerate_data(name: str, dtype: str, symmetric: bool) -> None:
    def scale_of(*batches: Any) -> float:
        scale, zero_point = seen(name, *batches).quantization(dtype, symmetric)
        fmt = int_format(dtype)
        for batch in batches:
            q = quantize_affine(np.asarray(batch), scale, zero_point, fmt)
            back = dequantize_affine(q, scale, zero_point)
            np.testing.assert_allclose(back, np.asarray(batch), rtol=1e-6, atol=TINY / 2)
        return float(scale)

    assert scale_of(np.zeros(5, np.float32), np.zeros((2, 3))) == 1
    assert scale_of(np.float32(-2.5)) > 0  # one element
    assert scale_of(np.full((3, 4), 7.25, ml_dtypes.bfloat16)) > 0
    assert scale_of(np.full(9, 1e-42, np.float32), np.full(2, 1e-42, np.float32)) == TINY
    assert scale_of(np.full(9, np.finfo(np.float32).max)) > 1e35


@pytest.mark.parametrize("name", observers.names())
def test_float_types_and_empty_batches(name: str) -> None:
    x = np.random.default_rng(8).normal(size=(4, 50)).astype(ml_dtypes.bfloat16)
    expected = seen(name, x).range("uint8", False)
    for dtype in (np.float16, np.float32, np.float64):
        assert seen(name, x.astype(dtype)).range("uint8", False) == expected
    observer = seen(name, np.empty((0, 50)), x, np.empty(0))
    assert observer.range("uint8", False) == expected
    assert observer.summary().batches == 1


@pytest.mark.parametrize("name", observers.names())
def test_bad_data_are_refused_and_change_nothing(name: str) -> None:
    observer = observers.get(name)(axis=1)
    for act in (observer.range, observer.quantization, observer.summary):
        with pytest.raises(ValueError, match="no data"):
            act()
    observer.observe(np.array([[1.0, -2.0], [3.0, 0.5]]))
    before = observer.range("uint4", False)
    x = np.ones((3, 2), np.float32)
    x[1, 0] = np.nan
    for value in (np.nan, np.inf):
        x[1, 0] = value
        with pytest.raises(ValueError, match=r"found (nan|inf) at index \(1, 0\)"):
            observer.observe(x)
    with pytest.raises(ValueError, match=r"2 channels on axis 1, .* got 3"):
        observer.observe(np.ones((2, 3)))
    with pytest.raises(ValueError, match="axis 1 does not exist"):
        observer.observe(np.ones(3))
    with pytest.raises(TypeError, match="int32"):
        observer.observe(np.ones((2, 2), np.int32))
    np.testing.assert_array_equal(observer.range("uint4", False), before)
    assert observer.summary().batches == 1


def test_merging_is_for_equals() -> None:
    x = np.ones((2, 2))
    for one, other in (
        (seen("mse", x), seen("minmax", x)),
        (seen("mse", x), seen("mse", x, bins=64)),
        (seen("minmax", x), seen("minmax", x, axis=0)),
        (seen("minmax", x, axis=0), seen("minmax", np.ones((3, 2)), axis=0)),
    ):
        with pytest.raises(ValueError, match="expected"):
            one.merge(other)
    with pytest.raises(TypeError, match="order of batches"):
        seen("moving_average", x).merge(seen("moving_average", x))
    empty = observers.get("entropy")()
    full = seen("entropy", x)
    full.merge(observers.get("entropy")())
    empty.merge(full)
    assert empty.range() == full.range() == (-1, 1)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("percentile", {"percentile": 101}, "from 50 to 100"),
        ("moving_average", {"rate": 0}, "above 0"),
        ("entropy", {"bins": 1000}, "power of two"),
    ],
)
def test_bad_parameters(name: str, parameters: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        observers.get(name)(**parameters)
