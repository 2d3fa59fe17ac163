"""What a kernel did to memory, access by access: what a view of it draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["load", "store", "atomic"]
Program = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """A line of the kernel's text."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line}"


@dataclass(frozen=True, eq=False)
class Access:
    """One load, store or atomic operation of one program: all its lanes together.

    elements, active, outside and values have one entry for each lane, in the lanes' own shape.
    elements: int64, the element in the tensor's C order; -1 for a lane that is masked or outside.
    active: bool, the lanes whose mask is true. outside: bool, active lanes that touch no element.
    values: what was loaded or stored; step: the number of this access within its program.
    """

    kind: Kind
    tensor: str
    program: Program
    step: int
    place: Place | None
    masked: bool
    elements: NDArray[np.int64]
    active: NDArray[np.bool_]
    outside: NDArray[np.bool_]
    values: NDArray[Any]
    itemsize: int

    @property
    def bytes(self) -> int:
        """The bytes that the active lanes touch."""
        return int(self.active.sum()) * self.itemsize


@dataclass(frozen=True)
class Product:
    """One multiplication of two blocks, as by tl.dot: the shapes of its operands."""

    program: Program
    step: int
    place: Place | None
    left: tuple[int, ...]
    right: tuple[int, ...]


@dataclass(frozen=True)
class TracedTensor:
    """A tensor of the traced run: its shape, strides in elements, and what it is for."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    role: Literal["input", "output"]


@dataclass(frozen=True)
class Trace:
    """Every access of a kernel at one set of sizes, in the order in which it happened.

    least_bytes: each input read once and the output written once.
    """

    kernel: str
    operation: str
    sizes: Mapping[str, int]
    grid: tuple[int, ...]
    tensors: tuple[TracedTensor, ...]
    accesses: tuple[Access, ...]
    products: tuple[Product, ...]
    least_bytes: int
    source: str
    first_line: int

    def bytes(self, kind: Kind) -> int:
        """The bytes of all accesses of this kind."""
        return sum(access.bytes for access in self.accesses if access.kind == kind)

    def reads(self, tensor: str) -> NDArray[np.int64]:
        """How often each element of a tensor is read, in the tensor's shape.

        KeyError if there is no such tensor.
        """
        shapes = {t.name: t.shape for t in self.tensors}
        if tensor not in shapes:
            raise KeyError(f"no tensor {tensor!r}; there are {', '.join(shapes)}")
        counts = np.zeros(int(np.prod(shapes[tensor])), np.int64)
        for access in self.accesses:
            if access.tensor == tensor and access.kind != "store":
                np.add.at(counts, access.elements[access.elements >= 0], 1)
        return counts.reshape(shapes[tensor])
