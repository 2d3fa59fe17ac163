"""Memory for kernels: aligned arrays, results' memory that is used again, scratch of calls."""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64  # bytes: a cache line, and the widest vector
_LARGE_PAGE = 1 << 21  # bytes
_SLAB = 4 * _LARGE_PAGE
_ADDRESSABLE = 1 << 56  # bytes: no address of any CPU has more bits
_RECYCLED = range(32 << 20, (128 << 20) + 1)  # bytes; what is smaller, glibc's malloc keeps itself


def aligned_empty(
    shape: tuple[int, ...], dtype: npt.DTypeLike, *, lasting: bool = False, recycled: bool = False
) -> npt.NDArray[Any]:
    """An uninitialised array whose first byte is at a multiple of 64.

    lasting: it is made once and read often, in large pages, which small ones share. Memory that is
    soon given back is better taken from what the process has already.

    recycled: it is a result, which is put in the memory of an earlier one that is gone, if it is
    large. The system would take that back and clear new memory, which takes longer than to fill it.

    MemoryError: there is not so much memory, or cannot be.
    """
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    if size > _ADDRESSABLE:
        raise MemoryError(f"an array {shape} of {kind} takes {size} bytes, which no machine has")
    if lasting:
        raw = _in_slab(size) if size < _LARGE_PAGE else _in_large_pages(size)
    elif recycled and size in _RECYCLED:
        raw = np.asarray(_Owner(_block(size)))
    else:
        raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(kind).reshape(shape)


def _in_large_pages(size: int) -> npt.NDArray[np.uint8]:
    """Memory for so many bytes, from a multiple of a large page on, of which the kernel is asked to
    make all that are whole pages large ones."""
    try:
        memory = mmap.mmap(-1, size + _LARGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {size} bytes") from error
    raw = np.frombuffer(memory, np.uint8)
    start = -raw.ctypes.data % _LARGE_PAGE
    with suppress(OSError, AttributeError):  # a system that has none
        memory.madvise(mmap.MADV_HUGEPAGE, start, size // _LARGE_PAGE * _LARGE_PAGE)
    return raw[start : start + size]


_slabs: deque[npt.NDArray[np.uint8]] = deque(maxlen=2)


def _in_slab(size: int) -> npt.NDArray[np.uint8]:
    """Memory for so many bytes in a slab of large pages, behind that of other small arrays. A slab
    is gone when all of its arrays are. Who takes one from the deque has it alone; see `_Owner`."""
    rest = np.empty(0, np.uint8)
    with suppress(IndexError):
        rest = _slabs.pop()
    if size > len(rest):
        rest = _in_large_pages(_SLAB)
    _slabs.append(rest[size + -size % ALIGNMENT :])
    return rest[:size]


recycled_empty = partial(aligned_empty, recycled=True)


class _Lease(weakref.ref[Any]):
    """A weak reference to the owner of a block, which becomes free when the owner is gone."""

    __slots__ = ("block",)


class _Owner:
    """What owns the memory of one result. Its arrays and what is made of them keep it alive.

    Then its lease is put with the free ones, by no line of Python, in which Ctrl-C would be lost,
    and without a lock, since a step of a deque is atomic: at any time, in any thread.
    """

    __slots__ = ("__array_interface__", "__weakref__", "lease")

    def __init__(self, block: npt.NDArray[np.uint8]) -> None:
        self.__array_interface__ = block.__array_interface__
        self.lease = _Lease(self, _free.append)
        self.lease.block = block


_free: deque[_Lease] = deque(maxlen=2)  # a loop makes a result while it holds the one before


def _block(size: int) -> npt.NDArray[np.uint8]:
    """A free block of that size or up to twice that, or a new one. No other call gets it."""
    with suppress(IndexError):  # others may take them meanwhile
        for _ in range(len(_free)):
            lease = _free.pop()
            if size <= lease.block.nbytes - ALIGNMENT <= 2 * size:
                return lease.block
            _free.appendleft(lease)
    return np.empty(size + ALIGNMENT, np.uint8)


class Workspace(threading.local):
    """Scratch memory of one Python thread, grown when a call needs more."""

    def __init__(self) -> None:
        self._reserved = self._made(0)

    def reserve(self, size: int) -> tuple[npt.NDArray[np.uint8], int]:
        """At least `size` bytes, aligned to 64, with their address, until the next call.

        Whoever uses the address holds the array: a signal handler may reserve more in between.
        """
        reserved = self._reserved
        if size > len(reserved[0]):
            reserved = self._reserved = self._made(size)
        return reserved

    @staticmethod
    def _made(size: int) -> tuple[npt.NDArray[np.uint8], int]:
        memory = aligned_empty((size,), np.uint8)
        return memory, memory.ctypes.data


workspace = Workspace()
