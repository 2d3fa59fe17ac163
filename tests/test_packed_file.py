"""Packed matrices in files: what is read is what was written, or a clear error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import lowbit


def _matrices() -> list[lowbit.PackedMatrix]:
    rng = np.random.default_rng(2)
    w = rng.standard_normal((70, 33)) + 0.3
    return [
        lowbit.pack(rng.integers(-128, 128, (5, 3)).astype(np.int8)),
        lowbit.pack(rng.integers(0, 256, (70, 33)).astype(np.uint8)),
        lowbit.pack(lowbit.quantize(w, axis=1)),
        lowbit.pack(lowbit.quantize(w, "uint8", axis=1, symmetric=False)),
        lowbit.pack(np.zeros((0, 4), np.int8)),
    ]


@pytest.mark.parametrize("matrix", _matrices(), ids=repr)
def test_round_trip(matrix: lowbit.PackedMatrix, tmp_path: Path) -> None:
    path = tmp_path / "b.packed"
    lowbit.save_packed(matrix, path)
    back = lowbit.load_packed(path)
    assert repr(back) == repr(matrix)
    assert not back.panels.size or back.addresses[0] % 64 == 0
    for name in ("panels", "column_sums", "scale", "zero_points"):
        np.testing.assert_array_equal(getattr(back, name), getattr(matrix, name))
    a = np.random.default_rng(3).integers(0, 256, (9, matrix.K)).astype(np.uint8)
    if matrix.scale is None:
        np.testing.assert_array_equal(lowbit.matmul(a, back), lowbit.matmul(a, matrix))
    else:
        ours, theirs = (lowbit.matmul_scaled(a, b, a_scale=0.1) for b in (back, matrix))
        np.testing.assert_array_equal(ours, theirs)
    if matrix.panels.size:
        assert isinstance(back.panels, np.memmap)
        with pytest.raises(ValueError, match="read-only"):
            back.panels[...] = 0


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "b.packed"
    lowbit.save_packed(_matrices()[2], path)
    whole = path.read_bytes()
    for size in (0, 1, 22, 25, 31, 60, 200, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"b\.packed"):
            lowbit.load_packed(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"lowbit packed matrix 2", b"lowbit packed matrix 1"),
        (b'"K": 70', b'"K": 99'),
        (b'"K": 70', b'"Q": 70'),
        (b'"dtype": "int8"', b'"dtype": "int4"'),
        (b'"column_sums"', b'"column_suns"'),
        (b'{"K"', b'["K"'),
    ],
)
def test_foreign_and_damaged_files_are_refused(old: bytes, new: bytes, tmp_path: Path) -> None:
    path = tmp_path / "b.packed"
    lowbit.save_packed(_matrices()[2], path)
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    with pytest.raises(ValueError, match=r"b\.packed"):
        lowbit.load_packed(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        lowbit.load_packed(tmp_path / "none")


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "b.packed"
    old, new = _matrices()[:2]
    lowbit.save_packed(old, path)
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        lowbit.save_packed(new, path)
    assert [p.name for p in tmp_path.iterdir()] == ["b.packed"]
    np.testing.assert_array_equal(lowbit.load_packed(path).unpack(), old.unpack())
