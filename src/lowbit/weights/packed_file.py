"""Packed matrices in files. The layout of panels is the same for every instruction set, so a file
written on one machine serves on any other."""

from __future__ import annotations

import json
import os
from typing import Any

from lowbit.weights.panels import PackedMatrix
from lowbit.weights.tensor_file import StoredTensor, TensorFile, check_names

_FILE = TensorFile("lowbit.packed_matrix", "packed matrix", "3")
_ARRAYS = ("panels", "column_sums", "scale", "zero_points")
_FIELDS = ("K", "N", "dtype", "group_size")


def save_packed(matrix: PackedMatrix, path: str | os.PathLike[str]) -> None:
    """Write a PackedMatrix to the safetensors file `path`, whole or not at all.

    OSError if that cannot be done; a file that was there before is then as it was.
    """
    if not isinstance(matrix, PackedMatrix):
        raise TypeError(f"matrix must be packed by lowbit.pack, got {type(matrix).__name__}")
    arrays = {name: getattr(matrix, name) for name in _ARRAYS}
    tensors = {name: StoredTensor.of(a) for name, a in arrays.items() if a is not None}
    fields = {name: getattr(matrix, name) for name in _FIELDS}
    _FILE.write(path, {"matrix": json.dumps(fields)}, tensors)


def load_packed(path: str | os.PathLike[str], *, verify: bool = False) -> PackedMatrix:
    """The PackedMatrix in a file, memory-mapped: pages are read when a product first needs them.

    The header is checked in any case. With `verify` the whole file is read and compared with its
    digest; without, numbers that were damaged on the disk are not noticed.

    ValueError, naming the file, if it is of another kind or version, truncated, damaged, or does
    not hold together. FileNotFoundError if there is none.
    """
    metadata, tensors = _FILE.read(path, verify=verify)
    try:
        fields = json.loads(metadata["matrix"])
        check_names(fields, _FIELDS, ())
        check_names(tensors, _ARRAYS[:2], _ARRAYS[2:])
        arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in tensors.items()}
        return PackedMatrix(**fields, **arrays)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)} does not hold together: {error}") from None
