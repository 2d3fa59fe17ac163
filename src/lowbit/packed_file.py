"""Packed matrices in files: written atomically, read by mapping, not by copying.

A file is a first line that names the format and its version, the length of a JSON header in eight
little-endian bytes, the header's SHA-256, the header, and the arrays that it lists, each beginning
at a multiple of 64 bytes, as the kernels need it. The layout of panels is the same for every
instruction set, so a file written on one machine serves on any other.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.packed import PackedMatrix

_MAGIC = b"lowbit packed matrix 1\n"
_ARRAYS = ("panels", "column_sums", "scale", "zero_points")
_DTYPES = {"panels": "uint8", "column_sums": "int32", "scale": "float32", "zero_points": "int32"}
_LENGTH_BYTES = 8
_START = len(_MAGIC) + _LENGTH_BYTES + hashlib.sha256().digest_size
_ALIGNMENT = 64
_LARGEST_HEADER = 1 << 16


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def save_packed(matrix: PackedMatrix, path: str | os.PathLike[str]) -> None:
    """Write a PackedMatrix to `path`, whole or not at all. OSError if that cannot be written."""
    arrays = {n: getattr(matrix, n) for n in _ARRAYS if getattr(matrix, n) is not None}
    header = {
        "K": matrix.K,
        "N": matrix.N,
        "dtype": matrix.dtype,
        "arrays": {name: list(array.shape) for name, array in arrays.items()},
    }
    text = json.dumps(header).encode()
    target = Path(path)
    # Opened by name, not by tempfile, so that the file's permissions are the user's usual ones.
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
    with open(unfinished, "xb") as file:
        try:
            length = len(text).to_bytes(_LENGTH_BYTES, "little")
            file.write(_MAGIC + length + hashlib.sha256(text).digest() + text)
            for array in arrays.values():
                file.seek(_aligned(file.tell()))
                file.write(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
            file.close()
            os.replace(unfinished, target)
        except BaseException:
            os.unlink(unfinished)
            raise


def load_packed(path: str | os.PathLike[str]) -> PackedMatrix:
    """The PackedMatrix in a file, memory-mapped: pages are read when a product first needs them.

    ValueError, naming the file, if it is of another kind or version, or truncated, or does not
    hold together. FileNotFoundError if there is none.
    """
    name = os.fspath(path)
    with open(path, "rb") as file:
        start = file.read(_START)
        if not start.startswith(_MAGIC):
            raise ValueError(f"{name} is not a packed matrix of this version of the format")
        length = int.from_bytes(start[len(_MAGIC) : len(_MAGIC) + _LENGTH_BYTES], "little")
        text = file.read(length) if length <= _LARGEST_HEADER else b""
        if hashlib.sha256(text).digest() != start[len(_MAGIC) + _LENGTH_BYTES :]:
            raise ValueError(f"{name} is truncated or damaged: its header is not what was written")
        size = os.fstat(file.fileno()).st_size
    try:
        header = json.loads(text)
        shapes = {part: tuple(int(n) for n in header["arrays"][part]) for part in header["arrays"]}
        fields: dict[str, Any] = {name: int(header[name]) for name in ("K", "N")}
        fields["dtype"] = str(header["dtype"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{name} has a damaged header: {error}") from None
    if set(shapes) - set(_ARRAYS) or not {"panels", "column_sums"} <= set(shapes):
        raise ValueError(f"{name} has a damaged header: it lists {sorted(shapes)}")
    fields.update(_mapped(name, _START + length, size, shapes))
    try:
        return PackedMatrix(**fields)
    except ValueError as error:
        raise ValueError(f"{name} does not hold together: {error}") from None


def _mapped(
    name: str, offset: int, size: int, shapes: dict[str, tuple[int, ...]]
) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a file, each where the ones before it end."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for part, shape in shapes.items():
        kind = np.dtype(_DTYPES[part]).newbyteorder("<")
        count = int(np.prod(shape, dtype=np.int64))
        offset = _aligned(offset)
        end = offset + count * kind.itemsize
        if min(shape, default=0) < 0 or end > size:
            raise ValueError(f"{name} is truncated: {part} ends at byte {end} of {size}")
        if count:
            arrays[part] = np.memmap(name, kind, "r", offset, shape)
        else:
            arrays[part] = np.zeros(shape, kind)
        offset = end
    return arrays
