"""Tensors of more than 2^31 elements, in the address space only: which offsets of 32 bits wrap.

The last program of a grid runs on addresses that are checked and on values that nobody keeps;
integers that it loads, which may be indices, are at the ends of their range. That an access leaves
its tensor after a sum or product of 32 bits has wrapped is a finding; the same where nothing leaves
one, as in the arithmetic of random numbers, is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from lowbit.spec import Array, Case, Operation, Sizes, TensorType
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
# Elements of an input whose data somebody's own function draws, to find the ends of its range.
_DRAWN = 1 << 20


End = Literal["least", "greatest", "rising"]
"""Which integers a tensor holds: the least of its range everywhere, the greatest, or rising ones,
from the least at its first element to the greatest at its last, as offsets of rows are."""


@dataclass(frozen=True, eq=False)
class Vast:
    """A tensor of which there are only addresses. least, greatest: of the integers that it may
    hold; end: which of them it does."""

    name: str
    type: TensorType
    count: int
    least: int
    greatest: int
    end: End = "least"

    def integers(self, elements: NDArray[np.int64]) -> NDArray[np.int64]:
        """What these elements hold."""
        if self.end != "rising":
            return np.full(elements.shape, self.least if self.end == "least" else self.greatest)
        place = np.clip(elements, 0, self.count - 1) / max(1, self.count - 1)
        return self.least + np.rint(place * (self.greatest - self.least)).astype(np.int64)


class AddressSpace(Memory):
    """Memory that notes only whether an access is inside, and what has wrapped before.

    Where integers are the greatest of their range they may be more together than they ever are, as
    a row's first element and its length: what leaves a tensor then counts if it would be inside
    with a multiple of 2^32 elements more.
    """

    follows_wraps = True

    def __init__(self, tensors: Sequence[Any], machinery: Sequence[str]) -> None:
        super().__init__(tensors, machinery=machinery, most_steps=_STEPS)
        self.loaded = set[str]()
        self._unlikely = any(tensor.end != "least" for tensor in tensors)
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
        if values.dtype.kind == "f":
            values[lanes.active] = 1
        else:
            self.loaded.add(tensor.name)
            size = storage_dtype(tensor.type.dtype).itemsize
            elements = lanes.offsets[lanes.active] // size
            values[lanes.active] = tensor.integers(elements).astype(values.dtype)
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
        size = storage_dtype(tensor.type.dtype).itemsize
        end = tensor.count * size
        offsets = lanes.offsets[lanes.active]
        outside = (offsets < 0) | (offsets >= end)
        if self._unlikely:
            outside &= offsets % (size << 32) < end
        if self.left is None and self.wraps and outside.any():
            self.left = tensor, self.wraps[-1]


def vast_sizes(operation: Operation) -> Iterator[dict[str, int]]:
    """Sizes at which a tensor has more than 2^31 elements: each of its axes long in turn, and the
    others no longer than that needs."""
    seen: list[dict[str, int]] = []
    for tensor in (*operation.inputs, operation.result):
        for name in tensor.names:
            others = [one for one in tensor.names if one != name]
            each = max(1, int(_OTHERS ** (1 / max(1, len(others)))))
            sizes = {**dict.fromkeys(operation.names, 64), **dict.fromkeys(others, each), name: 1}
            sizes = operation.fitted(sizes)
            for longer in (name, *others):
                if math.prod(tensor.shape(sizes)) <= BEYOND:
                    short = math.prod(tensor.shape(sizes)) // max(1, sizes[longer])
                    wanted = max(sizes[longer], BEYOND // max(1, short) + 4099)
                    sizes = operation.fitted({**sizes, longer: wanted})
            if math.prod(tensor.shape(sizes)) > BEYOND and sizes not in seen:
                seen.append(sizes)
                yield sizes


def wrapping(subject: KernelSubject) -> Finding | None:
    """The finding that offsets wrap, at the first sizes at which that is an error, else at those at
    which they do; None if they do not, or where that is not known."""
    operation, milder = subject.operation, None
    for sizes in vast_sizes(operation):
        types = (*operation.inputs, operation.result, *subject.binding.scratch_at(sizes))
        tensors = [_vast(operation, type_, sizes) for type_ in types]
        first = _last_program(subject, tensors, sizes)
        runs = chain([first], _other_integers(subject, first, tensors, sizes))
        space = next((space for space in runs if space.left), None)
        if space is not None:
            # How bad it is where no specification says that sizes go so far.
            usual: Severity = "warning" if subject.binding.strides_taken else "note"
            finding = _finding(operation, space, sizes, usual)
            if finding.severity == "error":
                return finding
            milder = milder or finding
    return milder


def _last_program(subject: KernelSubject, tensors: Sequence[Vast], sizes: Sizes) -> AddressSpace:
    """A run of the last program of a grid."""
    kernel = subject.kernel
    space = AddressSpace(tensors, kernel.machinery)
    with suppress(Exception):  # a text for other sizes may raise anything, which says nothing
        arguments, grid = subject.arguments_at(sizes), subject.grid_at(sizes)
        blocks = (arguments[one.name] for one in kernel.parameters if one.constant)
        whole = [one for one in blocks if isinstance(one, int)]
        if max(whole, default=1) <= _LANES and max(grid[1:]) <= 65_535:
            last: Program = tuple(max(0, n - 1) for n in grid)
            kernel.run(space, arguments, [last], grid)
    return space


def _other_integers(
    subject: KernelSubject, first: AddressSpace, tensors: Sequence[Vast], sizes: Sizes
) -> Iterator[AddressSpace]:
    """Runs with other integers in the tensors that the first has loaded integers of: the greatest
    and rising ones in all of them, then the greatest or the least in one and not in the others."""
    loaded = [one.name for one in tensors if one.name in first.loaded and one.least < one.greatest]
    greatest: dict[str, End] = dict.fromkeys(loaded, "greatest")
    rising: dict[str, End] = dict.fromkeys(loaded, "rising")
    choices = [greatest, rising]
    if len(loaded) > 1:
        choices += [{name: "greatest"} for name in loaded]
        choices += [{**greatest, name: "least"} for name in loaded]
    for ends in choices if loaded else ():
        held = [replace(tensor, end=ends.get(tensor.name, "least")) for tensor in tensors]
        yield _last_program(subject, held, sizes)


def _vast(operation: Operation, type_: TensorType, sizes: Sizes) -> Vast:
    least, greatest = _ends(operation, type_, sizes)
    return Vast(type_.name, type_, math.prod(type_.shape(sizes)), least, greatest)


def _ends(operation: Operation, type_: TensorType, sizes: Sizes) -> tuple[int, int]:
    """The least and the greatest integer that an input holds: by its range, or of those that are
    drawn for it; 0 where nobody says."""
    name = type_.name
    count = math.prod(type_.shape(sizes))
    with suppress(Exception):  # somebody's own range or function, at sizes that nobody asks for
        if name in operation.ranges:
            return operation.range_of(name, sizes) or (0, 0)
        if name in operation.draws and not type_.is_float and 0 < count <= _DRAWN:
            drawn = Case(operation, sizes).input(name)
            return int(drawn.min()), int(drawn.max())
    return 0, 0


def _finding(operation: Operation, space: AddressSpace, sizes: Sizes, usual: Severity) -> Finding:
    assert space.left is not None
    tensor, place = space.left
    named = ", ".join(f"{name}={size}" for name, size in sizes.items())
    held: Any = space.tensors.values()
    large = [f"{one.name} of up to {one.greatest}" for one in held if one.end != "least"]
    indices = f" and {', '.join(large)}" if large else ""
    cast = "index.to(tl.int64)" if large else "tl.program_id(0).to(tl.int64)"
    message = (
        f"offsets of 32 bits wrap when {tensor.name} has more than 2^31 elements, as with {named}"
        f"{indices}; cast what is multiplied first: {cast}"
    )
    sized = tensor.type.names  # none of a kernel's own memory
    stated = bool(sized) and all(operation.most(name) is not None for name in sized)
    severity = "error" if stated else usual
    return Finding("offset-overflow", message, severity, tensor=tensor.name, place=place)
