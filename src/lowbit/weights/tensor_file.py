"""Named tensors in safetensors files, whose bytes are aligned for kernels and have digests.

The format is that of the safetensors library, which reads these files: the length of a JSON header
in eight little-endian bytes, the header, and the tensors' bytes without gaps. Beyond that

- the header is padded with spaces so that the tensors begin at a multiple of 64 bytes, and those
  whose size is a multiple of 64 come first, so that they all begin at one: kernels take them as
  they are mapped;
- the metadata hold `format` and `format_version`, `data_sha256`, the digest of all that follows the
  header, and `header_sha256`, that of the header in which this digest itself is 64 zeros.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit.numerics.formats import dtype_of
from lowbit.registry.files import replacing

Array = npt.NDArray[Any]
Put = Callable[[str, npt.NDArray[np.uint8]], None]

_LENGTH_BYTES = 8
_ALIGNMENT = 64
_LARGEST_HEADER = 100_000_000  # as the safetensors library has it
_MOST_DIMENSIONS = 64
_NO_DIGEST = "0" * 64
_NO_DATA_DIGEST = "1" * 64
_BLOCK = 1 << 22
_MAPPED_AROUND = 1 << 21  # bytes: the largest folio of Linux that is no huge page of its own
DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16",
    "F32": "float32", "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
"""What NumPy, with ml_dtypes, and PyTorch call the format's dtypes."""
_NUMPY = {code: dtype_of(name) for code, name in DTYPES.items()}
_CODES = {name: code for code, name in DTYPES.items()}
_ITEM_BYTES = {code: dtype.itemsize for code, dtype in _NUMPY.items()}


class StoredTensor(NamedTuple):
    """A tensor as a file has it: the format's name of its dtype, its shape, and its bytes, uint8
    [size], little-endian and C-contiguous."""

    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, array: Array) -> StoredTensor:
        """An array of one of these dtypes, copied where it does not lie so."""
        code = _CODES[array.dtype.name]
        data = np.ascontiguousarray(array, _NUMPY[code]).reshape(-1).view(np.uint8)
        return cls(code, array.shape, data)

    def numpy(self) -> Array:
        """The array, a view."""
        return self.data.view(_NUMPY[self.dtype]).reshape(self.shape)


