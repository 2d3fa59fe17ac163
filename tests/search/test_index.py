"""Search over compressed vectors, against products that are written out and sorted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lowbit
from lowbit import VectorIndex
from lowbit.isa import available
from lowbit.numerics import Range, int_format, quantize_rows
from lowbit.search.codec import Metric
from lowbit.search.groups import Chunk, Queries, group_maxima

RANGES: dict[int, Range] = {8: "minmax", 4: "mse"}


def _vectors(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _clustered(seed: int, count: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Vectors around 200 centres, and queries beside some of them, as embeddings lie."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((200, dim))
    rows = centres[rng.integers(0, 200, count)] + 0.7 * rng.standard_normal((count, dim))
    queries = rows[rng.integers(0, count, 50)] + 0.4 * rng.standard_normal((50, dim))
    return rows.astype(np.float32), queries.astype(np.float32)


def _reference(
    vectors: np.ndarray, queries: np.ndarray, bits: Any, scale: Any, metric: Any
) -> np.ndarray:
    """What all vectors score, float64 [Q, m], from vectors and queries as they are quantized."""
    if metric == "cosine":
        vectors, queries = (
            (x / np.linalg.norm(x.astype(np.float64), axis=1)[:, None]).astype(np.float32)
            for x in (vectors, queries)
        )
    if scale == "vector":
        coded = lowbit.quantize(vectors, int_format(f"int{bits}"), axis=0, range=RANGES[bits])
        stored = coded.dequantize().astype(np.float64)
        weight = np.ones(vectors.shape[1], np.float32)
    else:
        most = 2 ** (bits - 1) - 1
        weight = lowbit.quantize(
            vectors, int_format(f"int{bits}"), axis=1, range=RANGES[bits]
        ).scale
        stored = np.clip(np.rint(vectors / weight), -most, most).astype(np.float64)
    codes, row_scale, zero = quantize_rows(queries * weight, False)
    products = (codes.astype(np.float64) - zero[:, None]) * row_scale[:, None] @ stored.T
    if metric != "l2":
        return products
    lengths = np.square(queries.astype(np.float64)).sum(axis=1)
    return lengths[:, None] - 2 * products + np.square(stored * weight).sum(axis=1)


def _check(found: tuple[np.ndarray, np.ndarray], expected: np.ndarray, metric: Any) -> None:
    """Found are the best of what is expected, in order, with their scores."""
    scores, ids = found
    k = scores.shape[1]
    sign = 1 if metric == "l2" else -1
    budget = 2e-6 * float(np.abs(expected).max())
    np.testing.assert_allclose(
        scores, np.take_along_axis(expected, ids, axis=1), rtol=2e-6, atol=budget
    )
    best = sign * np.sort(sign * expected, axis=1)[:, :k]
    np.testing.assert_allclose(scores, best, rtol=2e-6, atol=budget)
    assert all(len(set(row)) == k for row in ids.tolist())


@pytest.mark.deep(
    "*-avx512_vnni", "8-64-17-avx2", "8-64-17-avx512", "*-amx*", "8-64-17-avx2_vnni", "8-64-17-amx*"
)
@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize(("dim", "count"), [(1, 1), (7, 15), (64, 17), (100, 1000)])
@pytest.mark.parametrize("bits", [8, 4])
def test_maxima_and_search_are_those_of_the_whole_product(
    bits: Any, dim: int, count: int, isa: str
) -> None:
    rng = np.random.default_rng(dim)
    vectors = rng.standard_normal((count, dim)).astype(np.float32)
    packed = lowbit.pack(
        lowbit.quantize(vectors.T, int_format(f"int{bits}"), axis=1, range=RANGES[bits])
    )
    index = VectorIndex(dim, bits)
    index.add(vectors)
    for rows in (1, 2, 5, 11):  # a scan on some sets, a product on others
        queries = rng.standard_normal((rows, dim)).astype(np.float32)
        whole = lowbit.linear_dynamic(queries, packed)
        filled = np.full((rows, -(-count // 16) * 16), -np.inf, np.float32)
        filled[:, :count] = whole
        maxima = group_maxima(Queries(queries, isa=isa), Chunk(packed, None))
        np.testing.assert_array_equal(maxima, filled.reshape(rows, -1, 8).max(axis=2))
        scores, ids = index.search(queries, 10, isa=isa)
        order = np.argsort(-whole, axis=1, kind="stable")[:, :10]
        kept = order.shape[1]
        np.testing.assert_array_equal(ids[:, :kept], order)
        np.testing.assert_array_equal(scores[:, :kept], np.take_along_axis(whole, order, axis=1))
        assert (ids[:, kept:] == -1).all()
        assert (scores[:, kept:] == -np.inf).all()


@pytest.mark.deep("33-8-vector-l2")
@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
@pytest.mark.parametrize("scale", ["vector", "dimension"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dim", [33, 384])
def test_rankings_are_those_of_the_dequantized_vectors(
    dim: int, bits: Any, scale: Any, metric: Any
) -> None:
    vectors = _vectors(1, 701, dim) * (1 + np.arange(dim, dtype=np.float32) / dim)
    queries = _vectors(2, 19, dim) + np.float32(0.3)
    index = VectorIndex(dim, bits, scale=scale, metric=metric)
    if scale == "dimension":
        index.train(vectors)
    for part in np.array_split(vectors, 3):
        index.add(part)
    expected = _reference(vectors, queries, bits, scale, metric)
    for rows in (slice(0, 1), slice(0, 19)):
        _check(index.search(queries[rows], 25), expected[rows], metric)


@pytest.mark.deep("8-dot", "8-l2")
@pytest.mark.parametrize("metric", ["dot", "l2"])
@pytest.mark.parametrize("bits", [8, 4])
def test_several_chunks_and_many_queries(bits: Any, metric: Any) -> None:
    """More vectors than a chunk of 65,536 holds, and more queries than are served together."""
    vectors, queries = _vectors(3, 70_001, 5), _vectors(4, 270, 5)
    calls: list[tuple[int, int]] = []
    index = VectorIndex(5, bits, metric=metric)
    index.add(vectors, progress=lambda done, of: calls.append((done, of)))
    assert calls == [(65_536, 70_001), (70_001, 70_001)]
    assert len(index) == 70_001
    scores, ids = index.search(queries, 13)
    rows = [0, 1, 255, 256, 269]
    expected = _reference(vectors, queries[rows], bits, "vector", metric)
    _check((scores[rows], ids[rows]), expected, metric)
    alone = index.search(queries, 13, threads=1)
    shared = index.search(queries, 13, threads=3)
    for one, other in zip(alone, shared, strict=True):
        np.testing.assert_array_equal(one, other)


def test_many_places_are_kept_for_few_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, queries = _vectors(8, 90, 5), _vectors(9, 11, 5)
    index = VectorIndex(5, 4)
    index.add(vectors)
    together = index.search(queries, 20)
    for places in (1, 40, 59):
        monkeypatch.setattr("lowbit.search.index._PLACES", places)
        for one, other in zip(together, index.search(queries, 20), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("rescored", [False, True])
@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
def test_of_equal_scores_the_lower_id_comes_first(metric: Any, rescored: bool) -> None:
    distinct = _vectors(5, 9, 4)
    vectors = np.tile(distinct, (8000, 1))  # over a chunk's end
    index = VectorIndex(4, 4, metric=metric)
    index.add(vectors)
    query = distinct[:1]
    scores, ids = index.search(query, 50, rescore=vectors if rescored else None)
    assert (scores == scores[0, 0]).all()
    np.testing.assert_array_equal(ids[0], ids[0, 0] + 9 * np.arange(50))
    assert ids[0, 0] < 9


@pytest.mark.parametrize("scale", ["vector", "dimension"])
@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
def test_recall_at_four_bits(metric: Any, scale: Any) -> None:
    """Of the exact ten nearest at least 99 % are found with 40 candidates rescored."""
    vectors, queries = _clustered(6, 4001, 96)
    exact = VectorIndex(96, 8, metric=metric)
    exact.add(vectors)
    everything = {"rescore": vectors, "candidates": len(vectors)}
    best = exact.search(queries, 10, **everything)
    wide, left = vectors.astype(np.float64), queries.astype(np.float64)
    if metric == "cosine":
        wide /= np.linalg.norm(wide, axis=1)[:, None]
        left /= np.linalg.norm(left, axis=1)[:, None]
    scores = left @ wide.T
    if metric == "l2":
        scores -= np.square(wide).sum(axis=1) / 2
    np.testing.assert_array_equal(best[1], np.argsort(-scores, axis=1, kind="stable")[:, :10])
    index = VectorIndex(96, 4, metric=metric, scale=scale)
    index.add(vectors)
    found = index.search(queries, 10, rescore=vectors, candidates=40)
    shared = [len(set(a) & set(b)) for a, b in zip(found[1], best[1], strict=True)]
    assert sum(shared) >= 0.99 * 10 * len(queries)


def test_scores_after_rescoring_are_the_exact_ones() -> None:
    vectors, queries = _clustered(7, 300, 20)
    for metric in ("dot", "cosine", "l2"):
        index = VectorIndex(20, 4, metric=metric)
        index.add(vectors)
        scores, ids = index.search(queries, 3, rescore=vectors)
        wide, left = vectors[ids].astype(np.float64), queries.astype(np.float64)[:, None]
        exact = (wide * left).sum(axis=2)
        if metric == "cosine":
            exact /= np.linalg.norm(wide, axis=2) * np.linalg.norm(left, axis=2)
        if metric == "l2":
            exact = np.square(wide - left).sum(axis=2)
        np.testing.assert_allclose(scores, exact, rtol=1e-6)


def test_vectors_of_nothing_and_the_same_ones_many_times() -> None:
    """A vector of zeros scores 0 under every metric, and the ten best of all equal are ids 0 to 9;
    single vectors, added one at a time, are found as if they had been added together."""
    zeros: dict[Metric, float] = {"dot": 0.0, "cosine": 0.0, "l2": 3.0}
    for metric, zero in zeros.items():
        index = VectorIndex(3, 4, metric=metric)
        for _ in range(20):
            index.add(np.zeros((1, 3), np.float32))
        scores, ids = index.search(np.ones((2, 3), np.float32), 10)
        assert (scores == zero).all()
        np.testing.assert_array_equal(ids, np.tile(np.arange(10), (2, 1)))


def test_values_beyond_the_trained_range_are_clamped() -> None:
    index = VectorIndex(2, 4, scale="dimension")
    index.train(np.array([[7.0, 14.0]], np.float32))
    index.add(np.array([[1000.0, -1e38], [7.0, -14.0]], np.float32))
    scores, ids = index.search(np.array([[1.0, 0.0]], np.float32), 2)
    np.testing.assert_array_equal(ids, [[0, 1]])
    assert scores[0, 0] == scores[0, 1]
