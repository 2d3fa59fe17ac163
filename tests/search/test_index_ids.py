"""Ids, removal, filters, range search: against a search that finds everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lowbit import VectorIndex

RNG = np.random.default_rng(11)
VECTORS = RNG.standard_normal((900, 21)).astype(np.float32)
QUERIES = RNG.standard_normal((5, 21)).astype(np.float32)
NAMES = RNG.permutation(10_000)[: len(VECTORS)]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.search.content.MOST", 300)


def _index(bits: Any = 4, metric: Any = "dot", **given: Any) -> VectorIndex:
    index = VectorIndex(21, bits, metric=metric)
    index.add(VECTORS, **given)
    return index


def _same(one: tuple[np.ndarray, ...], other: tuple[np.ndarray, ...]) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("bits", "metric"), [(8, "dot"), (4, "l2")])
def test_a_filter_leaves_what_a_whole_search_finds(bits: Any, metric: Any) -> None:
    index, named = _index(bits, metric), _index(bits, metric, ids=NAMES)
    scores, ids = index.search(QUERIES, len(VECTORS))
    masks = [RNG.random(len(VECTORS)) < share for share in (0.01, 0.11, 0.14, 0.5, 1.0)]
    worst = int(ids[0, -1])
    alone = np.arange(len(VECTORS)) == worst  # which an unfiltered search finds last
    for mask in (*masks, alone, np.zeros(len(VECTORS), np.bool_)):
        found = index.search(QUERIES, 12, filter=mask)
        by_name = RNG.permutation(np.concatenate([NAMES[mask], NAMES[mask][:3], [10_001]]))
        named_scores, names = named.search(QUERIES, 12, filter=by_name)
        np.testing.assert_array_equal(found[0], named_scores)
        np.testing.assert_array_equal(np.where(found[1] < 0, -1, NAMES[found[1]]), names)
        for row in range(len(QUERIES)):
            left = mask[ids[row]]
            count = min(12, int(mask.sum()))
            np.testing.assert_array_equal(found[1][row, :count], ids[row][left][:count])
            np.testing.assert_array_equal(found[0][row, :count], scores[row][left][:count])
            assert (found[1][row, count:] == -1).all()
            assert np.isinf(found[0][row, count:]).all()


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
def test_range_search_finds_all_that_is_better(metric: Any) -> None:
    index = _index(metric=metric, ids=NAMES)
    scores, ids = index.search(QUERIES, len(VECTORS))
    mask = np.isin(index.ids, NAMES[::3])
    near = scores[0, 4] * np.float64(1 - 1e-12), scores[0, 4] * np.float64(1 + 1e-12)
    for radius in (*np.quantile(scores, (0.03, 0.97)), scores[0, 4], *near, -1e30, 1e30, 1e40):
        better = scores < np.float64(radius) if metric == "l2" else scores > np.float64(radius)
        limits, found, names = index.range_search(QUERIES, float(radius))
        np.testing.assert_array_equal(limits, np.cumsum([0, *better.sum(axis=1)]))
        np.testing.assert_array_equal(found, scores[better])
        np.testing.assert_array_equal(names, ids[better])
        some = index.range_search(QUERIES, float(radius), filter=mask)[2]
        np.testing.assert_array_equal(some, ids[better & np.isin(ids, NAMES[::3])])
    for nothing in (VectorIndex(21, metric=metric).range_search(QUERIES, 1e30),
                    index.range_search(QUERIES, 1e30, filter=[])):  # fmt: skip
        assert [part.tolist() for part in nothing] == [[0] * 6, [], []]
    limits, found, names = index.range_search(QUERIES[0], 1.0)
    assert (len(limits), found.dtype, names.dtype) == (2, np.float32, np.int64)
    bads: list[tuple[Any, type[Exception]]] = [
        (np.nan, ValueError), ("1", TypeError), (None, TypeError), (True, TypeError),
    ]  # fmt: skip
    for bad, error in bads:
        with pytest.raises(error, match="radius"):
            index.range_search(QUERIES, bad)


def test_what_is_removed_is_not_found_and_others_keep_their_ids(tmp_path: Path) -> None:
    for index, names in ((_index(), np.arange(len(VECTORS))), (_index(ids=NAMES), NAMES)):
        scores, ids = index.search(QUERIES, len(VECTORS))
        before = index.search(QUERIES, 20)
        gone = np.concatenate([names[:300], names[300:800:3]])  # a whole part among them
        assert index.remove([*gone, *gone[:5], 99_999]) == len(gone)
        assert index.remove(gone) == 0
        assert len(index) == len(VECTORS) - len(gone)
        np.testing.assert_array_equal(index.ids, names[~np.isin(names, gone)])
        stays = ~np.isin(ids, gone)
        expected = scores[stays].reshape(5, -1)[:, :20], ids[stays].reshape(5, -1)[:, :20]
        _same(index.search(QUERIES, 20), expected)
        index.save(tmp_path / "index")
        loaded = VectorIndex.load(tmp_path / "index", verify=True)
        for one in (index, loaded):
            one.add(VECTORS[gone[-1:]] if names is not NAMES else VECTORS[:1])
            assert one.ids[-1] == names.max() + 1  # and not one that was given out
        _same(index.search(QUERIES, 20), loaded.search(QUERIES, 20))
        assert len(before[0]) == 5
        assert index.remove(index.ids) == len(loaded)
        assert (index.search(QUERIES, 2)[1] == -1).all()
        index.add(VECTORS, ids=NAMES)
        np.testing.assert_array_equal(index.search(QUERIES, 1)[1], NAMES[ids[:, :1] % 10_000]
                                      if names is not NAMES else ids[:, :1])  # fmt: skip


@pytest.mark.parametrize(
    ("metric", "scale", "named"),
    [("dot", "vector", False), ("l2", "dimension", True), ("cosine", "vector", True)],
)
def test_one_at_a_time_is_as_all_at_once(metric: Any, scale: Any, named: bool) -> None:
    whole = VectorIndex(21, 4, scale=scale, metric=metric)
    single = VectorIndex(21, 4, scale=scale, metric=metric)
    for index in (whole, single):
        index.train(VECTORS)
    whole.add(VECTORS, ids=NAMES if named else None)
    old = single.search(QUERIES, 3)
    snapshot = single._content
    for number, vector in enumerate(VECTORS):
        single.add(vector, ids=int(NAMES[number]) if named else None)
        if number == 40:
            snapshot = single._content
    _same(whole.search(QUERIES, 40), single.search(QUERIES, 40))
    assert (old[1] == -1).all()
    assert snapshot.count == 41  # and what was written behind it does not count
    single._content = snapshot
    _same(single.search(QUERIES, 5), _first(41, metric, scale, named).search(QUERIES, 5))


def _first(count: int, metric: Any, scale: Any, named: bool) -> VectorIndex:
    index = VectorIndex(21, 4, scale=scale, metric=metric)
    index.train(VECTORS)
    index.add(VECTORS[:count], ids=NAMES[:count] if named else None)
    return index


@pytest.mark.parametrize("scale", ["vector", "dimension"])
@pytest.mark.parametrize("metric", ["dot", "cosine"])
def test_vectors_come_back(metric: Any, scale: Any) -> None:
    index = VectorIndex(21, 8, scale=scale, metric=metric)
    index.add(VECTORS, ids=NAMES)
    wanted = VECTORS
    if metric == "cosine":
        wanted = VECTORS / np.linalg.norm(VECTORS, axis=1, keepdims=True)
    some = RNG.permutation(len(VECTORS))[:50]
    found = index.reconstruct(NAMES[some])
    assert np.abs(found - wanted[some]).max() < np.abs(wanted).max() / 127
    one = index.reconstruct(NAMES[some[3]])
    assert (one.shape, one.dtype) == ((21,), np.float32)
    np.testing.assert_array_equal(one, found[3])
    assert index.reconstruct([]).shape == (0, 21)
    with pytest.raises(KeyError, match="no vector of id 10001"):
        index.reconstruct([NAMES[0], 10_001])


def test_whatever_holds_floats_is_taken() -> None:
    half = VECTORS.astype(np.float16)
    expected = VectorIndex(21, 4)
    expected.add(half.astype(np.float32))
    lists: Any = half.tolist()
    for given in (half, half.astype(np.float64), lists, tuple(map(tuple, lists))):
        index = VectorIndex(21, 4)
        index.add(given)
        _same(index.search(half[:3], 4), expected.search(half[:3].astype(np.float32), 4))
    index.add(VECTORS.astype(ml_dtypes.bfloat16))
    scores, ids = expected.search(half[7], 4)
    _same((scores[None], ids[None]), expected.search(half[7:8], 4))
    assert (scores.shape, ids.shape) == ((4,), (4,))
    _same(expected.search(half[:3], 2, rescore=half), expected.search(lists[:3], 2, rescore=lists))


def test_ids_that_cannot_be() -> None:
    index = _index(ids=NAMES)
    for ids, error, message in (
        ([1], ValueError, "2 vectors have 1 ids"),
        ([-1, 20_000], ValueError, "ids are from 0 on, below .* got -1"),
        ([2**63 - 1, 0], ValueError, "ids are from 0 on, below 2.63 - 1"),
        ([20_000, 20_000], ValueError, "id 20000 is given twice"),
        ([20_000, NAMES[5]], ValueError, f"id {NAMES[5]} is there already"),
        ([0.5, 1.5], TypeError, "ids must be integers, got float64"),
        ([True, False], TypeError, "ids must be integers, got bool"),
    ):
        with pytest.raises(error, match=message):
            index.add(VECTORS[:2], ids=ids)
    assert len(index) == len(VECTORS)
    free = [int(one) for one in range(10_000) if one not in set(NAMES.tolist())][:2]
    index.add(VECTORS[:2], ids=free)
    with pytest.raises(ValueError, match=f"id {free[1]} is there already"):
        index.add(VECTORS[:1], ids=free[1:])
    index.remove(free[1])
    index.add(VECTORS[:1], ids=free[1])
    index.add(VECTORS[:1], ids=2**63 - 2)
    assert index.search(VECTORS[:1], 1, filter=[2**63 - 2])[1] == 2**63 - 2
    with pytest.raises(ValueError, match="no ids are left"):
        index.add(VECTORS[:1])
    plain = _index()
    with pytest.raises(ValueError, match="id 899 is there already"):
        plain.add(VECTORS[:1], ids=[899])
    plain.add(VECTORS[:1], ids=[5000])
    plain.add(VECTORS[:1])
    assert plain.ids[-3:].tolist() == [899, 5000, 5001]
