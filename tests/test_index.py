"""Search over compressed vectors, against products that are written out and sorted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import lowbit
from lowbit.index import VectorIndex, group_maxima
from lowbit.isa import available


@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize(("dim", "count"), [(1, 1), (7, 15), (64, 17), (100, 1000)])
@pytest.mark.parametrize("bits", [8, 4])
def test_maxima_and_search_are_those_of_the_whole_product(
    bits: int, dim: int, count: int, isa: str
) -> None:
    rng = np.random.default_rng(dim)
    vectors = rng.standard_normal((count, dim)).astype(np.float32)
    queries = rng.standard_normal((5, dim)).astype(np.float32)
    packed = lowbit.pack(lowbit.quantize(vectors.T, f"int{bits}", axis=1))
    whole = lowbit.linear_dynamic(queries, packed)
    filled = np.full((5, -(-count // 16) * 16), -np.inf, np.float32)
    filled[:, :count] = whole
    maxima = group_maxima(queries, packed, isa=isa)
    np.testing.assert_array_equal(maxima, filled.reshape(5, -1, 8).max(axis=2))
    index = VectorIndex(dim, bits)
    index.add(vectors)
    scores, ids = index.search(queries, 10, isa=isa)
    order = np.argsort(-whole, axis=1, kind="stable")[:, :10]
    kept = order.shape[1]
    np.testing.assert_array_equal(ids[:, :kept], order)
    np.testing.assert_array_equal(scores[:, :kept], np.take_along_axis(whole, order, axis=1))
    assert (ids[:, kept:] == -1).all()
    assert (scores[:, kept:] == -np.inf).all()


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
@pytest.mark.parametrize("scale", ["vector", "dimension"])
def test_a_file_serves_as_the_index_and_truncated_ones_are_refused(
    scale: str, metric: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((70, 20)).astype(np.float32)
    index = VectorIndex(20, 4, scale=scale, metric=metric)
    index.add(vectors[:50])
    index.add(vectors[50:])
    index.save(tmp_path / "index")
    scores, ids = index.search(vectors, 1, rescore=vectors, candidates=10)
    if metric != "dot":
        np.testing.assert_array_equal(ids[:, 0], np.arange(70))
    loaded = VectorIndex.load(tmp_path / "index").search(vectors, 1, rescore=vectors, candidates=10)
    np.testing.assert_array_equal(loaded[0], scores)
    np.testing.assert_array_equal(loaded[1], ids)
    data = (tmp_path / "index").read_bytes()
    for size in (3, 60, len(data) // 2, len(data) - 1):
        (tmp_path / "cut").write_bytes(data[:size])
        with pytest.raises(ValueError, match="cut"):
            VectorIndex.load(tmp_path / "cut")
    assert (tmp_path / "index").read_bytes() == data


def test_bad_input_has_a_defined_answer() -> None:
    index = VectorIndex(3, metric="cosine")
    scores, ids = index.search(np.ones((2, 3), np.float32), 2)
    assert (ids == -1).all()
    assert (scores == -np.inf).all()
    bad = np.ones((2, 3), np.float32)
    bad[1, 2] = np.nan
    with pytest.raises(ValueError, match=r"\[1, 2\] is nan"):
        index.add(bad)
    with pytest.raises(ValueError, match=r"expected \[n, 3\]"):
        index.search(np.ones((2, 4), np.float32), 2)
    with pytest.raises(ValueError, match="at least 1"):
        index.search(np.ones((2, 3), np.float32), 0)
    index.add(np.zeros((1, 3), np.float32))
    assert index.search(np.ones((1, 3), np.float32), 1)[0][0, 0] == 0
