"""Indices in files: what is read is what was written, or a clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lowbit
from lowbit import VectorIndex
from lowbit.search.files import FILE
from lowbit.weights.tensor_file import StoredTensor, TensorFile

VECTORS = np.random.default_rng(0).standard_normal((70, 20)).astype(np.float32)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.search.content.MOST", 50)


def _index(bits: Any = 4, scale: Any = "vector", metric: Any = "dot") -> VectorIndex:
    index = VectorIndex(20, bits, scale=scale, metric=metric)
    index.add(VECTORS[:40])
    index.add(VECTORS[40:])
    return index


def _same(one: VectorIndex, other: VectorIndex, **given: Any) -> None:
    found, again = (index.search(VECTORS, 3, **given) for index in (one, other))
    for a, b in zip(found, again, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
@pytest.mark.parametrize("scale", ["vector", "dimension"])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_file_serves_as_the_index(bits: Any, scale: Any, metric: Any, tmp_path: Path) -> None:
    index = _index(bits, scale, metric)
    index.save(tmp_path / "index")
    loaded = VectorIndex.load(tmp_path / "index")
    assert repr(loaded) == repr(index)
    _same(index, loaded)
    _same(index, loaded, rescore=VECTORS, candidates=10)
    data = (tmp_path / "index").read_bytes()
    for one in (index, loaded):  # which merges what is mapped with what is new
        one.add(VECTORS[:9] / 2)
    _same(index, loaded)
    assert (tmp_path / "index").read_bytes() == data
    loaded.save(tmp_path / "index")  # onto what it is mapped from
    _same(index, VectorIndex.load(tmp_path / "index"))


def test_an_empty_index_is_kept_too(tmp_path: Path) -> None:
    VectorIndex(7, 4, scale="dimension").save(tmp_path / "index")
    loaded = VectorIndex.load(tmp_path / "index")
    assert len(loaded) == 0
    loaded.add(np.ones((3, 7), np.float32))
    assert loaded.search(np.ones((1, 7), np.float32), 1)[1][0, 0] == 0


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        VectorIndex.load(tmp_path / "none")


def _forged(path: Path, change: dict[str, Any], arrays: dict[str, StoredTensor]) -> None:
    """Another file of such content, whose digests are right."""
    metadata, _ = FILE.read(path, verify=True)
    fields = json.loads(metadata["index"]) | change
    FILE.write(path.with_name("other"), {"index": json.dumps(fields)}, arrays)
    with pytest.raises(ValueError, match="other does not hold together"):
        VectorIndex.load(path.with_name("other"))


@pytest.mark.parametrize(
    "change",
    [
        {"dim": 84},
        {"dim": "20"},
        {"bits": 8},
        {"bits": 5},
        {"metric": "l2"},
        {"scale": "dimension"},
        {"counts": [50, 20, 1]},
        {"counts": [50]},
        {"counts": [70, 20]},
        {"counts": [50, -20]},
        {"counts": [50, "20"]},
        {"counts": 70},
        {"counts": {}},
        {"counts": [50, True]},
        {"counts": [50, 10**30]},
        {"dim": True},
        {"dim": 10**30},
        {"metric": ["dot"]},
        {"colour": "red"},
    ],
)
def test_headers_that_contradict_their_arrays_are_refused(
    change: dict[str, Any], tmp_path: Path
) -> None:
    _index().save(tmp_path / "index")
    metadata, arrays = FILE.read(tmp_path / "index", verify=True)
    assert json.loads(metadata["index"])["counts"] == [50, 20]
    _forged(tmp_path / "index", change, arrays)


@pytest.mark.parametrize("name", ["0.panels", "0.column_sums", "0.scale", "0.bias"])
def test_arrays_that_are_missing_or_of_another_shape_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "index"
    _index(metric="l2").save(path)
    _, arrays = FILE.read(path, verify=True)
    _forged(path, {}, {n: a for n, a in arrays.items() if n != name})
    _forged(path, {}, {**arrays, name: StoredTensor.of(arrays[name].numpy()[:-1])})
    _forged(path, {}, {**arrays, f"-{name}": arrays[name]})
    _forged(path, {}, {**arrays, name: arrays["1.panels"]})


def test_frames_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "index"
    _index(scale="dimension").save(path)
    _, arrays = FILE.read(path, verify=True)
    for name in ("centre", "weight", "early"):
        other = arrays[name].numpy()
        if name != "early":
            _forged(path, {}, {n: a for n, a in arrays.items() if n != name})
        _forged(path, {}, {**arrays, name: StoredTensor.of(other[1:])})
        _forged(path, {}, {**arrays, name: StoredTensor.of(other.astype(np.float64))})
        _forged(path, {}, {**arrays, name: StoredTensor.of(other * np.float32(np.nan))})
    _forged(path, {}, {**arrays, "weight": StoredTensor.of(arrays["weight"].numpy() * 0)})
    _forged(path, {"scale": "vector"}, arrays)
    for change in ({"reach": -1.0}, {"reach": "1"}, {"biased": 1}):
        _forged(path, change, arrays)


@pytest.mark.parametrize("metric", ["dot", "l2"])
@pytest.mark.parametrize("scale", ["vector", "dimension"])
def test_files_of_the_version_without_a_mean_are_read(
    scale: Any, metric: Any, tmp_path: Path
) -> None:
    """What version 2 wrote: vectors as scale times integers, for l2 with −|v|²/2 of these."""
    weight = np.linspace(1, 2, 20).astype(np.float32) if scale == "dimension" else None
    codes = lowbit.quantize(VECTORS / (1 if weight is None else weight), "int8", axis=0)
    kept = codes.dequantize() * (1 if weight is None else weight)
    packed = lowbit.pack(lowbit.QTensor(codes.values.T, codes.scale, codes.zero_point,
                                        codes.format, 1))  # fmt: skip
    panels, sums, scales = (np.asarray(array) for array in
                            (packed.panels, packed.column_sums, packed.scale))  # fmt: skip
    columns = len(sums)
    bias = np.zeros(columns, np.float32)
    bias[:70] = -np.square(kept).sum(axis=1) / 2
    arrays = {"0.panels": panels, "0.column_sums": sums, "0.scale": scales}
    if metric == "l2":
        arrays["0.bias"] = bias
    if weight is not None:
        arrays["dimension_scale"] = weight
    fields = {"dim": 20, "bits": 8, "scale": scale, "metric": metric, "counts": [70]}
    old = TensorFile(FILE.format, FILE.title, "2")
    old.write(tmp_path / "old", {"index": json.dumps(fields)},
              {name: StoredTensor.of(array) for name, array in arrays.items()})  # fmt: skip
    index = VectorIndex.load(tmp_path / "old", verify=True)
    np.testing.assert_allclose(index.reconstruct(index.ids), kept, rtol=1e-6)
    queries = VECTORS[:5] + np.float32(0.1)
    scores, ids = index.search(queries, 3)
    exact = queries @ kept.T
    if metric == "l2":
        exact = np.square(queries[:, None] - kept).sum(axis=2)
    np.testing.assert_allclose(scores, np.take_along_axis(exact, ids, 1), rtol=1e-4)
    index.add(VECTORS[:9] / 2)
    index.save(tmp_path / "new")
    _same(index, VectorIndex.load(tmp_path / "new"))
