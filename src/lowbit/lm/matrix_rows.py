"""Weights of files, of which some rows are read at a time: how much memory it takes to load a model
follows from bytes that are under way, not from the number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.jit.workspace import aligned_empty
from lowbit.kernels.cpu.shared.layout import PANEL
from lowbit.numerics.formats import dtype_of
from lowbit.numerics.methods import QuantizedWeight
from lowbit.numerics.qtensor import QTensor
from lowbit.registry.locks import Lock, cached_property
from lowbit.weights.packed_rows import pack_rows
from lowbit.weights.panels import PackedMatrix
from lowbit.weights.tensor_file import forget

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Matrix = QuantizedWeight | Floats
"""[N, K], as a file has it."""
_Part = QuantizedWeight | Array

_PART = 1 << 18  # weights that are read together
_PART_BYTES = 24  # that reading and packing one of them takes at most, for a while
_LEAST_UNDER_WAY = 1 << 25  # bytes
_SHARE_UNDER_WAY = 8  # of a file: one of so many parts
_UNIT = 1 << 20  # bytes


@dataclass(frozen=True)
class MatrixRows:
    """A weight [N, K] of a file.

    - read: some rows of it: integers with their scales, or floats in the file's dtype.
    - dtype: of floats; "": integers.
    - forget: gives the pages of a file back that were read for some rows.
    - whole_bytes: of the file, that are read for any rows, as where it is stored by columns.
    """

    shape: tuple[int, ...]
    read: Callable[[slice], _Part]
    dtype: str = ""
    forget: Callable[[slice], None] = lambda _: None
    whole_bytes: int = 0

    @cached_property
    def form(self) -> tuple[Any, ...]:
        """What weights have in common that can be joined."""
        if self.dtype:
            return ("floats",)
        first = self.read(slice(0, 1))
        assert isinstance(first, QuantizedWeight)
        return first.weight.format, first.weight.group_size

    def whole(self) -> Matrix:
        """All rows; floats as float32."""
        part = self.read(slice(0, self.shape[0]))
        return part if isinstance(part, QuantizedWeight) else part.astype(np.float32)

    def parts(self) -> Iterator[tuple[int, _Part]]:
        """All rows, some at a time, each part with its first row's number, a multiple of 16."""
        rows, depth = self.shape
        count = max(1, _PART // max(1, depth) // PANEL) * PANEL
        first = 0
        while first < rows:
            # The last part has no few rows of its own, whose sums NumPy would add up otherwise.
            end = first + count if rows - first - count >= PANEL else rows
            which = slice(first, end)
            yield first, self.read(which)
            self.forget(which)
            first = end
        if self.whole_bytes:
            self.forget(slice(0, rows))

    @property
    def bytes_under_way(self) -> int:
        """What takes memory while it is read."""
        rows, depth = self.shape
        part = max(_PART, 2 * PANEL * depth)
        return self.whole_bytes + _PART_BYTES * min(part, rows * depth)


def rows_of(weight: QuantizedWeight) -> MatrixRows:
    """A weight that is in memory."""
    return MatrixRows(weight.weight.shape, weight.rows)


def floats_of(array: Array) -> MatrixRows:
    """A weight of floats that is mapped."""

    def read(which: slice) -> Array:
        return array[which]

    return MatrixRows(array.shape, read, array.dtype.name, forgetting(array))


def forgetting(*arrays: Array, order: npt.NDArray[np.int64] | None = None) -> Any:
    """What gives the pages of some rows of mapped arrays back; order: which row stands where."""

    def forget_rows(which: slice) -> None:
        if order is not None:
            places = order[which]
            which = slice(int(places.min()), int(places.max()) + 1)
        for array in arrays:
            forget(array[which])

    return forget_rows


def below(parts: Sequence[MatrixRows], experts: int = 1) -> MatrixRows | None:
    """Weights below each other, [sum of N, K]; those of `experts` one expert after another. None if
    they are not of one kind."""
    if len(parts) == 1:
        return parts[0]
    if len({part.form for part in parts}) > 1 or len({part.shape[1] for part in parts}) > 1:
        return None
    pieces = [
        (part, expert * (part.shape[0] // experts), part.shape[0] // experts)
        for expert in range(experts)
        for part in parts
    ]
    ends = np.cumsum([count for _, _, count in pieces])

    def cut(which: slice) -> Iterator[tuple[MatrixRows, slice]]:
        for (part, begin, count), end in zip(pieces, ends.tolist(), strict=True):
            first, last = max(which.start, end - count), min(which.stop, end)
            if first < last:
                at = begin - (end - count)
                yield part, slice(first + at, last + at)

    def read(which: slice) -> _Part:
        return joined([part.read(rows) for part, rows in cut(which)])

    def forget_rows(which: slice) -> None:
        for part, rows in cut(which):
            part.forget(rows)

    dtypes = {part.dtype for part in parts}
    return MatrixRows(
        (int(ends[-1]), parts[0].shape[1]),
        read,
        dtypes.pop() if len(dtypes) == 1 else "float32",
        forget_rows,
        sum(part.whole_bytes for part in parts),
    )


def joined(weights: Sequence[_Part]) -> _Part:
    """Weights of one kind below each other."""
    first = weights[0]
    if len(weights) == 1:
        return first
    if isinstance(first, np.ndarray):
        floats = [weight for weight in weights if isinstance(weight, np.ndarray)]
        if len({weight.dtype for weight in floats}) > 1:
            floats = [weight.astype(np.float32) for weight in floats]
        return np.concatenate(floats)
    parts = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    whole = QTensor(
        np.concatenate([part.weight.values for part in parts]),
        np.concatenate([part.weight.scale for part in parts]),
        np.concatenate([part.weight.zero_point for part in parts]),
        first.weight.format,
        0,
        first.weight.group_size,
    )
    if all(part.zero_point is None for part in parts):
        return QuantizedWeight(whole)
    zeros = [
        part.weight.zero_point.astype(np.float32) if part.zero_point is None else part.zero_point
        for part in parts
    ]
    return QuantizedWeight(whole, np.concatenate(zeros))


# As products on the CPU take them.


def packed(
    weight: MatrixRows, scale: float, quantize: Callable[[Floats], QuantizedWeight] | None
) -> PackedMatrix:
    """A weight, multiplied by a number, in panels. quantize: of floats, what makes integers of some
    rows."""

    def integers(part: _Part) -> QuantizedWeight:
        if not isinstance(part, QuantizedWeight):
            assert quantize is not None
            part = quantize(part.astype(np.float32))
        return scaled(part, scale)

    return pack_rows(
        weight.shape[0], lambda: ((first, integers(part)) for first, part in weight.parts())
    )


def scaled(weight: QuantizedWeight, scale: float) -> QuantizedWeight:
    """A weight, multiplied by a number."""
    if scale == 1:
        return weight
    q = weight.weight
    return replace(weight, weight=replace(q, scale=q.scale * np.float32(scale)))


def columns(weight: MatrixRows, scale: float, groups: int, short: bool) -> Array:
    """A weight [N, K] of floats as products read it, [groups, K, N / groups], multiplied by a
    number: with `short` in its 16 bits, which are not multiplied, else as float32."""
    rows, depth = weight.shape
    dtype, width = np.dtype(np.float32), rows // groups
    if short:
        dtype = dtype_of(weight.dtype)
    target = aligned_empty((groups, depth, width), dtype, lasting=True)
    # Bits of any dtype are moved alike, and NumPy is slow at moving bfloat16.
    bits = target.view(np.uint16) if short else target
    for first, part in weight.parts():
        assert isinstance(part, np.ndarray)
        if short:
            value = part.view(np.uint16)
        else:
            value = part.astype(np.float32)
            value *= np.float32(scale)
        for at, end in _within(first, first + len(value), width):
            group, column = divmod(at, width)
            bits[group, :, column : column + end - at] = value[at - first : end - first].T
    return target


def _within(first: int, end: int, width: int) -> Iterator[tuple[int, int]]:
    """From, to of the pieces of a range that are within groups of so many."""
    while first < end:
        stop = min(end, (first // width + 1) * width)
        yield first, stop
        first = stop


class UnderWay:
    """Bytes that are under way in several threads: whoever would take more than there may be waits
    for others. Who takes more than there may be at all has them all."""

    def __init__(self, file_bytes: int) -> None:
        self._most = max(_LEAST_UNDER_WAY, file_bytes // _SHARE_UNDER_WAY) // _UNIT
        self._free = SimpleQueue[None]()
        self._turn = Lock()  # who takes units takes all, before others do
        self._give(self._most)

    def _give(self, units: int) -> None:
        for _ in range(units):
            self._free.put(None)

    @contextmanager
    def __call__(self, size: int) -> Iterator[None]:
        units = min(self._most, -(-size // _UNIT))
        with self._turn:
            for _ in range(units):
                self._free.get()
        try:
            yield
        finally:
            self._give(units)
