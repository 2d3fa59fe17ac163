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
        self.size = self.address = 0

    def reserve(self, size: int) -> int:
        """The address of at least `size` bytes, aligned to 64, until the next call."""
        if size > self.size:
            self.memory = aligned_empty((size,), np.uint8)
            self.size, self.address = size, self.memory.ctypes.data
        return self.address


workspace = Workspace()
