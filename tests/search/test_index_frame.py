"""Vectors that lie beside a mean, come one by one, repeat, or leave what was trained."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lowbit import VectorIndex

METRICS = ["dot", "cosine", "l2"]


def _vectors(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _nearest(vectors: np.ndarray, queries: np.ndarray, metric: str) -> np.ndarray:
    """The ids of the ten best, in float64."""
    v, q = vectors.astype(np.float64), queries.astype(np.float64)
    if metric == "cosine":
        v /= np.linalg.norm(v, axis=1)[:, None]
        q /= np.linalg.norm(q, axis=1)[:, None]
    scores = q @ v.T
    if metric == "l2":
        scores -= np.square(v).sum(axis=1) / 2
    return np.argsort(-scores, axis=1, kind="stable")[:, :10]


def _recall(ids: np.ndarray, best: np.ndarray) -> float:
    pairs = zip(ids.tolist(), best.tolist(), strict=True)
    return sum(len(set(found) & set(want)) for found, want in pairs) / best.size


# What FAISS's scalar quantizers reach on the same vectors, with 8 and with 4 bits: 1.15.1.
@pytest.mark.parametrize("scale", ["vector", "dimension"])
@pytest.mark.parametrize(("bits", "faiss"), [(8, 0.98), (4, 0.78)])
@pytest.mark.parametrize("mean", [0.0, 10.0, 1000.0])
def test_a_common_mean_costs_no_recall(mean: float, bits: Any, faiss: float, scale: Any) -> None:
    vectors = _vectors(0, 4000, 64) + mean * _vectors(1, 64)
    queries = _vectors(2, 50, 64) + mean * _vectors(1, 64)
    index = VectorIndex(64, bits, scale=scale, metric="l2")
    index.add(vectors)
    assert _recall(index.search(queries, 10)[1], _nearest(vectors, queries, "l2")) >= faiss


@pytest.mark.parametrize(("bits", "least"), [(8, 0.98), (4, 0.75)])
@pytest.mark.parametrize("metric", ["dot", "cosine"])
def test_a_common_direction_costs_no_recall(metric: Any, bits: Any, least: float) -> None:
    centres = 0.8 * _vectors(3, 100, 96) + 3 * _vectors(4, 96)
    rng = np.random.default_rng(5)
    vectors, queries = (
        centres[rng.integers(0, 100, count)] + 0.6 * _vectors(seed, count, 96)
        for seed, count in ((6, 3000), (7, 40))
    )
    index = VectorIndex(96, bits, metric=metric)
    index.add(vectors)
    assert _recall(index.search(queries, 10)[1], _nearest(vectors, queries, metric)) >= least
    elsewhere = _vectors(8, 40, 96)  # queries that do not have the vectors' mean
    assert _recall(index.search(elsewhere, 10)[1], _nearest(vectors, elsewhere, metric)) >= least


def test_dimensions_of_very_different_size_cost_no_recall() -> None:
    size = np.ones(96, np.float32)
    size[:2] = 30
    vectors, queries = _vectors(0, 3000, 96) * size, _vectors(1, 40, 96) * size
    index = VectorIndex(96, 8, metric="l2")
    index.add(vectors)
    assert _recall(index.search(queries, 10)[1], _nearest(vectors, queries, "l2")) > 0.95


@pytest.mark.parametrize("scale", ["vector", "dimension"])
@pytest.mark.parametrize("parts", [(1, 2999), (1,) * 40 + (2960,), (1000, 1000, 1000)])
def test_small_first_additions_cost_no_recall(parts: tuple[int, ...], scale: Any) -> None:
    vectors, queries = _vectors(0, 3000, 64) + 20, _vectors(1, 40, 64) + 20
    best = _nearest(vectors, queries, "l2")
    index = VectorIndex(64, 8, scale=scale, metric="l2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for part in np.split(vectors, np.cumsum(parts)[:-1]):
            index.add(part)
    assert _recall(index.search(queries, 10)[1], best) > 0.97
    np.testing.assert_array_equal(index.search(vectors[:60], 1)[1][:, 0], np.arange(60))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("metric", METRICS)
def test_a_vector_scores_with_itself_what_it_should(metric: Any, bits: Any) -> None:
    vectors = _vectors(0, 500, 48) + _vectors(1, 48)
    index = VectorIndex(48, bits, metric=metric)
    index.add(vectors)
    scores, ids = index.search(vectors[:100], 1)
    want = {
        "dot": np.square(vectors[:100]).sum(axis=1),
        "cosine": np.ones(100),
        "l2": np.zeros(100),
    }
    if metric != "dot":  # a longer vector may score more
        np.testing.assert_array_equal(ids[:, 0], np.arange(100))
        np.testing.assert_allclose(scores[:, 0], want[metric], atol=2e-4)
    assert metric != "cosine" or scores.max() <= 1


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_range_search_has_duplicates(mean: float, bits: Any) -> None:
    distinct = _vectors(0, 400, 40) + np.float32(mean)
    index = VectorIndex(40, bits, metric="l2")
    index.add(np.tile(distinct, (3, 1)))
    limits, _, ids = index.range_search(distinct[:50], 1e-2)
    np.testing.assert_array_equal(limits, 3 * np.arange(51))
    np.testing.assert_array_equal(ids.reshape(50, 3), np.arange(50)[:, None] + [0, 400, 800])


@pytest.mark.parametrize("metric", METRICS)
def test_range_search_has_all_that_search_scores_above(metric: Any) -> None:
    """Its groups are chosen by queries of 8 bits, and none may be passed over."""
    vectors, queries = _vectors(0, 600, 24) * 3 + 1, _vectors(1, 12, 24) + 1
    index = VectorIndex(24, 4, metric=metric)
    index.add(vectors)
    scores, ids = index.search(queries, 600)
    for query, row, names in zip(queries, scores, ids, strict=True):
        radius = float(row[37])
        limits, found, places = index.range_search(query, radius)
        above = row < radius if metric == "l2" else row > radius
        assert limits[1] == above.sum()
        np.testing.assert_array_equal(places, names[above])
        np.testing.assert_array_equal(found, row[above])


def test_what_falls_outside_of_training_is_said() -> None:
    index = VectorIndex(16, 8, metric="l2")
    index.train(_vectors(0, 1000, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        index.add(_vectors(1, 5000, 16))
        index.add(np.concatenate([100 * _vectors(2, 1, 16), _vectors(3, 999, 16)]))  # one of 1,000
    with pytest.warns(UserWarning, match=r"1,000 of 1,000 vectors lie outside.*vectors\[0\] first"):
        index.add(_vectors(4, 1000, 16) + 30)
    with pytest.warns(UserWarning, match="the vector lies outside"):
        index.add(_vectors(5, 1, 16) + 30)
    same = VectorIndex(16)
    same.train(np.ones((3, 16), np.float32))
    with pytest.warns(UserWarning, match="infinitely"):
        same.add(_vectors(6, 10, 16))


def test_few_vectors_may_be_removed_saved_and_added_to(tmp_path: Path) -> None:
    """While an index has few vectors its frame changes, and ids stay."""
    vectors = _vectors(0, 300, 20) + 5
    index = VectorIndex(20, metric="l2")
    index.add(vectors[:3], ids=[7, 3, 5])
    index.remove([3])
    index.save(tmp_path / "index")
    loaded = VectorIndex.load(tmp_path / "index")
    for each in (index, loaded):
        each.add(vectors[3:])
        assert each.ids[:3].tolist() == [7, 5, 8]
        scores, ids = each.search(vectors[[0, 2, 299]], 1)
        assert ids[:, 0].tolist() == [7, 5, 304]
        assert scores.max() < 1e-4


def test_a_query_of_zeros_scores_zero() -> None:
    index = VectorIndex(8, metric="cosine")
    index.add(_vectors(0, 90, 8) + 1)
    scores, ids = index.search(np.zeros((1, 8), np.float32), 5)
    assert (scores == 0).all()
    assert ids[0].tolist() == [0, 1, 2, 3, 4]
