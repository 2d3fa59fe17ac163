"""A tensor in storage of its own, with a note for each element of who touched it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lowbit.jit.memory import Elements, offsets_of
from lowbit.spec import DTYPES, Array, Layout, Sizes, TensorType

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
    neither copied nor filled; `start`: the byte of it at which the tensor begins.
    """

    def __init__(
        self, type: TensorType, values: Array, strides: Sequence[int], role: Role,
        initialised: bool = True, storage: NDArray[np.uint8] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.type, self.role = type.name, type, role
        self.shape, self.dtype, self.strides = values.shape, values.dtype, tuple(strides)
        self.itemsize = values.dtype.itemsize
        self.initialised = initialised
        self.start = 0
        self.slots = offsets_of(self.shape, self.strides).reshape(-1)
        self.count = self.slots.size
        steps = [step * self.itemsize for step in self.strides]
        self.elements = Elements(self.shape, steps, self.itemsize)
        self.extent = self.elements.owner.size
        if storage is None:
            storage = np.full(self.elements.owner.size, POISON, np.uint8)
            if initialised:
                storage.view(self.dtype)[self.slots] = values.reshape(-1)
        self.storage = storage
        self.writer = np.full(self.count, NOBODY, np.int64)
        self.reader = np.full(self.count, NOBODY, np.int64)
        self.place = np.full(self.count, NOBODY, np.int64)

    @property
    def key(self) -> int:
        """A number that it shares with its views alone."""
        return id(self.writer)

    @property
    def address(self) -> int:
        """Where its first element lies in this process's memory."""
        return self.storage.ctypes.data

    def forget(self) -> None:
        """What it holds is there before a run that comes now."""
        self.initialised = True
        for one in (self.writer, self.reader, self.place):
            one[:] = NOBODY

    @property
    def values(self) -> Array:
        """The elements now, in the tensor's shape."""
        used = self.storage[: self.elements.owner.size]
        return used.view(self.dtype)[self.slots].reshape(self.shape)

    def index(self, element: int) -> tuple[int, ...]:
        """The index of an element, given in C order."""
        return tuple(int(i) for i in np.unravel_index(element, self.shape)) if self.shape else ()

    def locate(
        self, offsets: NDArray[np.int64], active: NDArray[np.bool_], size: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The element at each byte offset (-1 for none), and which active lanes have none.

        An access of `size` bytes has to lie within elements, and in one if it is as large.
        """
        elements = self.elements.locate(offsets, size)
        astride = (offsets % self.itemsize != 0) & (size == self.itemsize)
        elements[astride | ~active] = -1
        return elements, active & (elements < 0)

    def read(self, offsets: NDArray[np.int64], dtype: np.dtype[Any]) -> Array:
        """The values at byte offsets that are known to be good."""
        where = offsets.reshape(-1, 1) + np.arange(dtype.itemsize)
        return self.storage[where].view(dtype).reshape(offsets.shape)

    def write(self, offsets: NDArray[np.int64], values: Array) -> None:
        """Set the values at byte offsets that are known to be good."""
        where = offsets.reshape(-1, 1) + np.arange(values.dtype.itemsize)
        self.storage[where] = np.ascontiguousarray(values).reshape(-1, 1).view(np.uint8)


class TensorView(CheckedTensor):
    """A part of a checked tensor as one of its own: with the same storage, the same elements and
    the same notes of who touched them. What it does not cover is outside. strides: in elements of
    its dtype; start: the byte in the storage at which it begins."""

    def __init__(
        self, type: TensorType, whole: CheckedTensor, shape: tuple[int, ...],
        strides: Sequence[int], itemsize: int, start: int,
    ) -> None:  # fmt: skip
        vars(self).update(vars(whole))
        self._whole, self.start = whole, start
        self.name, self.type, self.itemsize = type.name, type, itemsize
        self.shape, self.strides = shape, tuple(strides)
        offsets = start + offsets_of(shape, strides).reshape(-1) * self.itemsize
        self.count = offsets.size
        self.extent = int(offsets.max(initial=start - self.itemsize)) - start + self.itemsize
        # Of each element of the whole, the number in this one; NOBODY if it is not covered.
        self._numbers = np.full(whole.count, NOBODY, np.int64)
        for byte in range(0, self.itemsize, min(self.itemsize, whole.itemsize)):
            self._numbers[whole.elements.owner[offsets + byte]] = np.arange(offsets.size)

    @property
    def address(self) -> int:
        return self._whole.address + self.start

    def index(self, element: int) -> tuple[int, ...]:
        number = max(0, int(self._numbers[element]))
        return tuple(int(i) for i in np.unravel_index(number, self.shape)) if self.shape else ()

    def locate(
        self, offsets: NDArray[np.int64], active: NDArray[np.bool_], size: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        elements = self._whole.locate(offsets + self.start, active, size)[0]
        elements[(elements >= 0) & (self._numbers[elements] == NOBODY)] = NOBODY
        return elements, active & (elements < 0)

    def read(self, offsets: NDArray[np.int64], dtype: np.dtype[Any]) -> Array:
        return self._whole.read(offsets + self.start, dtype)

    def write(self, offsets: NDArray[np.int64], values: Array) -> None:
        self._whole.write(offsets + self.start, values)


def tensor_of(
    type_: TensorType, values: Array, layout: Layout, role: Role, initialised: bool = True,
    free: Collection[int] | None = None,
) -> CheckedTensor:  # fmt: skip
    """A fresh tensor that holds these values, or nothing yet, in this layout, so far as the strides
    of the axes in `free` allow (None: of all). Only an input is expanded, and gaps are others for
    each name."""
    stored = values.view(storage_dtype(type_.dtype))
    layout = "rows" if layout == "expanded" and role != "input" else layout
    strides = strides_of(values.shape, layout, 3 + sum(map(ord, type_.name)) % 5, free)
    return CheckedTensor(type_, stored, strides, role, initialised)


def unwritten(type_: TensorType, sizes: Sizes) -> CheckedTensor:
    """A result that was never written."""
    values = np.zeros(type_.shape(sizes), storage_dtype(type_.dtype))
    return tensor_of(type_, values, "contiguous", "output", initialised=False)


def array_of(tensor: Any) -> Array:
    """The elements of a torch tensor in the dtype in which they are kept: bfloat16 as uint16."""
    import torch

    plain = tensor.detach().cpu()
    if tensor.dtype is torch.bfloat16:
        return plain.contiguous().view(torch.int16).numpy().view(np.uint16)
    return plain.numpy()


def dtype_of(tensor: Any) -> str:
    """The name of a torch tensor's dtype, without torch's."""
    return name_of_dtype(tensor.dtype)


def name_of_dtype(dtype: Any) -> str:
    """The name of one of torch's dtypes, without torch's."""
    return str(dtype).removeprefix("torch.")


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """NumPy's dtype for elements of this one: uint16 for bfloat16, as Triton's interpreter has."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def widened(values: Array, dtype: str) -> Array:
    """What stored elements mean: float64, int64 or bool."""
    known = DTYPES[dtype]
    return known.widened(values.view(known.storage))


def strides_of(
    shape: tuple[int, ...], layout: Layout, gap: int = 3, free: Collection[int] | None = None
) -> tuple[int, ...]:
    """Strides in elements. "padded": gaps between elements and rows; "transposed": the axes lie
    in reverse order, with gaps; "rows": gaps between rows; "expanded": besides, one row for all.

    free: the axes whose strides may be any (None: all are). Where some may not, gaps lie only
    between rows, along axes that are free with all before them.
    """
    axes = range(len(shape))
    loose = next((axis for axis in axes if free is not None and axis not in free), len(shape))
    if loose < len(shape) and layout in ("padded", "transposed"):
        layout = "rows"
    strides = [0] * len(shape)
    step = 2 if layout == "padded" else 1
    for axis in axes if layout == "transposed" else reversed(axes):
        strides[axis] = step
        step = step * shape[axis] + (0 if layout == "contiguous" or axis > loose else gap)
    expanded = layout == "expanded" and len(shape) > 1 and loose
    return (0, *strides[1:]) if expanded else tuple(strides)


def strays(dtype: str, shape: tuple[int, ...]) -> Array:
    """What lanes may hold that nobody has given a value, as they are stored: in turn NaN, the
    largest and the lowest number, since a maximum takes no notice of the one or the other."""
    known = DTYPES.get(dtype) or DTYPES["uint8"]
    ends = (known.largest, -known.largest) if known.is_float else (known.high, known.low)
    first = np.nan if known.is_float else known.high // 2
    kept = np.array([first, *ends]).astype(known.storage).view(storage_dtype(known.name))
    return np.resize(kept, shape)


def poison(dtype: np.dtype[Any]) -> Any:
    """A value that should never show in a result: NaN, or a pattern of bits."""
    if dtype.kind == "f":
        return np.nan
    return np.full(dtype.itemsize, POISON, np.uint8).view(dtype)[0] if dtype.kind != "b" else True
