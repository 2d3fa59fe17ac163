"""Memory for kernels: aligned arrays, and scratch that calls share."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64  # bytes: a cache line, and the widest vector
_ADDRESSABLE = 1 << 56  # bytes: no address of any CPU has more bits


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An uninitialised array whose first byte is at a multiple of 64.

    MemoryError: there is not so much memory, or cannot be.
    """
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    if size > _ADDRESSABLE:
        raise MemoryError(f"an array {shape} of {kind} takes {size} bytes, which no machine has")
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(kind).reshape(shape)


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
