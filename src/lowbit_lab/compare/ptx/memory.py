"""The memory of a kernel that is run from its PTX: arrays at addresses of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

REGION_BITS = 40
"""Each array has addresses of its own: its number, in the bits above these."""

SHARED, LOCAL = 1 << 20, 1 << 21
"""The numbers of shared memory and of a thread's own among generic addresses."""


class OutsideError(IndexError):
    """An access touches no element of an array."""


@dataclass
class Memory:
    """Arrays by the numbers of their regions, from 1. names: of their tensors."""

    arrays: list[Array] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def place(self, name: str, array: Array) -> int:
        """Give an array an address. It is changed in place, so it must be contiguous."""
        assert array.flags.c_contiguous
        self.arrays.append(array.reshape(-1).view(np.uint8))
        self.names.append(name)
        return len(self.arrays) << REGION_BITS

    def load(self, addresses: Array, active: Array, size: int) -> Array:
        """Values of `size` bytes as unsigned integers; 0 in lanes that are not active."""
        kind = np.dtype(f"u{size}")
        values = np.zeros(addresses.shape, kind)
        for number, lanes in self._regions(addresses, active):
            held, at = self._elements(number, addresses[lanes], kind)
            values[lanes] = held[at]
        return values

    def store(self, addresses: Array, active: Array, values: Array) -> None:
        """Store unsigned integers; where two lanes store to one element, the last wins."""
        for number, lanes in self._regions(addresses, active):
            held, at = self._elements(number, addresses[lanes], values.dtype)
            held[at] = values[lanes]

    def _regions(self, addresses: Array, active: Array) -> list[tuple[int, Array]]:
        lanes = np.flatnonzero(active)
        if not len(lanes):
            return []
        numbers = addresses[lanes] >> np.uint64(REGION_BITS)
        if (numbers == numbers[0]).all():
            return [(int(numbers[0]), lanes)]
        return [(int(n), lanes[numbers == n]) for n in np.unique(numbers)]

    def _elements(self, number: int, addresses: Array, kind: np.dtype[Any]) -> tuple[Array, Array]:
        offsets = (addresses & np.uint64((1 << REGION_BITS) - 1)).astype(np.int64)
        size = kind.itemsize
        if not 1 <= number <= len(self.arrays):
            raise OutsideError(f"address {int(addresses[0]):#x} belongs to no array")
        array, name = self.arrays[number - 1], self.names[number - 1]
        wrong = (offsets + size > len(array)) | (offsets % size != 0)
        if wrong.any():
            first = int(offsets[wrong][0])
            why = (
                "is not aligned to its size"
                if first % size
                else f"lies outside: it has {len(array)}"
            )
            raise OutsideError(f"{size} bytes at byte {first} of {name}: that {why}")
        whole = len(array) // size * size
        return array[:whole].view(kind), offsets // size


def packed_parameters(kinds: Mapping[str, tuple[str, int]], values: list[Any]) -> dict[str, bytes]:
    """The bytes of each parameter: of kinds (a letter and bits), in order."""
    made: dict[str, bytes] = {}
    for (name, (letter, bits)), value in zip(kinds.items(), values, strict=True):
        if letter == "f":
            made[name] = np.array([value], f"f{bits // 8}").tobytes()
        else:
            made[name] = (int(value) & ((1 << bits) - 1)).to_bytes(bits // 8, "little")
    return made
