"""Named arrays in one file: written whole or not at all, read by mapping, not by copying.

A file is a first line that names its kind and version, the length of a JSON header in eight
little-endian bytes, the header's SHA-256, the header, and the arrays that it lists, each beginning
at a multiple of 64 bytes, as kernels need it. Numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_LENGTH_BYTES = 8
_DIGEST_BYTES = hashlib.sha256().digest_size
_ALIGNMENT = 64
_LARGEST_HEADER = 1 << 24
_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("int8", "uint8", "int32", "float32")}

Array = npt.NDArray[Any]


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class ArrayFile:
    """A kind of file: what it is called, and the version of its format."""

    kind: str
    version: int

    @property
    def _first_line(self) -> bytes:
        return f"lowbit {self.kind} {self.version}\n".encode()

    def write(
        self, path: str | os.PathLike[str], fields: dict[str, Any], arrays: dict[str, Array]
    ) -> None:
        """Write `fields` (JSON) and `arrays` (int8, uint8, int32, float32) to `path`, whole or not
        at all.

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
                file.write(self._first_line + length + hashlib.sha256(text).digest() + text)
                for array in arrays.values():
                    file.seek(_aligned(file.tell()))
                    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
                    file.write(little.tobytes())
                file.close()
                os.replace(unfinished, target)
            except BaseException:
                os.unlink(unfinished)
                raise

    def read(self, path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Array]]:
        """The fields and arrays that `write` was given; arrays are read-only memory maps.

        ValueError, naming the file, if it is of another kind or version, truncated, or its header
        is damaged; what the arrays hold is not looked at. FileNotFoundError if there is none.
        """
        name = os.fspath(path)
        with open(path, "rb") as file:
            found = file.read(len(self._first_line))
            if found != self._first_line:
                expected = self._first_line.decode().strip()
                raise ValueError(
                    f"{name} is not a {self.kind} of this version of the format: its first line "
                    f"should be {expected!r}, and it begins {found!r}"
                )
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            digest = file.read(_DIGEST_BYTES)
            text = file.read(length) if length <= _LARGEST_HEADER else b""
            if hashlib.sha256(text).digest() != digest:
                raise ValueError(
                    f"{name} is truncated or damaged: its header is not what was written"
                )
            offset, size = file.tell(), os.fstat(file.fileno()).st_size
            # Of this file, whatever is renamed to its name meanwhile.
            mapped = np.memmap(file, np.uint8, "r")
        try:
            header = json.loads(text)
            fields = dict(header["fields"])
            listed = [
                (str(part), _DTYPES[kind], tuple(int(n) for n in shape))
                for part, kind, shape in header["arrays"]
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{name} has a damaged header: {error!r}") from None
        arrays: dict[str, Array] = {}
        for part, dtype, shape in listed:
            begin = _aligned(offset)
            offset = begin + math.prod(shape) * dtype.itemsize
            if min(shape, default=0) < 0 or offset > max(begin, size):
                raise ValueError(f"{name} is truncated: {part} ends at byte {offset} of {size}")
            arrays[part] = mapped[begin:offset].view(dtype).reshape(shape)
        return fields, arrays
