"""GGUF files, mapped: metadata, and tensors in the blocks in which they are stored.

The format: a magic number and a version; how many tensors and entries of metadata there are; the
entries, each a name, a type and a value; of each tensor its name, sizes (the nearest in memory
first), type and place; and, from a multiple of `general.alignment` on, the data.

Source: ggml's docs/gguf.md, version 3.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from lowbit.lm.blocks import BLOCKS
from lowbit.lm.naming import naming

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_NUMBERS = {**dict(enumerate("BbHhIif?")), **dict(enumerate("Qqd", 10))}  # as struct has them
_STRING, _ARRAY, _LEAST_STRING = 8, 9, 8  # bytes of a string without letters
_LEAST_ENTRY, _LEAST_TENSOR = 13, 24  # bytes
_MOST_DIMENSIONS = 4
_UNREAD = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
"""Types that are not read, by number: what an error calls them."""


@dataclass(frozen=True)
class StoredMatrix:
    """A tensor as a file holds it.

    - kind: its type's name in GGUF, a key of `BLOCKS`. shape: as NumPy has it, the last axis the
      nearest in memory. data: uint8 [*shape[:-1], bytes of a row], mapped.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]

    def rows(self, which: Any = slice(None)) -> npt.NDArray[np.float32]:
        """Some rows, as the numbers that they stand for, float32."""
        return BLOCKS[self.kind].numbers(self.data[which])


@dataclass(frozen=True)
class Gguf:
    """What is in a file."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredMatrix]


def read(path: str | os.PathLike[str]) -> Gguf:
    """Map a GGUF file.

    ValueError names the field that is damaged: sizes and places are compared with the file before
    memory is taken. NotImplementedError names types of tensors that are not read, and those that
    are.
    """
    with naming(path), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 24:
            raise ValueError(f"{size} bytes are no GGUF file")
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return _Reader(memory).read()


class _Reader:
    """A place in a file."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory, self._size = memory, len(memory)
        self._at = 0
        self._field = "the header"

    def _wrong(self, what: str) -> NoReturn:
        raise ValueError(f"{self._field}: {what}")

    def read(self) -> Gguf:
        if self._memory[:4] != _MAGIC:
            self._wrong(f"it begins with {self._memory[:4]!r}, not with {_MAGIC!r}")
        self._at = 4
        version = self._number("I")
        if version not in _VERSIONS:
            self._wrong(f"version {version} is not read, only {_VERSIONS}")
        tensors, entries = self._count(_LEAST_TENSOR), self._count(_LEAST_ENTRY)
        metadata: dict[str, Any] = {}
        for number in range(entries):
            self._field = f"metadata {number}"
            name = self._field = self._string()
            if name in metadata:
                self._wrong("it is there twice")
            metadata[name] = self._value(self._number("I"))
        self._field = "general.alignment"
        alignment = metadata.get(self._field, 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self._wrong(f"{alignment!r} is no power of two")
        infos = [self._info(number) for number in range(tensors)]
        begin = -(-self._at // alignment) * alignment
        data = np.frombuffer(self._memory, np.uint8)
        found: dict[str, StoredMatrix] = {}
        for name, kind, shape, offset in infos:
            self._field = f"tensor {name!r}"
            if name in found:
                self._wrong("it is there twice")
            block = BLOCKS[kind]
            if shape[-1] % block.elements:
                self._wrong(f"rows of {shape[-1]} are no blocks of {block.elements}")
            row = shape[-1] // block.elements * block.bytes
            size, first = math.prod(shape[:-1]) * row, begin + offset
            if offset % alignment or first + size > self._size:
                self._wrong(f"{size} bytes from {first} on, of a file of {self._size}")
            part = data[first : first + size].reshape(*shape[:-1], row)
            found[name] = StoredMatrix(name, kind, shape, part)
        return Gguf(metadata, found)

    def _info(self, number: int) -> tuple[str, str, tuple[int, ...], int]:
        self._field = f"tensor {number}"
        name = self._string()
        self._field = f"tensor {name!r}"
        rank = self._number("I")
        if not 1 <= rank <= _MOST_DIMENSIONS:
            self._wrong(f"{rank} dimensions")
        shape = tuple(self._number("Q") for _ in range(rank))[::-1]
        if not 0 < math.prod(shape) <= 8 * self._size:  # no type has less than a bit for an element
            self._wrong(f"sizes {shape} in a file of {self._size} bytes")
        code = self._number("I")
        kind = next((name for name, one in BLOCKS.items() if one.code == code), None)
        if kind is None:
            unread = _UNREAD.get(code, f"number {code}, which this lowbit does not know")
            raise NotImplementedError(
                f"{self._field} is of GGUF's type {unread}, which is not read; those "
                f"that are: {', '.join(BLOCKS)}"
            )
        return name, kind, shape, self._number("Q")

    def _take(self, size: int) -> int:
        """Where so many bytes begin, which are there."""
        begin = self._at
        if size > self._size - begin:
            self._wrong(f"{size} bytes are missing at {begin} of {self._size}")
        self._at = begin + size
        return begin

    def _number(self, code: str) -> Any:
        size = struct.calcsize(f"<{code}")
        return struct.unpack_from(f"<{code}", self._memory, self._take(size))[0]

    def _count(self, least: int) -> int:
        """How many things of at least so many bytes follow."""
        count = self._number("Q")
        if count * least > self._size:
            self._wrong(f"a count of {count} in a file of {self._size} bytes")
        return count

    def _string(self) -> str:
        size = self._number("Q")
        begin = self._take(size)
        try:
            return self._memory[begin : begin + size].decode()
        except UnicodeDecodeError as error:
            self._wrong(f"no UTF-8: {error}")

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            self._wrong(f"type {kind} is none of GGUF's")
        inner = self._number("I")
        if inner in _NUMBERS:
            code = _NUMBERS[inner]
            count = self._count(struct.calcsize(f"<{code}"))
            begin = self._take(count * struct.calcsize(f"<{code}"))
            return list(struct.unpack_from(f"<{count}{code}", self._memory, begin))
        if inner != _STRING:
            self._wrong(f"an array of type {inner}")
        return self._strings(self._count(_LEAST_STRING))

    def _strings(self, count: int) -> list[str]:
        """So many strings: a vocabulary has hundreds of thousands."""
        memory, at, end = self._memory, self._at, self._size
        length: Callable[..., tuple[int]] = struct.Struct("<Q").unpack_from
        made: list[str] = []
        try:
            for _ in range(count):
                (size,) = length(memory, at)
                at += 8
                if size > end - at:
                    self._wrong(f"a string of {size} bytes at {at} of {end}")
                made.append(memory[at : at + size].decode())
                at += size
        except struct.error:
            self._wrong(f"strings are missing at {at} of {end}")
        except UnicodeDecodeError as error:
            self._wrong(f"no UTF-8: {error}")
        self._at = at
        return made
