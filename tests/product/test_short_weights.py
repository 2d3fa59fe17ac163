"""Products of float32 with weights of 16 bits, which are widened when they are read, are those with
the same numbers as float32, to the bit: in each way in which a product can be cut."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lowbit import isa as instruction_sets
from lowbit.graph.graph import Graph, Node, Tensor
from lowbit.graph.session import Session
from lowbit.product.gemm import factors, prepare_fitting
from lowbit.product.product import Layout

DTYPES = [np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)]
RNG = np.random.default_rng(0)
# Few rows with all of K at once, in slices, with columns that are packed, and tails of everything.
SHAPES = [(1, 70, 33), (3, 130, 100), (40, 33, 65)]
LARGE = [(1, 2048, 4096), (2, 300, 1000), (33, 576, 577), (200, 576, 1536), (7, 64, 5000)]


def drawn(shape: tuple[int, int], dtype: np.dtype[Any]) -> Any:
    """Numbers of all sizes, denormal ones too."""
    return (RNG.standard_normal(shape) * 10.0 ** RNG.integers(-8, 4, shape)).astype(dtype)


def product(a: Any, b: Any, isa: str, threads: int, alpha: float) -> Any:
    out = np.full((len(a), b.shape[1]), np.nan, np.float32)
    layouts = (tuple(Layout.of(array)) for array in (a, b))
    prepared = prepare_fitting(*layouts, None, tuple(Layout.of(out)), threads, isa)
    assert prepared.launches
    prepared.run({"a": a, "b": b, "c": None, "out": out, **factors(alpha, 0.0)})
    return out


def check(shape: tuple[int, int, int], dtype: np.dtype[Any], isa: str, order: str) -> None:
    m, k, n = shape
    a = RNG.standard_normal((m, k)).astype(np.float32)
    short = np.array(drawn((k, n), dtype), order=order)  # type: ignore[call-overload]
    wide = np.array(short.astype(np.float32), order=order)  # type: ignore[call-overload]
    expected = product(a, wide, isa, 1, 0.5)
    for threads in (1, 3):
        assert product(a, short, isa, threads, 0.5).tobytes() == expected.tobytes()


@pytest.mark.deep
@pytest.mark.parametrize("isa", instruction_sets.available())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", SHAPES + LARGE, ids=str)
def test_products_are_those_of_float32(
    shape: tuple[int, int, int], order: str, dtype: np.dtype[Any], isa: str
) -> None:
    check(shape, dtype, isa, order)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_those_of_float32_here(dtype: np.dtype[Any]) -> None:
    check((2, 70, 33), dtype, instruction_sets.active(None).name, "C")


@pytest.mark.parametrize("columns", [3, 40])
def test_networks_take_weights_of_16_bits(columns: int) -> None:
    """Of few columns as well, which products do not read as they lie; with a factor and a bias."""
    weight = drawn((columns, 24), DTYPES[0])
    bias = RNG.standard_normal(columns).astype(np.float32)
    x = RNG.standard_normal((20, 24)).astype(np.float32)
    results = []
    for held in (weight, weight.astype(np.float32), np.asfortranarray(weight)):
        node = Node("Linear", ("x", "w", "b"), ("y",), {"alpha": 0.25})
        tensors = {"x": Tensor("float32", (20, 24))}
        graph = Graph(("x",), ("y",), (node,), {"w": held, "b": bias}, tensors)
        results.append(Session(graph)(x))
    assert len({result.tobytes() for result in results}) == 1
    exact = 0.25 * (x.astype(np.float64) @ weight.astype(np.float64).T) + bias
    scale = np.abs(x).astype(np.float64) @ np.abs(weight.astype(np.float64)).T + np.abs(bias)
    assert (np.abs(results[0] - exact) <= 1e-5 * scale).all()
