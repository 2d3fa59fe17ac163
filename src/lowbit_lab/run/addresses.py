"""The addresses that a kernel computes with: numbers of no real memory, which say what tensor they
belong to however far a kernel moves them.

A program may pass addresses of real memory too, as integers: in a tensor of them, or as a number.
They become addresses of this kind where a kernel makes pointers of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowbit_lab.run.memory import Memory
from lowbit_lab.run.tensor import CheckedTensor

# Each tensor gets a terabyte of addresses, beyond those of any real memory, and starts in the
# middle of it.
_SPAN = 1 << 40
_START = 1 << 39
_FIRST_SPAN = 1 << 22


def address_of(number: int) -> int:
    """Where the tensor with this number, of those that a kernel reaches, begins."""
    return (_FIRST_SPAN + number) * _SPAN + _START


def numbers_of(addresses: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The number of the tensor that each address belongs to; of real memory a very large one."""
    return addresses // np.uint64(_SPAN) - np.uint64(_FIRST_SPAN)


class Addresses:
    """The addresses of one run. tensors: what they belong to, by number: those that the memory
    begins with, and those that the kernel reaches by integers."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.tensors = list(memory.tensors.values())

    def of_integers(self, data: NDArray[Any]) -> NDArray[np.uint64]:
        """Integers that become pointers: an address in the memory of a living tensor belongs to
        that tensor from now on; others stay as they are. data: of 64 bits, of any shape."""
        addresses = np.ascontiguousarray(data).view(np.uint64)
        foreign = numbers_of(addresses) >= len(self.tensors)
        if self._memory.owners is None or not foreign.any():
            return addresses
        real, places = np.unique(addresses[foreign], return_inverse=True)
        moved = np.array([self._of_integer(int(address)) for address in real], np.uint64)
        addresses = addresses.copy()
        addresses[foreign] = moved[places.reshape(-1)]
        return addresses

    def _of_integer(self, address: int) -> int:
        owners = self._memory.owners
        tensor = None if owners is None else owners.tensor_at(address)
        if tensor is None:
            return address
        return address_of(self._number_of(tensor)) + address - tensor.address

    def _number_of(self, tensor: CheckedTensor) -> int:
        for number, known in enumerate(self.tensors):
            if known is tensor:
                return number
        self.tensors.append(tensor)
        self._memory.tensors[tensor.name] = tensor
        return len(self.tensors) - 1

    def stored(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values that a kernel stores: addresses of tensors as those of real memory, where kernels
        that are launched later find them."""
        if self._memory.owners is None or values.dtype.kind not in "iu" or values.itemsize != 8:
            return values
        addresses = np.ascontiguousarray(values).view(np.uint64)
        for number in np.unique(numbers_of(addresses)):
            if number < len(self.tensors):
                tensor = self.tensors[int(number)]
                offsets = addresses.astype(np.int64) - address_of(int(number))
                inside = (offsets >= 0) & (offsets <= tensor.extent)
                real = (offsets + tensor.address).astype(np.uint64)
                addresses = np.where(inside, real, addresses)
        return addresses.view(values.dtype)
