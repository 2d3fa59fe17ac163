"""Tensors of more than 2^31 elements, in the address space only: which offsets of 32 bits wrap.

The last program of a grid runs on addresses that are checked and on values that nobody keeps. That
an access leaves its tensor after a sum or product of 32 bits has wrapped is a finding; the same
where nothing leaves one, as in the arithmetic of random numbers, is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lowbit.spec import Array, Operation, Sizes, TensorType
from lowbit_lab.run.findings import Finding, Severity
from lowbit_lab.run.memory import Lanes, Memory
from lowbit_lab.run.tensor import storage_dtype
from lowbit_lab.run.trace import Kind, Place, Program

if TYPE_CHECKING:
    from lowbit_lab.backends.kernel import KernelSubject

BEYOND = 1 << 31
# Along an axis that is not the long one, of all such axes together.
_OTHERS = 1 << 12
# Steps of an interpreter, and lanes along one side of a block, which may follow from the sizes.
_STEPS, _LANES = 20_000, 1 << 18


@dataclass(frozen=True, eq=False)
class Vast:
    """A tensor of which there are only addresses."""

    name: str
    type: TensorType
    count: int
    least: int


class AddressSpace(Memory):
    """Memory that notes only whether an access is inside, and what has wrapped before."""

    follows_wraps = True

    def __init__(self, tensors: Sequence[Any], machinery: Sequence[str]) -> None:
        super().__init__(tensors, machinery=machinery, most_steps=_STEPS)
        self.wraps: list[Place | None] = []
        self.left: tuple[Vast, Place | None] | None = None

    def wrapped(self) -> None:
        """A number of 32 bits has wrapped at the line that runs now."""
        self.wraps.append(self.here())

    def load(
        self, lanes: Lanes, other: Array, *, volatile: bool = False, acquires: bool = False
    ) -> Array:
        self._look(lanes)
        tensor: Any = lanes.tensor
        values = other.copy()
        values[lanes.active] = 1 if values.dtype.kind == "f" else tensor.least
        return values

    def store(self, lanes: Lanes, values: Array) -> None:
        self._look(lanes)

    def update(
        self, lanes: Lanes, values: Array, combine: Callable[[Any, Any], Any], *,
        exchange: bool = False, acquires: bool = True, releases: bool = True,
    ) -> Array:  # fmt: skip
        self._look(lanes)
        return np.zeros(lanes.offsets.shape, values.dtype)

    def outside_of_all(self, kind: Kind, lanes: int, masked: bool, address: int) -> None:
        """Which tensor was meant is not known."""

    def _look(self, lanes: Lanes) -> None:
        self.step()
        tensor: Any = lanes.tensor
        end = tensor.count * storage_dtype(tensor.type.dtype).itemsize
        offsets = lanes.offsets[lanes.active]
        if self.left is None and self.wraps and ((offsets < 0) | (offsets >= end)).any():
            self.left = tensor, self.wraps[-1]


def vast_sizes(operation: Operation) -> Iterator[dict[str, int]]:
    """Sizes at which a tensor has more than 2^31 elements: each of its axes long in turn."""
    seen: list[dict[str, int]] = []
    for tensor in (*operation.inputs, operation.result):
        for name in tensor.names:
            others = [one for one in tensor.names if one != name]
            each = max(1, int(_OTHERS ** (1 / max(1, len(others)))))
            sizes = {**dict.fromkeys(operation.names, 64), **dict.fromkeys(others, each), name: 1}
            sizes = operation.fitted(sizes)
            short = math.prod(tensor.shape(sizes)) // max(1, sizes[name])
            sizes = operation.fitted({**sizes, name: BEYOND // max(1, short) + 4099})
            if math.prod(tensor.shape(sizes)) > BEYOND and sizes not in seen:
                seen.append(sizes)
                yield sizes


def wrapping(subject: KernelSubject) -> Finding | None:
    """The finding that offsets wrap, at the first sizes at which they do; None if they do not, or
    where that is not known."""
    operation, kernel = subject.operation, subject.kernel
    for sizes in vast_sizes(operation):
        tensors = (*operation.inputs, operation.result, *subject.binding.scratch_at(sizes))
        space = AddressSpace([_vast(operation, t, sizes) for t in tensors], kernel.machinery)
        with suppress(Exception):  # a text for other sizes may raise anything, which says nothing
            arguments, grid = subject.arguments_at(sizes), subject.grid_at(sizes)
            blocks = (arguments[one.name] for one in kernel.parameters if one.constant)
            whole = [one for one in blocks if isinstance(one, int)]
            if max(whole, default=1) > _LANES or max(grid[1:]) > 65_535:
                continue
            last: Program = tuple(max(0, n - 1) for n in grid)
            kernel.run(space, arguments, [last], grid)
        if space.left is not None:
            # How bad it is where no specification says that sizes go so far.
            usual: Severity = "warning" if subject.binding.strides_taken else "note"
            return _finding(operation, space.left, sizes, usual)
    return None


def _vast(operation: Operation, type_: TensorType, sizes: Sizes) -> Vast:
    kept = operation.range_of(type_.name, sizes)
    return Vast(type_.name, type_, math.prod(type_.shape(sizes)), kept[0] if kept else 0)


def _finding(
    operation: Operation, left: tuple[Vast, Place | None], sizes: Sizes, usual: Severity
) -> Finding:
    tensor, place = left
    named = ", ".join(f"{name}={size}" for name, size in sizes.items())
    message = (
        f"offsets of 32 bits wrap when {tensor.name} has more than 2^31 elements, as with {named}; "
        "cast what is multiplied first: tl.program_id(0).to(tl.int64)"
    )
    sized = tensor.type.names  # none of a kernel's own memory
    stated = bool(sized) and all(operation.most(name) is not None for name in sized)
    severity = "error" if stated else usual
    return Finding("offset-overflow", message, severity, tensor=tensor.name, place=place)
