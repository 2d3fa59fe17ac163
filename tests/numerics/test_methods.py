"""Quantized weights: what each method claims, on layers that are correlated or have outliers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from lowbit.numerics import QTensor, quantize
from lowbit.numerics.methods import (
    Activations,
    QuantizedWeight,
    bias_correction,
    equalization,
    methods,
    output_error,
    smoothquant_factors,
)

K, N = 96, 40
GRIDS: list[dict[str, Any]] = [
    {"dtype": "int8"},
    {"dtype": "int4", "group_size": 32},
    {"dtype": "uint4", "group_size": 40, "symmetric": False},  # the last group is shorter
    {"dtype": "uint4", "group_size": 32, "symmetric": False, "range": "mse"},
]
Floats = npt.NDArray[np.float64]


def layer(seed: int = 0, outliers: bool = False) -> tuple[Floats, Floats]:
    """A weight [N, K] and correlated inputs [600, K], some of them 20 times as large if wished."""
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(600, K // 4)) @ rng.normal(size=(K // 4, K)) / np.sqrt(K // 4)
    x = mixed + 0.3 * rng.normal(size=(600, K))
    if outliers:
        x[:, ::16] *= 20
    return rng.normal(0, 0.02, (N, K)), x


def quantized(name: str, w: Any, x: Any = None, **parameters: Any) -> QuantizedWeight:
    known = None if x is None else Activations.of(x)
    return methods.get(name)(**parameters).quantize(w, known)


def loss(w: Floats, x: Floats, result: QuantizedWeight) -> float:
    """The mean squared error of the outputs, from the outputs."""
    return float(np.mean((x @ w.T - x @ result.dequantize().T.astype(np.float64)) ** 2))


def test_their_names() -> None:
    assert set(methods.names()) == {"nearest", "smoothquant", "awq", "hqq", "gptq"}


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", methods.names())
def test_all_return_a_quantized_matrix_that_is_close(name: str, grid: dict[str, Any]) -> None:
    w, x = layer(1)
    result = quantized(name, w, x, **grid)
    t = result.weight
    like = quantize(w, axis=0, **grid)
    assert isinstance(t, QTensor)
    assert (t.shape, t.scale.shape, t.format) == (w.shape, like.scale.shape, like.format)
    assert (t.axis, t.group_size, t.group_axis) == (like.axis, like.group_size, like.group_axis)
    effective = t.dequantize()
    if result.zero_point is not None:
        zero = t.spread(result.zero_point)
        effective = t.spread(t.scale) * (t.values.astype(np.float64) - zero)
    if result.input_scale is not None:
        effective = effective / result.input_scale
    np.testing.assert_allclose(result.dequantize(), effective, rtol=1e-5, atol=1e-9)
    assert loss(w, x, result) < 0.03 * np.mean((x @ w.T) ** 2)


def test_nearest_is_quantize() -> None:
    w, _ = layer(2)
    for grid in GRIDS:
        result, expected = quantized("nearest", w, **grid), quantize(w, axis=0, **grid)
        np.testing.assert_array_equal(result.weight.values, expected.values)
        np.testing.assert_array_equal(result.dequantize(), expected.dequantize())


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("largest_first", [True, False])
def test_gptq_has_at_most_half_the_loss(grid: dict[str, Any], largest_first: bool) -> None:
    for outliers in (False, True):
        w, x = layer(3, outliers)
        nearest = quantized("nearest", w, x[:400], **grid)
        found = quantized("gptq", w, x[:400], largest_first=largest_first, **grid)
        assert loss(w, x[:400], found) <= 0.5 * loss(w, x[:400], nearest)
        assert loss(w, x[400:], found) <= 0.7 * loss(w, x[400:], nearest)  # not seen before
        np.testing.assert_array_equal(found.weight.scale, nearest.weight.scale)
        np.testing.assert_array_equal(found.weight.zero_point, nearest.weight.zero_point)


def plain_gptq(w: Floats, gram: Floats, t: QTensor, damping: float) -> Floats:
    """Equations 2 and 3, column by column: each is taken out of the whole inverse of H."""
    w, h = w.copy(), 2 * gram
    h += damping * np.diagonal(h).mean() * np.eye(len(h))
    scale, zero = (np.broadcast_to(t.spread(p), w.shape) for p in (t.scale, t.zero_point))
    q, inverse = np.empty_like(w), np.linalg.inv(h)
    for k in range(w.shape[1]):
        q[:, k] = np.rint(w[:, k] / scale[:, k]) + zero[:, k]
        q[:, k] = np.clip(q[:, k], t.format.qmin, t.format.qmax)
        error = w[:, k] - scale[:, k] * (q[:, k] - zero[:, k])
        w -= np.multiply.outer(error, inverse[k] / inverse[k, k])
        inverse -= np.multiply.outer(inverse[:, k], inverse[k]) / inverse[k, k]
    return q


def test_gptq_is_its_formula() -> None:
    rng = np.random.default_rng(4)
    w, x = rng.normal(size=(7, 140)), rng.normal(size=(300, 140)) @ rng.normal(size=(140, 140))
    for grid in GRIDS[1:3]:
        found = quantized("gptq", w, x, largest_first=False, damping=0.05, **grid).weight
        expected = plain_gptq(w, Activations.of(x).gram, quantize(w, axis=0, **grid), 0.05)
        np.testing.assert_array_equal(found.values, expected)


def test_gptq_of_inputs_that_do_not_depend_on_each_other_is_the_nearest() -> None:
    w, _ = layer(5)
    for x in (np.eye(K), np.zeros((1, K)), 1e-30 * np.eye(K), 1e30 * np.eye(K)):
        found = quantized("gptq", w, x, dtype="int4")
        np.testing.assert_array_equal(found.weight.values, quantize(w, "int4", axis=0).values)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_awq_beats_the_nearest_where_inputs_have_outliers(grid: dict[str, Any]) -> None:
    w, x = layer(6, outliers=True)
    nearest = loss(w, x, quantized("nearest", w, **grid))
    factors_only = loss(w, x, quantized("awq", w, x, clip=False, **grid))
    both = loss(w, x, quantized("awq", w, x, **grid))
    assert both <= factors_only * (1 + 1e-6)
    assert both < 0.6 * nearest
    w, x = layer(7)
    for clip in (False, True):
        found = loss(w, x, quantized("awq", w, x, clip=clip, **grid))
        assert found <= loss(w, x, quantized("nearest", w, **grid)) * (1 + 1e-6)


def test_awq_clips_a_weight_that_hardly_matters() -> None:
    w, x = layer(8)
    w[:, 5] = 0.3
    x[:, 5] *= 1e-3
    found = quantized("awq", w, x, dtype="int4", steps=1)
    assert found.input_scale is None
    scale = quantize(w, "int4", axis=0).scale
    assert (found.weight.scale <= 0.76 * scale).all()
    assert loss(w, x, found) < 0.5 * loss(w, x, quantized("nearest", w, dtype="int4"))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_hqq_lowers_its_norm_and_the_squared_error(grid: dict[str, Any]) -> None:
    rng = np.random.default_rng(9)
    w = rng.standard_t(4, (N, K)) + (rng.random((N, K)) < 0.02) * 4.0
    errors = [quantized(name, w, **grid).dequantize() - w for name in ("hqq", "nearest")]
    scale = quantize(w, axis=0, **grid)
    found, nearest = (np.abs(e / scale.spread(scale.scale)) for e in errors)
    assert (found**0.7).sum() < 0.995 * (nearest**0.7).sum()
    assert (found**2).sum() < (nearest**2).sum()
    groups = range(0, K, grid.get("group_size", K))
    norms = [np.add.reduceat(e**0.7, groups, axis=1) for e in (found, nearest)]
    assert (norms[0] <= norms[1] * (1 + 1e-4)).all()


def test_hqq_finds_the_zero_point_between_integers() -> None:
    q = np.random.default_rng(10).integers(0, 16, (3, 400))
    q[:, :2] = 0, 15
    w = 0.1 * (q - 7.4)
    result = quantized("hqq", w, dtype="uint4", symmetric=False, turns=40)
    assert result.zero_point is not None
    np.testing.assert_allclose(result.zero_point, 7.4, atol=0.01)
    np.testing.assert_array_equal(result.weight.zero_point, 7)
    np.testing.assert_allclose(result.dequantize(), w, atol=1e-3)
    # Multiples of a weight have the same integers.
    again = quantized("hqq", w * 2.0**-20, dtype="uint4", symmetric=False, turns=40)
    np.testing.assert_array_equal(again.weight.values, result.weight.values)


def test_smoothquant_keeps_the_product_and_evens_out_the_inputs() -> None:
    w, x = layer(11, outliers=True)
    largest = np.abs(x).max(axis=0)
    for alpha in (0, 0.5, 0.8, 1):
        factors = smoothquant_factors(largest, w, alpha).astype(np.float64)
        np.testing.assert_allclose((x / factors) @ (w * factors).T, x @ w.T, rtol=1e-9, atol=1e-12)
    factors = smoothquant_factors(largest, w, 0.5)
    ranges = np.abs(x / factors).max(axis=0), np.abs(w * factors).max(axis=0)
    np.testing.assert_allclose(*ranges, rtol=1e-5)
    np.testing.assert_allclose(np.abs(x / smoothquant_factors(largest, w, 1)).max(axis=0), 1)

    def both_quantized(result: QuantizedWeight) -> float:
        """With inputs quantized, too, one scale for all of them."""
        f = 1 if result.input_scale is None else result.input_scale
        y = quantize(x / f).dequantize() @ result.weight.dequantize().T
        return float(np.mean((y - x @ w.T) ** 2))

    smooth = quantized("smoothquant", w, x)
    assert both_quantized(smooth) < 0.2 * both_quantized(quantized("nearest", w))


def test_factors_where_a_channel_is_all_zero() -> None:
    w, x = layer(12)
    w[:, 3], x[:, 5] = 0, 0
    factors = smoothquant_factors(np.abs(x).max(axis=0), w, 0.5)
    assert (factors[3], factors[5]) == (1, 1)
    assert np.isfinite(factors).all()
    for name in methods.names():
        for values in (x, np.zeros_like(x)):
            result = quantized(name, w, values, dtype="int4").dequantize()
            assert np.isfinite(result).all()
            np.testing.assert_allclose(result[:, 3], 0, atol=1e-9 if name != "hqq" else 0.02)


def test_equalization_keeps_the_network_and_makes_ranges_equal() -> None:
    rng = np.random.default_rng(13)
    first, bias, second = rng.normal(size=(9, 20)), rng.normal(size=9), rng.normal(size=(6, 9))
    uneven = np.exp(rng.normal(0, 2, 9))
    first, bias, second = first * uneven[:, None], bias * uneven, second / uneven
    s = equalization(first, second).astype(np.float64)

    def network(first: Floats, bias: Floats, second: Floats) -> Floats:
        return np.maximum(x @ first.T + bias, 0) @ second.T

    x = rng.normal(size=(50, 20))
    after = first / s[:, None], bias / s, second * s
    np.testing.assert_allclose(network(*after), network(first, bias, second), rtol=1e-9)
    ranges = np.abs(after[0]).max(axis=1), np.abs(after[2]).max(axis=0)
    np.testing.assert_allclose(*ranges, rtol=1e-5)

    def error(first: Floats, bias: Floats, second: Floats) -> float:
        one, two = (quantize(w).dequantize().astype(np.float64) for w in (first, second))
        return float(np.mean((network(one, bias, two) - network(*after)) ** 2))

    assert error(*after) < 0.1 * error(first, bias, second)
    first[4], second[:, 7] = 0, 0
    factors = equalization(first, second)
    assert (factors[4], factors[7]) == (1, 1)
    np.testing.assert_array_equal(np.delete(factors, [4, 7]), np.delete(s, [4, 7]))
    with pytest.raises(ValueError, match=r"\[C, K\] and \[N, C\]"):
        equalization(first, second[:, 1:])


def test_bias_correction_brings_the_mean_error_to_zero() -> None:
    w, x = layer(14)
    x += 3
    low = quantized("nearest", w, dtype="int4").dequantize()
    seen = quantize(x, "uint4", symmetric=False).dequantize()
    for inputs, mean in ((x, None), (seen, seen.mean(axis=0, dtype=np.float64))):
        missing = (x @ w.T - inputs @ low.T.astype(np.float64)).mean(axis=0)
        correction = bias_correction(w, low, x.mean(axis=0), mean)
        assert np.abs(missing).max() > 0.01
        np.testing.assert_allclose(missing - correction, 0, atol=1e-6)


def test_activations_add_up_and_are_divided() -> None:
    _, x = layer(15)
    x = x.astype(np.float32)
    whole = Activations.of(x.reshape(20, 30, K))
    parts = Activations.of(x[:100]) + Activations.of(x[100:101]) + Activations.of(x[101:])
    s = np.exp(np.random.default_rng(16).normal(size=K))
    for one, other in ((whole, parts), (whole.divided(s), Activations.of(x / s))):
        assert one.count == other.count == 600
        for name in ("mean", "magnitude", "largest", "gram"):
            np.testing.assert_allclose(getattr(one, name), getattr(other, name), atol=1e-6)
    e = np.random.default_rng(17).normal(size=(N, K))
    expected = np.mean((x @ e.T) ** 2)
    assert output_error(e, whole) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", methods.names())
def test_odd_shapes_types_and_sizes(name: str) -> None:
    rng = np.random.default_rng(18)
    for shape in ((1, 1), (1, 7), (5, 1), (3, 130)):
        w, x = rng.normal(size=shape), rng.normal(size=(2, shape[1]))
        for grid in GRIDS:
            result = quantized(name, w, x, **grid)
            assert result.dequantize().shape == shape
            assert np.abs(result.dequantize() - w).max() < 1.5
    w, x = rng.normal(size=(4, 24)), rng.normal(size=(50, 24))
    expected = quantized(name, w.astype(np.float16), x.astype(np.float16), dtype="int4")
    for given in (w.astype(np.float16).astype(np.float32), np.asfortranarray(w.astype(np.float16))):
        result = quantized(name, given, x.astype(np.float16).astype(np.float64), dtype="int4")
        np.testing.assert_array_equal(result.weight.values, expected.weight.values)
    assert quantized(name, w.astype(ml_dtypes.bfloat16), x).weight.shape == (4, 24)
    for constant in (np.zeros((3, 8)), np.full((3, 8), -2.5), np.full((3, 8), 1e-42)):
        back = quantized(name, constant, rng.normal(size=(9, 8)), dtype="int4").dequantize()
        np.testing.assert_allclose(back, constant, rtol=0.1, atol=1e-37)


@pytest.mark.parametrize("name", methods.names())
def test_bad_input_is_refused(name: str) -> None:
    w, x = layer(19)
    known = Activations.of(x)
    method = methods.get(name)()
    bad = w.copy()
    bad[2, 5] = np.inf
    with pytest.raises(ValueError, match=r"found inf at index \(2, 5\)"):
        method.quantize(bad, known)
    with pytest.raises(TypeError, match="int64"):
        method.quantize(np.ones((3, K), np.int64), known)
    for shape in ((K,), (0, K), (2, 3, K)):
        with pytest.raises(ValueError, match=r"expected a weight \[N, K\]"):
            method.quantize(np.ones(shape), known)
    with pytest.raises(ValueError, match="activations of 95 inputs, got 96"):
        method.quantize(w[:, 1:], known)
    if method.needs_activations:
        with pytest.raises(ValueError, match="needs to know the layer's inputs"):
            method.quantize(w)
    else:
        assert method.quantize(w).weight.shape == w.shape


def test_bad_activations_and_parameters() -> None:
    x = np.ones((4, 3))
    x[3, 1] = np.nan
    with pytest.raises(ValueError, match=r"found nan at index \(3, 1\)"):
        Activations.of(x)
    for empty in (np.ones((0, 3)), np.ones((3, 0))):
        with pytest.raises(ValueError, match="no data"):
            Activations.of(empty)
    with pytest.raises(ValueError, match="single number"):
        Activations.of(np.float32(1))
    with pytest.raises(ValueError, match="inputs of 3, got 4"):
        _ = Activations.of(np.ones((2, 3))) + Activations.of(np.ones((2, 4)))
    parameters: Any = ({"alpha": 2}, {"damping": 0}, {"norm": 1}, {"steps": 0})
    for name, wrong in zip(("smoothquant", "gptq", "hqq", "awq"), parameters, strict=True):
        with pytest.raises(ValueError, match="expected"):
            methods.get(name)(**wrong)
