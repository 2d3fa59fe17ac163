"""A tensor in storage of its own, with a note for each element of who touched it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lowbit.jit.interpret import offsets_of
from lowbit.spec import DTYPES, Array, Layout, TensorType

Role = Literal["input", "output", "both"]

NOBODY = -1
"""Instead of the number of a program: no program has touched the element."""

POISON = 0xA5
"""What the bytes are that nobody has written."""


class CheckedTensor:
    """A tensor in storage of its own, with a note for each element of who touched it.

    `values` has the tensor's shape and storage dtype (uint16 for bfloat16); `strides` are in
    elements. What lies between the elements belongs to nobody. An output is filled with poison,
    unless `initialised`. `storage`: bytes that are there already and hold the values; they are
    neither copied nor filled.
    """

    def __init__(
        self,
        type: TensorType,
        values: Array,
        strides: Sequence[int],
        role: Role,
        initialised: bool = True,
        storage: NDArray[np.uint8] | None = None,
    ) -> None:
        self.name, self.type, self.role = type.name, type, role
        self.shape, self.dtype, self.strides = values.shape, values.dtype, tuple(strides)
        self.itemsize = values.dtype.itemsize
        self.initialised = initialised
        self.slots = offsets_of(self.shape, self.strides).reshape(-1)
        self.count = self.slots.size
        size = int(self.slots.max(initial=-1)) + 1
        self.element = np.full(size, -1, np.int64)
        self.element[self.slots] = np.arange(self.count)
        if storage is None:
            storage = np.full(size * self.itemsize, POISON, np.uint8)
            if initialised:
                storage.view(self.dtype)[self.slots] = values.reshape(-1)
        self.storage = storage
        self.writer = np.full(self.count, NOBODY, np.int64)
        self.reader = np.full(self.count, NOBODY, np.int64)
        self.place = np.full(self.count, NOBODY, np.int64)

    @property
    def values(self) -> Array:
        """The elements now, in the tensor's shape."""
        used = self.storage[: self.element.size * self.itemsize]
        return used.view(self.dtype)[self.slots].reshape(self.shape)

    def index(self, element: int) -> tuple[int, ...]:
        """The index of an element, given in C order."""
        return tuple(int(i) for i in np.unravel_index(element, self.shape)) if self.shape else ()

    def locate(
        self, offsets: NDArray[np.int64], active: NDArray[np.bool_], size: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The element at each byte offset (-1 for none), and which active lanes have none.

        An access of `size` bytes has to lie within elements from its first byte to its last.
        """
        first, within = np.divmod(offsets, self.itemsize)
        last = (offsets + size - 1) // self.itemsize
        fits = active & (first >= 0) & (last < self.element.size)
        if size == self.itemsize:
            fits &= within == 0
        elements = np.full(offsets.shape, -1, np.int64)
        ends = np.full(offsets.shape, -1, np.int64)
        elements[fits], ends[fits] = self.element[first[fits]], self.element[last[fits]]
        elements[ends < 0] = -1
        return elements, active & (elements < 0)

    def read(self, offsets: NDArray[np.int64], dtype: np.dtype[Any]) -> Array:
        """The values at byte offsets that are known to be good."""
        where = offsets.reshape(-1, 1) + np.arange(dtype.itemsize)
        return self.storage[where].view(dtype).reshape(offsets.shape)

    def write(self, offsets: NDArray[np.int64], values: Array) -> None:
        """Set the values at byte offsets that are known to be good."""
        where = offsets.reshape(-1, 1) + np.arange(values.dtype.itemsize)
        self.storage[where] = np.ascontiguousarray(values).reshape(-1, 1).view(np.uint8)


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """NumPy's dtype for elements of this one: uint16 for bfloat16, as Triton's interpreter has."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def widened(values: Array, dtype: str) -> Array:
    """What stored elements mean: float64, int64 or bool."""
    known = DTYPES[dtype]
    return known.widened(values.view(known.storage))


def strides_of(shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """Strides in elements. "padded": gaps between elements and rows; "transposed": the axes lie
    in reverse order, with a gap."""
    order = range(len(shape)) if layout == "transposed" else range(len(shape) - 1, -1, -1)
    strides = [0] * len(shape)
    step = 2 if layout == "padded" else 1
    for axis in order:
        strides[axis] = step
        step = step * shape[axis] + (0 if layout == "contiguous" else 3)
    return tuple(strides)


def poison(dtype: np.dtype[Any]) -> Any:
    """A value that should never show in a result: NaN, or a pattern of bits."""
    if dtype.kind == "f":
        return np.nan
    return np.full(dtype.itemsize, POISON, np.uint8).view(dtype)[0] if dtype.kind != "b" else True
