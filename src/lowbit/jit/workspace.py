"""Memory for kernels: aligned arrays, and scratch that calls share."""

from __future__ import annotations

import math
import mmap
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64  # bytes: a cache line, and the widest vector
_LARGE_PAGE = 1 << 21  # bytes
_ADDRESSABLE = 1 << 56  # bytes: no address of any CPU has more bits


def aligned_empty(
    shape: tuple[int, ...], dtype: npt.DTypeLike, *, lasting: bool = False
) -> npt.NDArray[Any]:
    """An uninitialised array whose first byte is at a multiple of 64.

    lasting: it is made once and read often, in large pages where it has whole ones. Memory that is
    soon given back is better taken from what the process has already.

    MemoryError: there is not so much memory, or cannot be.
    """
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    if size > _ADDRESSABLE:
        raise MemoryError(f"an array {shape} of {kind} takes {size} bytes, which no machine has")
    large = lasting and size >= _LARGE_PAGE
    raw = _in_large_pages(size) if large else np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % (_LARGE_PAGE if large else ALIGNMENT)
    return raw[start : start + size].view(kind).reshape(shape)


def _in_large_pages(size: int) -> npt.NDArray[np.uint8]:
    """Memory for so many bytes from the first multiple of a large page on, of which the kernel is
    asked to make all that are whole pages large ones."""
    try:
        memory = mmap.mmap(-1, size + _LARGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {size} bytes") from error
    raw = np.frombuffer(memory, np.uint8)
    with suppress(OSError, AttributeError):  # a system that has none
        start, whole = -raw.ctypes.data % _LARGE_PAGE, size // _LARGE_PAGE * _LARGE_PAGE
        memory.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return raw


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