@dataclass(frozen=True)
class TensorFile:
    """A kind of file: what its metadata call its format, what users call it, and its version.

    older: versions from before there were digests, that are read as well; earlier: others that are.
    """

    format: str
    title: str
    version: str
    older: tuple[str, ...] = ()
    earlier: tuple[str, ...] = ()

    def write(
        self,
        path: str | os.PathLike[str],
        metadata: Mapping[str, str],
        tensors: Mapping[str, StoredTensor],
    ) -> None:
        """Write the file whole or not at all, as `replacing` does. OSError if that fails."""
        described = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        with self.writing(path, metadata, described) as put:
            for name, tensor in tensors.items():
                put(name, tensor.data)

    @contextmanager
    def writing(
        self,
        path: str | os.PathLike[str],
        metadata: Mapping[str, str],
        described: Mapping[str, tuple[str, tuple[int, ...]]],
    ) -> Iterator[Put]:
        """The same piece by piece, for tensors that are never in memory together: `described` are
        their dtypes, as the format calls them, and shapes. `put(name, bytes)` appends bytes, uint8,
        to a tensor. The file appears when the block ends; ValueError if bytes are missing then.
        """
        sizes = {name: math.prod(s) * _ITEM_BYTES[d] for name, (d, s) in described.items()}
        ordered = sorted(
            described,
            key=lambda name: (sizes[name] % _ALIGNMENT != 0, -_ITEM_BYTES[described[name][0]]),
        )
        ends = list(itertools.accumulate((sizes[name] for name in ordered), initial=0))
        own = {
            "format": self.format,
            "format_version": self.version,
            "header_sha256": _NO_DIGEST,
            "data_sha256": _NO_DATA_DIGEST,
        }
        header: dict[str, Any] = {"__metadata__": {**own, **metadata}}
        for name, offsets in zip(ordered, itertools.pairwise(ends), strict=True):
            dtype, shape = described[name]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        text = json.dumps(header).encode()
        text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
        begin = _LENGTH_BYTES + len(text)
        places = {name: begin + start for name, start in zip(ordered, ends, strict=False)}
        left = dict(sizes)

        with replacing(path) as file:

            def put(name: str, data: npt.NDArray[np.uint8]) -> None:
                if data.nbytes > left[name]:
                    raise ValueError(f"{name!r} has {sizes[name]} bytes, and more are given")
                file.seek(places[name] + sizes[name] - left[name])
                file.write(data.data)
                left[name] -= data.nbytes

            file.write(len(text).to_bytes(_LENGTH_BYTES, "little"))
            yield put
            if missing := [name for name, count in left.items() if count]:
                raise ValueError(f"bytes are missing of {missing[:5]}")
            digest = _digest_of_rest(file, begin)
            text = text.replace(_NO_DATA_DIGEST.encode(), digest, 1)
            file.seek(_LENGTH_BYTES)
            file.write(text.replace(_NO_DIGEST.encode(), _sha256(text), 1))

    def read(
        self, path: str | os.PathLike[str], *, verify: bool, writable: bool = False
    ) -> tuple[dict[str, str], dict[str, StoredTensor]]:
        """The metadata and tensors in a file, which is mapped: pages are read when needed.

        The header is checked in any case, and with `verify` the digest of the tensors too, which
        reads them all. writable: in memory that may be written, without a change of the file.

        ValueError, naming the file, if it is of another kind or version, truncated, longer than it
        says or damaged. FileNotFoundError if there is no file of this name.
        """
        name = os.fspath(path)
        text, data = _mapped(path, writable)
        try:
            metadata, tensors = _parsed(text, data)
            self._check(metadata)
            self._check_digests(metadata, text, data.data if verify else None)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name} cannot be read as a {self.title}: {error}") from None
        return metadata, tensors

    def _check(self, metadata: dict[str, str]) -> None:
        if metadata.get("format") != self.format:
            raise ValueError(
                f"its metadata say format {metadata.get('format')!r}, expected {self.format!r}"
            )
        known = (*self.older, *self.earlier, self.version)
        if metadata.get("format_version") not in known:
            raise ValueError(
                f"it has format version {metadata.get('format_version')!r}; this lowbit reads "
                f"{', '.join(map(repr, known))}: write it again with this version, or load it "
                "with the one that wrote it"
            )

    def _check_digests(
        self, metadata: dict[str, str], text: bytes, data: memoryview | None
    ) -> None:
        """Raise unless the digests are those of the header, and of the data if these are given."""
        said = metadata.get("header_sha256"), metadata.get("data_sha256")
        if said == (None, None) and metadata["format_version"] in self.older:
            return
        header = (said[0] or "").encode()
        if _sha256(text.replace(header, _NO_DIGEST.encode(), 1)) != header:
            raise ValueError("it is damaged: its header is not what was written")
        if data is not None and hashlib.sha256(data).hexdigest() != said[1]:
            raise ValueError("it is damaged: its numbers are not what was written")


def read_tensors(
    path: str | os.PathLike[str], *, writable: bool = False
) -> dict[str, StoredTensor]:
    """The tensors of any safetensors file, whoever wrote it, mapped as `TensorFile.read` does.

    ValueError, naming the file, if it is none, truncated or longer than it says.
    FileNotFoundError if there is no file of this name.
    """
    text, data = _mapped(path, writable)
    try:
        return _parsed(text, np.asarray(data))[1]  # of no class of its own, which is slower
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)} is not a safetensors file: {error}") from None


