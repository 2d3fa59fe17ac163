"""Indices in files: what is read is what was written, or a clear error."""

from __future__ import annotations

import hashlib
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lowbit import VectorIndex
from lowbit.index import _FILE

VECTORS = np.random.default_rng(0).standard_normal((70, 20)).astype(np.float32)


def _index(bits: int = 4, scale: str = "vector", metric: str = "dot") -> VectorIndex:
    index = VectorIndex(20, bits, scale=scale, metric=metric)
    index.add(VECTORS[:50])
    index.add(VECTORS[50:])
    return index


def _same(one: VectorIndex, other: VectorIndex, **given: Any) -> None:
    found, again = (index.search(VECTORS, 3, **given) for index in (one, other))
    for a, b in zip(found, again, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
@pytest.mark.parametrize("scale", ["vector", "dimension"])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_file_serves_as_the_index(bits: int, scale: str, metric: str, tmp_path: Path) -> None:
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


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    _index(scale="dimension", metric="l2").save(tmp_path / "index")
    data = (tmp_path / "index").read_bytes()
    for size in (0, 3, 21, 25, 31, 60, 100, len(data) // 2, len(data) - 1):
        (tmp_path / "cut").write_bytes(data[:size])
        with pytest.raises(ValueError, match="cut"):
            VectorIndex.load(tmp_path / "cut")
    assert (tmp_path / "index").read_bytes() == data
    with pytest.raises(FileNotFoundError):
        VectorIndex.load(tmp_path / "none")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"lowbit vector index 1", b"lowbit vector index 2", "of this version of the format"),
        (b"lowbit vector index 1", b"lowbit packed matrix 1", "is not a vector index"),
        (b'"dim": 20', b'"dim": 21', "its header is not what was written"),
    ],
)
def test_foreign_and_damaged_files_are_refused(
    old: bytes, new: bytes, message: str, tmp_path: Path
) -> None:
    _index().save(tmp_path / "index")
    data = (tmp_path / "index").read_bytes()
    assert old in data
    (tmp_path / "index").write_bytes(data.replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        VectorIndex.load(tmp_path / "index")


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
        {"colour": "red"},
    ],
)
def test_headers_that_contradict_their_arrays_are_refused(
    change: dict[str, Any], tmp_path: Path
) -> None:
    _index().save(tmp_path / "index")
    fields, arrays = _FILE.read(tmp_path / "index")
    assert fields["counts"] == [50, 20]
    _FILE.write(tmp_path / "other", {**fields, **change}, arrays)
    with pytest.raises(ValueError, match="other does not hold together"):
        VectorIndex.load(tmp_path / "other")


@pytest.mark.parametrize("name", ["0.panels", "0.column_sums", "0.scale", "0.bias"])
def test_arrays_that_are_missing_or_of_another_shape_are_refused(name: str, tmp_path: Path) -> None:
    _index(metric="l2").save(tmp_path / "index")
    fields, arrays = _FILE.read(tmp_path / "index")
    _FILE.write(tmp_path / "other", fields, {n: a for n, a in arrays.items() if n != name})
    with pytest.raises(ValueError, match="other does not hold together"):
        VectorIndex.load(tmp_path / "other")
    _FILE.write(tmp_path / "other", fields, {**arrays, name: arrays[name][:-1]})
    with pytest.raises(ValueError, match="other does not hold together"):
        VectorIndex.load(tmp_path / "other")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"float32", [64]', b'"float32", [4611686018427387904, 4]', "truncated: 0.scale ends"),
        (b'"float32", [64]', b'"float32", [-64]', "truncated: 0.scale ends"),
        (b'"float32", [64]', b'"float64", [64]', "damaged header"),
        (b'"float32", [64]', b'"float32", ["x"]', "damaged header"),
        (b'"float32", [64]', b'"float32"', "damaged header"),
        (b'"fields"', b'"field"', "damaged header"),
        (b'{"fields"', b'["fields"', "damaged header"),
    ],
)
def test_headers_with_a_right_digest_and_wrong_content_are_refused(
    old: bytes, new: bytes, message: str, tmp_path: Path
) -> None:
    _index().save(tmp_path / "index")
    first, rest = (tmp_path / "index").read_bytes().split(b"\n", 1)
    length = int.from_bytes(rest[:8], "little")
    text = rest[40 : 40 + length]
    assert hashlib.sha256(text).digest() == rest[8:40]
    assert old in text
    text = text.replace(old, new, 1)
    made = len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + text
    (tmp_path / "other").write_bytes(first + b"\n" + made + rest[40 + length :])
    with pytest.raises(ValueError, match=f"other.*{message}"):
        VectorIndex.load(tmp_path / "other")


def test_scales_of_dimensions_of_another_shape_are_refused(tmp_path: Path) -> None:
    _index(scale="dimension").save(tmp_path / "index")
    fields, arrays = _FILE.read(tmp_path / "index")
    arrays["dimension_scale"] = arrays["dimension_scale"][1:]
    _FILE.write(tmp_path / "other", fields, arrays)
    with pytest.raises(ValueError, match=r"dimension_scale must have shape \(20,\), got \(19,\)"):
        VectorIndex.load(tmp_path / "other")


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "index"
    _index().save(path)
    data = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(data) // 2, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            _index(8).save(path)  # stops half-way
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("refused")))
    with pytest.raises(OSError, match="refused"):
        _index(8).save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["index"]
    assert path.read_bytes() == data
    _same(_index(), VectorIndex.load(path))
