"""Which living tensor of torch an address is in, for kernels that get addresses as integers.

`data_ptr()` is noted while a program is watched, so that an address of a tensor that has been freed
is known even where another tensor lies there by now.
"""

from __future__ import annotations

import contextlib
import gc
from bisect import bisect_right
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lowbit_lab.run.memory import NO_TENSOR
from lowbit_lab.run.outcome import UnsupportedError
from lowbit_lab.run.tensor import CheckedTensor

_START = attrgetter("start")
_FREED = "memory of a tensor that was freed before the launch"


class Range(NamedTuple):
    """Addresses of one memory of torch: from `start` up to `end`. storage: the memory, None if it
    was freed; dtype, shape: of a tensor in it."""

    start: int
    end: int
    storage: torch.UntypedStorage | None
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many bytes it has."""
        return self.end - self.start

    def overlaps(self, other: Range) -> bool:
        """Whether both have a byte."""
        return self.start < other.end and other.start < self.end

    @property
    def dims(self) -> tuple[str, ...]:
        """The shape as dimensions of a type."""
        return tuple(map(str, self.shape))


class _Asked(NamedTuple):
    """A tensor whose address a program has asked for: a weak reference to its memory, and where
    that lay."""

    storage: StorageWeakRef
    range: Range


class LivingMemory:
    """What `Memory.owners` is while torch is watched. take: makes a tensor of the checker of a
    range, the same for the same memory."""

    def __init__(self, take: Callable[[Range], CheckedTensor]) -> None:
        self._take = take
        self._asked: dict[int, _Asked] = {}
        self._ranges: list[Range] | None = None
        self._elsewhere = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, addresses that are asked for are noted."""
        original = Tensor.data_ptr

        def data_ptr(tensor: Tensor) -> int:
            address = original(tensor)
            with torch._C.DisableTorchFunction():
                self._note(tensor)
            return address

        with patch.object(Tensor, "data_ptr", data_ptr):
            yield

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Within it, integers are addresses of another device, of whose memory there are copies
        only: to make pointers of them raises UnsupportedError."""
        self._elsewhere = True
        try:
            yield
        finally:
            self._elsewhere = False

    def forget(self) -> None:
        """A launch is over: memory need not be kept alive, and may be freed before the next."""
        self._ranges = None

    def tensor_at(self, address: int) -> CheckedTensor | None:
        """As of `Owners`."""
        if self._elsewhere:
            raise UnsupportedError("it makes pointers of integers, which are a GPU's addresses")
        known = self._at(address)
        return None if known is None or known.storage is None else self._take(known)

    def words(self, address: int) -> str:
        """As of `Owners`."""
        known = self._at(address)
        return NO_TENSOR if known is None or known.storage is not None else _FREED

    def _note(self, tensor: Tensor) -> None:
        if _has_memory(tensor):
            storage = tensor.untyped_storage()
            known = _range_of(tensor)._replace(storage=None)
            self._asked.setdefault(storage._cdata, _Asked(StorageWeakRef(storage), known))

    def _at(self, address: int) -> Range | None:
        if self._ranges is None:
            self._ranges = self._all_ranges()
        number = bisect_right(self._ranges, address, key=_START) - 1
        known = self._ranges[number] if number >= 0 else None
        return known if known is not None and address < known.end else None

    def _all_ranges(self) -> list[Range]:
        """All memory that an address may be in, in order and without overlaps: what is alive and
        was asked for, what was freed, and what else is alive and Python knows."""
        living, freed = list[Range](), list[Range]()
        for storage, known in self._asked.values():
            (freed if storage.expired() else living).append(_now(storage, known))
        others = [
            _range_of(tensor)
            for tensor in gc.get_objects()
            if type(tensor) in (Tensor, torch.nn.Parameter) and _has_memory(tensor)
        ]
        ranges = list[Range]()
        for candidate in (*living, *freed, *others):
            number = bisect_right(ranges, candidate.start, key=_START)
            neighbours = ranges[max(0, number - 1) : number + 1]
            if candidate.size and not any(map(candidate.overlaps, neighbours)):
                ranges.insert(number, candidate)
        return ranges


def _has_memory(tensor: Tensor) -> bool:
    """Whether it is a tensor on the CPU whose elements lie in memory."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    try:
        return tensor.untyped_storage().nbytes() > 0
    except (RuntimeError, NotImplementedError):  # one that functorch wraps has none
        return False


def _range_of(tensor: Tensor) -> Range:
    storage = tensor.untyped_storage()
    start, size = storage.data_ptr(), storage.nbytes()
    whole = tensor.is_contiguous() and tensor.numel() * tensor.element_size() == size
    shape = tuple(tensor.shape) if whole else (size // tensor.element_size(),)
    return Range(start, start + size, storage, tensor.dtype, shape)


def _now(reference: StorageWeakRef, known: Range) -> Range:
    """A range that was noted, by what has become of its memory."""
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    if storage is None:
        return known._replace(storage=None)
    start, size = storage.data_ptr(), storage.nbytes()
    if (start, start + size) == (known.start, known.end):
        return known._replace(storage=storage)
    shape = (size // known.dtype.itemsize,)
    return Range(start, start + size, storage, known.dtype, shape)