def forget(array: Array) -> None:
    """Give back the memory into which the part of a file was read, mapped for reading, that an
    array is in; it is read again when it is asked for. Arrays of no file are left alone."""
    owner: Any = array
    while owner is not None and not isinstance(owner, mmap.mmap):
        owner = owner.obj if isinstance(owner, memoryview) else getattr(owner, "base", None)
    if owner is None or not array.nbytes or not hasattr(owner, "madvise"):
        return
    start = np.frombuffer(owner, np.uint8).ctypes.data
    low, high = np.lib.array_utils.byte_bounds(array)
    # With a page that is read, the system maps others around it: as a rule to such multiples.
    begin = max(low // _MAPPED_AROUND * _MAPPED_AROUND, start)
    end = min(-(-high // _MAPPED_AROUND) * _MAPPED_AROUND, start + len(owner))
    owner.madvise(mmap.MADV_DONTNEED, begin - start, end - begin)


def check_names(given: Iterable[str], required: Iterable[str], optional: Iterable[str]) -> None:
    """ValueError unless all that is required is given, and nothing else but what is optional."""
    missing = set(required).difference(given)
    unknown = set(given).difference(required, optional)
    if missing or unknown:
        parts = (("missing", missing), ("unknown", unknown))
        raise ValueError("; ".join(f"{what}: {sorted(names)}" for what, names in parts if names))


def _mapped(path: str | os.PathLike[str], writable: bool) -> tuple[bytes, npt.NDArray[np.uint8]]:
    """The header's text, and all bytes after it."""
    name = os.fspath(path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no file {name!r}")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        begin = _LENGTH_BYTES + length
        if not 2 <= length <= _LARGEST_HEADER or begin > size:
            raise ValueError(
                f"{name} is truncated or not a safetensors file: it has {size} bytes, and its "
                f"first eight stand for a header of {length}"
            )
        text = file.read(length)
        # Of this file, whatever is renamed to its name meanwhile.
        return text, np.memmap(file, np.uint8, "c" if writable else "r")[begin:]


def _digest_of_rest(file: BinaryIO, begin: int) -> bytes:
    """The digest of what follows a header that has been written."""
    digest = hashlib.sha256()
    file.seek(begin)
    while block := file.read(_BLOCK):
        digest.update(block)
    return digest.hexdigest().encode()


def _sha256(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()


def _parsed(
    text: bytes, data: npt.NDArray[np.uint8]
) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    """The metadata, and the tensors as parts of `data`. ValueError if these do not fit together."""
    header = json.loads(text.decode(), object_pairs_hook=_object)
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its metadata are not texts by name")
    found = sorted((*_entry(name, entry), name) for name, entry in header.items())
    tensors: dict[str, StoredTensor] = {}
    begins = [0, *(end for _, end, *_ in found)]
    for before, (begin, end, dtype, shape, name) in zip(begins, found, strict=False):
        if begin != before:
            raise ValueError(f"{name!r} begins at byte {begin}, where {before} is expected")
        tensors[name] = StoredTensor(dtype, shape, data[begin:end])
    if begins[-1] != len(data):
        raise ValueError(
            f"it is truncated or goes on after its end: its tensors have {begins[-1]} bytes, "
            f"and {len(data)} follow the header"
        )
    return metadata, tensors


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("its header has a name twice")
    return result


def _entry(name: str, entry: Any) -> tuple[int, int, str, tuple[int, ...]]:
    """(begin, end, dtype, shape) of a tensor."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the entry of {name!r} is not dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise ValueError(f"{name!r} is of an unknown dtype, {dtype!r:.40}")
    numbers = isinstance(shape, list) and isinstance(offsets, list) and [*shape, *offsets]
    if (
        not numbers
        or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers)
        or len(offsets) != 2
        or len(shape) > _MOST_DIMENSIONS
        # NumPy bounds the product of the sizes that are not 0 as well.
        or math.prod(n for n in shape if n) >= 1 << 60
    ):
        raise ValueError(f"{name!r} has no shape and offsets that a tensor can have")
    begin, end = offsets
    if end - begin != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise ValueError(f"{name!r} has {end - begin} bytes, which its shape and dtype contradict")
    return begin, end, dtype, tuple(shape)
