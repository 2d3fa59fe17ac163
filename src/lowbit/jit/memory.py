"""Memory that sees every access: what the pointers of an interpreted kernel lead to.

An `Address` is a place in a `Memory`, which loads and stores bytes and judges whether it may.
`ArrayMemory` is the elements of a NumPy array. Others, such as the checker's, which knows who wrote
what, are classes with the same two methods; `Elements` tells them to which element a byte belongs.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

NOBODY = -1
"""Instead of the number of an element: none."""

Bytes = npt.NDArray[np.uint8]


class OutOfBoundsError(IndexError):
    """A kernel text touched memory that belongs to no element of the array."""


@dataclass(frozen=True)
class Access:
    """One load or store: which array, the byte offset from its first element, and how many."""

    kind: str
    array: str
    offset: int
    size: int


def offsets_of(shape: Sequence[int], strides: Sequence[int]) -> npt.NDArray[np.int64]:
    """How far each element is from the first, int64 of this shape, in the unit of the strides."""
    offsets = np.zeros(shape, np.int64)
    for axis, stride in enumerate(strides):
        steps = np.arange(shape[axis]) * stride
        offsets += steps.reshape([-1 if a == axis else 1 for a in range(len(shape))])
    return offsets


class Elements:
    """Which bytes are elements of a strided array, and of which: gaps between them are nobody's.

    Bytes are counted from the first byte of the first element; `low` is the lowest, which negative
    strides put before it. `owner`: for each byte from there on, the element's number in C order.
    """

    def __init__(self, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> None:
        offsets = offsets_of(shape, strides).reshape(-1)
        self.low = int(offsets.min(initial=0))
        size = int(offsets.max(initial=0)) - self.low + itemsize if offsets.size else 0
        self.owner = np.full(size, NOBODY, np.int64)
        for byte in range(itemsize):
            self.owner[offsets - self.low + byte] = np.arange(offsets.size)
        self._begun = dict[int, npt.NDArray[np.int64]]()

    def locate(self, offsets: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
        """The element in which each access of `size` bytes begins; NOBODY where one of its bytes
        belongs to none."""
        if size not in self._begun:
            self._begun[size] = self._beginning(size)
        # The last entry is NOBODY's: of all offsets outside.
        found = self._begun[size]
        first = offsets - self.low
        outside = (first < 0) | (first >= len(found))
        return np.asarray(found[np.where(outside, len(found) - 1, first)])

    def _beginning(self, size: int) -> npt.NDArray[np.int64]:
        """`locate`'s answer for an access that begins at each byte, from the lowest; last, for one
        that begins outside."""
        count = max(0, len(self.owner) - size + 1)
        found = np.full(count + 1, NOBODY, np.int64)
        found[:count] = self.owner[:count]
        for byte in range(1, size):
            found[:count][self.owner[byte : byte + count] == NOBODY] = NOBODY
        return found


class Memory(Protocol):
    """What an address may lead to. Offsets count bytes from where its pointers begin."""

    def load(self, offset: int, size: int) -> Bytes: ...
    def store(self, offset: int, values: Bytes) -> None: ...


class ArrayMemory:
    """A NumPy array of any strides. Accesses are added to `trace`, where there is one."""

    def __init__(self, name: str, array: npt.NDArray[Any], trace: list[Access] | None) -> None:
        elements = Elements(array.shape, array.strides, array.itemsize)
        self.name, self._array, self._trace = name, array, trace
        self._start = -elements.low
        self._mine = elements.owner != NOBODY
        self._has_gaps = not self._mine.all()
        self._bytes = _bytes_of(array, elements.low, len(elements.owner))

    def load(self, offset: int, size: int) -> Bytes:
        """A copy of so many bytes. OutOfBoundsError if one belongs to no element."""
        return self._bytes[self._span("load", offset, size)].copy()

    def store(self, offset: int, values: Bytes) -> None:
        """OutOfBoundsError if a byte belongs to no element, or the array is only read."""
        if not self._array.flags.writeable:
            raise OutOfBoundsError(f"store to {self.name}, which is only read")
        self._bytes[self._span("store", offset, len(values))] = values

    def _span(self, kind: str, offset: int, size: int) -> slice:
        low = self._start + offset
        outside = low < 0 or low + size > len(self._mine)
        if outside or (self._has_gaps and not self._mine[low : low + size].all()):
            array = self._array
            raise OutOfBoundsError(
                f"{kind} of {size} bytes at byte {offset} of {self.name}, an array of "
                f"{array.shape} {array.dtype} with strides {array.strides}"
            )
        if self._trace is not None:
            self._trace.append(Access(kind, self.name, offset, size))
        return slice(low, low + size)


def _bytes_of(array: npt.NDArray[Any], low: int, size: int) -> Bytes:
    """A view of `size` bytes, `low` bytes from an array's first element on."""
    if not size:
        return np.zeros(0, np.uint8)

    class Region:
        __array_interface__: typing.ClassVar = {
            "data": (array.__array_interface__["data"][0] + low, not array.flags.writeable),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }

    return np.asarray(Region())


@dataclass(frozen=True)
class Address:
    """A place in a Memory, in bytes, and the dtype of the elements that it is seen as."""

    memory: Memory
    offset: int
    dtype: np.dtype[Any]

    def __str__(self) -> str:
        return f"byte {self.offset}"

    def moved_bytes(self, count: int) -> Address:
        return Address(self.memory, self.offset + count, self.dtype)

    def load_bytes(self, count: int) -> Bytes:
        return self.memory.load(self.offset, count)

    def store_bytes(self, values: Bytes) -> None:
        self.memory.store(self.offset, values)

    def load(self, count: int) -> npt.NDArray[Any]:
        return self.load_bytes(count * self.dtype.itemsize).view(self.dtype)

    def store(self, values: npt.NDArray[Any]) -> None:
        self.store_bytes(np.ascontiguousarray(values, self.dtype).view(np.uint8))
