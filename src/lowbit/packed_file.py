"""Packed matrices in files. The layout of panels is the same for every instruction set, so a file
written on one machine serves on any other."""

from __future__ import annotations

import os
from typing import Any

from lowbit.array_file import ArrayFile
from lowbit.packed import PackedMatrix

_FILE = ArrayFile("packed matrix", 2)
_ARRAYS = ("panels", "column_sums", "scale", "zero_points")
_FIELDS = ("K", "N", "dtype", "group_size")


def save_packed(matrix: PackedMatrix, path: str | os.PathLike[str]) -> None:
    """Write a PackedMatrix to `path`, whole or not at all. OSError if that cannot be written."""
    arrays = {n: getattr(matrix, n) for n in _ARRAYS if getattr(matrix, n) is not None}
    _FILE.write(path, {name: getattr(matrix, name) for name in _FIELDS}, arrays)


def load_packed(path: str | os.PathLike[str]) -> PackedMatrix:
    """The PackedMatrix in a file, memory-mapped: pages are read when a product first needs them.

    ValueError, naming the file, if it is of another kind or version, or truncated, or does not
    hold together. FileNotFoundError if there is none.
    """
    name = os.fspath(path)
    fields, arrays = _FILE.read(path)
    parts: dict[str, Any] = {**fields, **arrays}
    try:
        return PackedMatrix(**parts)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} does not hold together: {error}") from None
