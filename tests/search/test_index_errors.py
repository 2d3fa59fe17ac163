"""Bad input to an index of vectors, and unusual input: each has a defined answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lowbit import VectorIndex


def _index(metric: Any = "dot", count: int = 5, **given: Any) -> VectorIndex:
    index = VectorIndex(3, metric=metric, **given)
    index.add(np.random.default_rng(0).standard_normal((count, 3)).astype(np.float32))
    return index


ONES = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 0}, "dim must be an integer of at least 1, got 0"),
        ({"dim": True}, "dim must be an integer"),
        ({"dim": 2.0}, "dim must be an integer"),
        ({"dim": 65_794}, "at most 65793 cannot"),
        ({"dim": 3, "bits": 2}, r"bits must be one of \(8, 4\), got 2"),
        ({"dim": 3, "scale": "row"}, "scale must be one of"),
        ({"dim": 3, "metric": "ip"}, "metric must be one of"),
    ],
)
def test_parameters(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VectorIndex(**arguments)


def test_the_widest_vectors() -> None:
    index = VectorIndex(65_793)
    index.add(np.ones((1, 65_793), np.float32))
    assert index.search(np.ones((1, 65_793), np.float32), 1)[0][0, 0] == pytest.approx(65_793)
    assert VectorIndex(65_794, 4).dim == 65_794


@pytest.mark.parametrize("metric", ["dot", "l2"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite(bad: float, metric: Any) -> None:
    given = np.ones((4, 3), np.float32)
    given[2, 1] = bad
    index = _index(metric)
    with pytest.raises(ValueError, match=rf"vectors\[2, 1\] is {bad}"):
        index.add(given)
    with pytest.raises(ValueError, match=rf"vectors\[2, 1\] is {bad}"):
        VectorIndex(3, scale="dimension").train(given)
    with pytest.raises(ValueError, match=rf"queries\[2, 1\] is {bad}"):
        index.search(given, 1)
    assert len(index) == 5
    originals = np.ones((5, 3), np.float32)
    originals[4, 0] = bad
    with pytest.raises(ValueError, match=rf"rescore\[4, 0\] is {bad}"):
        index.search(ONES, 5, rescore=originals)


def test_nothing_is_added_if_anything_is_wrong() -> None:
    index = _index("l2")
    with pytest.raises(ValueError, match="beyond float32"):
        index.add(np.array([[3e38, 0, -3e38]], np.float32))
    assert len(index) == 5


@pytest.mark.parametrize(
    ("vectors", "kind", "message"),
    [
        (np.ones((2, 4), np.float32), ValueError, r"expected \[n, 3\]"),
        (np.ones(4, np.float32), ValueError, r"shape \(1, 4\).* or \[3\] for one"),
        (np.ones((1, 2, 3), np.float32), ValueError, r"shape \(1, 2, 3\)"),
        (np.ones((2, 3), np.int32), TypeError, "got int32; convert them with astype"),
        ([[1.0, 2.0, 3.0], [1.0]], TypeError, "must be numbers in lists of one length"),
        ([["a", "b", "c"]], TypeError, "must be numbers in lists of one length"),
        (np.full((2, 3), 1e39), ValueError, r"must be within float32, ±3.4e38, got 1e\+39"),
        ("abc", TypeError, "must be a NumPy array or a PyTorch tensor"),
    ],
)
def test_vectors_and_queries_of_another_form(
    vectors: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        _index().add(vectors)
    with pytest.raises(kind, match=message):
        _index().search(vectors, 1)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"k": 0}, ValueError, "k must be at least 1, got 0"),
        ({"k": -3}, ValueError, "k must be at least 1"),
        ({"k": 1.5}, TypeError, "k must be an integer, got 1.5"),
        ({"k": True}, TypeError, "k must be an integer"),
        ({"k": 2, "candidates": 9}, ValueError, "give rescore too"),
        ({"k": 2, "candidates": 1, "rescore": np.ones((5, 3), np.float32)}, ValueError, "least k"),
        ({"k": 2, "candidates": 4.0, "rescore": ONES}, TypeError, "candidates must be an integer"),
        ({"k": 2, "rescore": ONES}, ValueError, r"expected the vectors that are kept, \(5, 3\)"),
        ({"k": 2, "rescore": np.ones((5, 3), int)}, TypeError, "rescore must be of float32, floa"),
        ({"k": 2, "filter": np.ones(4, bool)}, ValueError, "a bool for each of the 5 vectors"),
        ({"k": 2, "filter": [0.5]}, TypeError, "filter must be integers, got float64"),
        ({"k": 2, "filter": [[1]]}, ValueError, "filter must be one-dimensional"),
        ({"k": 2, "threads": 0}, ValueError, "threads must be an integer of at least 1"),
        ({"k": 2, "isa": "mmx"}, ValueError, "no instruction set is called 'mmx'"),
    ],
)
def test_search_arguments(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        _index().search(ONES, **arguments)


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
def test_an_empty_index_and_k_beyond_its_vectors(metric: Any) -> None:
    worst = np.inf if metric == "l2" else -np.inf
    scores, ids = VectorIndex(3, metric=metric).search(ONES, 4)
    assert (ids == -1).all()
    assert (scores == worst).all()
    index = _index(metric)
    for rescore in (None, np.ones((5, 3), np.float32)):
        scores, ids = index.search(ONES, 9, rescore=rescore)
        assert sorted(ids[0, :5].tolist()) == [0, 1, 2, 3, 4]
        assert np.isfinite(scores[:, :5]).all()
        assert (ids[:, 5:] == -1).all()
        assert (scores[:, 5:] == worst).all()
    for empty in (VectorIndex(3, metric=metric), index):
        scores, ids = empty.search(np.ones((0, 3), np.float32), 2)
        assert scores.shape == ids.shape == (0, 2)
    index.add(np.ones((0, 3), np.float32))
    assert len(index) == 5


def test_training() -> None:
    with pytest.raises(ValueError, match="train an empty index"):
        _index(scale="dimension").train(ONES)
    with pytest.raises(ValueError, match="at least one vector"):
        VectorIndex(3, scale="dimension").train(np.ones((0, 3), np.float32))
    VectorIndex(3).train(ONES)


def test_queries_that_are_too_large_beside_the_mean() -> None:
    index = VectorIndex(3, metric="l2")
    index.add(np.full((1, 3), -2e38, np.float32))
    queries = np.ones((3, 3), np.float32)
    queries[1] = 2e38
    with pytest.raises(ValueError, match=r"queries\[1\] beside the mean"):
        index.search(queries, 1)


@pytest.mark.parametrize("rescored", [False, True])
def test_queries_that_are_too_large_for_distances(rescored: bool) -> None:
    """An infinite product would otherwise count as a distance of 0."""
    index = VectorIndex(3, metric="l2")
    originals = np.array([[1, 1, 1], [-1, 0, 1]], np.float32)
    index.add(originals)
    queries = np.ones((4, 3), np.float32)
    queries[2] = 3e38
    with pytest.raises(ValueError, match=r"queries\[2\] times a vector is beyond float32"):
        index.search(queries, 1, rescore=originals if rescored else None)
    assert np.isfinite(index.search(queries / 1e20, 1)[0]).all()


def test_a_search_may_name_the_metric_of_its_index() -> None:
    index = VectorIndex(8, 4, metric="cosine")
    index.add(np.eye(8, dtype=np.float32))
    query = np.eye(8, dtype=np.float32)[:2]
    _, ids = index.search(query, 1, metric="cosine")
    assert ids[:, 0].tolist() == [0, 1]
    with pytest.raises(ValueError, match="made for 'cosine'"):
        index.search(query, 1, metric="l2")


def test_what_was_not_added_has_trained_nothing() -> None:
    index = VectorIndex(3, scale="dimension", metric="l2")
    with pytest.raises(ValueError, match="beyond float32"):
        index.add(np.array([[1e30, 0, 0], [0, 1e30, 0]], np.float32))
    index.add(np.array([[1, 2, 3]], np.float32))
    scores, _ = index.search(np.array([[1, 2, 3]], np.float32), 1)
    assert scores[0, 0] < 1e-5
