"""Arrays in one file, as an index is kept: written atomically, read by mapping.

A file is a first line that names the format and its version, the length of a JSON header in eight
little-endian bytes, the header's SHA-256, the header, and the arrays that it lists, each beginning
at a multiple of 64 bytes.
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

_MAGIC = b"lowbit vector index 1\n"
_LENGTH_BYTES = 8
_START = len(_MAGIC) + _LENGTH_BYTES + hashlib.sha256().digest_size
_ALIGNMENT = 64
_LARGEST_HEADER = 1 << 24
_DTYPES = ("uint8", "int32", "float32")

Array = npt.NDArray[Any]


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def write(path: str | os.PathLike[str], fields: dict[str, Any], arrays: dict[str, Array]) -> None:
    """Write `fields` (JSON) and `arrays` (uint8, int32, float32) to `path`, whole or not at all.

    OSError if that cannot be done; a file that was there before is then as it was.
    """
    listed = [[name, array.dtype.name, list(array.shape)] for name, array in arrays.items()]
    text = json.dumps({"fields": fields, "arrays": listed}).encode()
    target = Path(path)
    # Opened by name, not by tempfile, so that the file's permissions are the user's usual ones.
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
    with open(unfinished, "xb") as file:
        try:
            length = len(text).to_bytes(_LENGTH_BYTES, "little")
            file.write(_MAGIC + length + hashlib.sha256(text).digest() + text)
            for array in arrays.values():
                file.seek(_aligned(file.tell()))
                little = array.astype(array.dtype.newbyteorder("<"), copy=False)
                file.write(little.tobytes())
            file.close()
            os.replace(unfinished, target)
        except BaseException:
            os.unlink(unfinished)
            raise


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Array]]:
    """What `write` was given; the arrays are read-only and mapped, not copied.

    ValueError, naming the file, if it is of another kind or version, truncated or damaged.
    FileNotFoundError if there is none.
    """
    name = os.fspath(path)
    with open(path, "rb") as file:
        start = file.read(_START)
        if not start.startswith(_MAGIC):
            raise ValueError(f"{name} is not a vector index of this version of the format")
        length = int.from_bytes(start[len(_MAGIC) : len(_MAGIC) + _LENGTH_BYTES], "little")
        text = file.read(length) if length <= _LARGEST_HEADER else b""
        if hashlib.sha256(text).digest() != start[len(_MAGIC) + _LENGTH_BYTES :]:
            raise ValueError(f"{name} is truncated or damaged: its header is not what was written")
        header = json.loads(text)
    mapped = np.memmap(name, np.uint8, "r")
    arrays: dict[str, Array] = {}
    offset = _START + length
    for part, kind, shape in header["arrays"]:
        if kind not in _DTYPES:
            raise ValueError(f"{name} has a damaged header: {part} is of {kind}")
        dtype = np.dtype(kind).newbyteorder("<")
        begin = _aligned(offset)
        offset = begin + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if offset > len(mapped):
            raise ValueError(f"{name} is truncated: {part} ends at byte {offset} of {len(mapped)}")
        arrays[part] = np.asarray(mapped[begin:offset]).view(dtype).reshape(shape)
    return header["fields"], arrays
