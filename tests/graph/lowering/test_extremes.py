"""Operators where numbers on the way leave float32, though results do not; infinities and NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lowered import F, ints
from nets import Net

from lowbit.graph import Session
from lowbit.graph.evaluate import evaluate

INF, NAN = np.inf, np.nan
MOST = 3.0e38


def _check(net: Net, outputs: list[str], expected: list[Any], *inputs: Any) -> None:
    """Kernels and the definition give what is expected."""
    graph = net.graph(*outputs)
    given = {name: np.asarray(one, F) for name, one in zip(graph.inputs, inputs, strict=True)}
    got = Session(graph, threads=1).run(**given)
    with np.errstate(all="ignore"):
        meant = evaluate(graph, given)
    for name, one in zip(graph.outputs, expected, strict=True):
        for made in (got, meant):
            np.testing.assert_allclose(made[name], np.asarray(one, F), rtol=1e-6, err_msg=name)


def test_a_running_sum_goes_on_behind_infinity() -> None:
    net = Net()
    x, axis = net.input(3, 4), net.constant(ints(1))
    outputs = [net("CumSum", x, axis), net("CumSum", x, axis, exclusive=1),
               net("CumSum", x, axis, reverse=1)]  # fmt: skip
    given = [[1, INF, 2, 3], [1, INF, -INF, 3], [MOST, MOST, -MOST, 1]]
    expected = [
        [[1, INF, INF, INF], [1, INF, NAN, NAN], [MOST, INF, MOST, MOST]],
        [[0, 1, INF, INF], [0, 1, INF, NAN], [0, MOST, INF, MOST]],
        [[INF, INF, 5, 3], [NAN, NAN, -INF, 3], [MOST, 0, -MOST, 1]],
    ]
    _check(net, outputs, expected, given)


def test_a_running_sum_rounds_once() -> None:
    net = Net()
    y = net("CumSum", net.input(1, 4000), net.constant(ints(1)))
    x = np.random.default_rng(0).normal(size=(1, 4000)).astype(F)
    got = Session(net.graph(y), threads=1)(x)
    np.testing.assert_array_equal(got, x.astype(np.float64).cumsum(1).astype(F))


def test_the_logarithm_of_sums_of_infinite_powers() -> None:
    net = Net()
    y = net("ReduceLogSumExp", net.input(5, 2), net.constant(ints(1)), keepdims=0)
    given = [[1, INF], [-INF, -INF], [-INF, 2], [NAN, INF], [MOST, -MOST]]
    _check(net, [y], [[INF, -INF, 2, NAN, MOST]], given)


def test_activations_whose_argument_is_beyond_float32() -> None:
    net = Net()
    x = net.input(5)
    outputs = [net("Celu", x, alpha=0.2), net("Softplus", x, slope=3.0), net("Softplus", x),
               net("Elu", x, input_scale=5.0), net("Round", x, decimals=-2)]  # fmt: skip
    given = [MOST, -MOST, INF, NAN, 250]
    expected = [[MOST, -0.2, INF, NAN, 250], [MOST, 0, INF, NAN, 250], [MOST, 0, INF, NAN, 250],
                [MOST, -1, INF, NAN, 250], [MOST, -MOST, INF, NAN, 200]]  # fmt: skip
    _check(net, outputs, expected, given)


def test_the_sign_of_nan() -> None:
    """NaN in ONNX, 0 in PyTorch."""
    net = Net()
    x = net.input(5)
    given = [NAN, INF, -1e-45, -0.0, 7]
    expected = [[NAN, 1, -1, 0, 1], [0, 1, -1, 0, 1]]
    _check(net, [net("Sign", x), net("Sign", x, of_nan=0)], expected, given)


def test_a_bound_lets_infinity_pass() -> None:
    net = Net()
    x = net("MatMul", net.input(2, 1), net.constant(np.array([[1, -1]], F)))
    outputs = [net("Clip", x, net.constant(F(0.5))), net("Clip", x, "", net.constant(F(0.5)))]
    _check(net, outputs, [[[INF, 0.5], [2, 0.5]], [[0.5, -INF], [0.5, -2]]], [[INF], [2]])


@pytest.mark.parametrize("name", ["LayerNormalization", "RMSNormalization"])
def test_rows_whose_squares_are_beyond_float32(name: str) -> None:
    net = Net()
    y = net(name, net.input(6, 40), net.constant(np.ones(40, F)), axis=-1)
    x = np.random.default_rng(1).normal(size=(6, 40))
    x *= np.array([1e38, 1e30, 1e19, 1, 1e-30, 1])[:, None]
    x = np.clip(x, -3.4e38, 3.4e38).astype(F)
    x[5, 3] = NAN
    graph = net.graph(y)
    got, meant = Session(graph, threads=1)(x), evaluate(graph, {"x0": x})[y]
    np.testing.assert_allclose(got, meant, rtol=1e-5, atol=1e-5)
    assert np.abs(got[:4]).max() > 1


@pytest.mark.parametrize("shape", [(6, 70), (2, 3, 5, 14)])
def test_sums_that_leave_float32_on_their_way(shape: tuple[int, ...]) -> None:
    """Of rows, and of columns."""
    axes = ints(*range(2, len(shape))) if len(shape) > 2 else ints(1)
    net = Net()
    names = ("ReduceSum", "ReduceMean", "ReduceL2", "ReduceMax")
    x = net.input(*shape)
    outputs = [net(name, x, net.constant(axes), keepdims=0) for name in names]
    given = np.random.default_rng(2).normal(size=(6, 70))
    given *= np.exp2([126, 70, -80, -INF, 0, -149])[:, None]
    given[0, 0], given[4, 5] = -(2.0**127), INF
    given[5, 3] = 2**-149
    given = given.astype(F).reshape(shape)
    wide = given.reshape(6, 70).astype(np.float64)
    sums, norms = wide.sum(1), np.sqrt(np.square(wide).sum(1))
    got = Session(net.graph(*outputs), threads=1).run(x0=given)
    for name, exact in zip(outputs, (sums, sums / 70, norms, wide.max(1)), strict=True):
        size = np.abs(wide).sum(1) if name != outputs[2] else norms
        finite = np.isfinite(exact) & (np.abs(exact) < np.finfo(F).max)
        error = np.abs(got[name].ravel()[finite] - exact[finite])
        assert (error <= 1e-5 * size[finite] + 2.0**-149).all(), name
        with np.errstate(over="ignore"):
            infinite = exact[~finite].astype(F)
        np.testing.assert_array_equal(got[name].ravel()[~finite], infinite)
