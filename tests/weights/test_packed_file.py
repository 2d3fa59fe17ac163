"""Packed matrices in files: what is read is what was written, or a clear error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lowbit
from lowbit.weights.packed_file import _FILE
from lowbit.weights.tensor_file import StoredTensor

Change = Callable[[dict[str, Any], dict[str, StoredTensor]], object]


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


def test_groups_of_no_rows(tmp_path: Path) -> None:
    """Of K = 0 there is a group, which holds nothing."""
    nothing = lowbit.quantize(np.zeros((0, 4)), "int4", axis=1, group_size=8, group_axis=0)
    lowbit.save_packed(lowbit.pack(nothing), tmp_path / "b.packed")
    back = lowbit.load_packed(tmp_path / "b.packed")
    assert back.shape == (0, 4)
    assert not back.column_sums.any()
    assert back.quantized().shape == (0, 4)


def _forged(path: Path, change: Change) -> None:
    """The file with other content, and digests that are right."""
    metadata, tensors = _FILE.read(path, verify=True)
    fields = json.loads(metadata["matrix"])
    change(fields, tensors)
    _FILE.write(path, {"matrix": json.dumps(fields)}, tensors)


@pytest.mark.parametrize(
    "change",
    [
        lambda f, t: f.update(K=200),
        lambda f, t: f.update(K=-5),
        lambda f, t: f.update(K=70.0),
        lambda f, t: f.update(K="70"),
        lambda f, t: f.update(K=10**30),
        lambda f, t: f.update(N=True),
        lambda f, t: f.update(N=49),
        lambda f, t: f.update(Q=70),
        lambda f, t: f.pop("group_size"),
        lambda f, t: f.update(dtype="int4"),
        lambda f, t: f.update(dtype="int1"),
        lambda f, t: f.update(dtype=["int8"]),
        lambda f, t: f.update(group_size=8),
        lambda f, t: t.pop("column_sums"),
        lambda f, t: t.pop("panels"),
        lambda f, t: t.update(column_suns=t["column_sums"]),
        lambda f, t: t.update(K=t["column_sums"]),
        lambda f, t: t.update(column_sums=t["scale"]),
        lambda f, t: t.update(zero_points=t["scale"]),
        lambda f, t: t.update(panels=t["panels"]._replace(shape=(2, 48, 64))),
        lambda f, t: t.update(panels=t["panels"]._replace(dtype="F8_E4M3")),
    ],
)
def test_fields_that_contradict_each_other_are_refused(change: Change, tmp_path: Path) -> None:
    path = tmp_path / "b.packed"
    lowbit.save_packed(_matrices()[2], path)
    _forged(path, change)
    with pytest.raises(ValueError, match=r"b\.packed"):
        lowbit.load_packed(path, verify=True)


@pytest.mark.parametrize("group_size", [0, -8, 12, 16.0, 136, 2**70, None])
def test_groups_that_contradict_their_scales_are_refused(group_size: Any, tmp_path: Path) -> None:
    path = tmp_path / "b.packed"
    w = np.random.default_rng(0).standard_normal((70, 33))
    lowbit.save_packed(
        lowbit.pack(lowbit.quantize(w, "int4", axis=1, group_size=16, group_axis=0)), path
    )
    _forged(path, lambda f, t: f.update(group_size=group_size))
    with pytest.raises(ValueError, match=r"b\.packed"):
        lowbit.load_packed(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        lowbit.load_packed(tmp_path / "none")
