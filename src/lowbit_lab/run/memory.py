"""Memory that sees every access: what each program of a kernel reads and writes, and what is
wrong with it. All backends touch memory through this.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lowbit.spec import Array
from lowbit_lab.run.findings import Finding
from lowbit_lab.run.order import Begun, Order
from lowbit_lab.run.tensor import NOBODY, CheckedTensor, poison, storage_dtype, strays
from lowbit_lab.run.trace import Access, Block, Computation, Kind, Place, Program, Recorder, Step

# Instead of the number of a program: more than one; those that have updated an element atomically,
# of which `_updates` knows.
_SEVERAL, _UPDATED = -2, -3
NO_TENSOR = "an address that belongs to no tensor"
_LAB = str(Path(__file__).parent.parent)
_OUTSIDE: Mapping[Kind, str] = {
    "load": "out-of-bounds-load",
    "store": "out-of-bounds-store",
    "atomic": "out-of-bounds-store",
}


class Owners(Protocol):
    """Whose memory of this process an address is in, for kernels that get addresses as numbers."""

    def tensor_at(self, address: int) -> CheckedTensor | None:
        """The tensor that the address is in; None if it is in none."""
        ...

    def words(self, address: int) -> str:
        """What an address is that is in no tensor."""
        ...


class EndlessError(RuntimeError):
    """A program has taken more steps than any sensible one takes."""


@dataclass(eq=False)
class Lanes:
    """Where the lanes of one access go: byte offsets from a tensor's first element. active: those
    that its mask lets, all if None; masked: whether there is a mask.

    elements: the element that each active lane touches, -1 for none; outside: the active lanes that
    touch none. A Memory fills them in.
    """

    tensor: CheckedTensor
    offsets: NDArray[np.int64]
    active: Any = None
    masked: bool = False
    elements: NDArray[np.int64] = field(init=False)
    outside: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        if self.active is None:
            self.active = np.ones(self.offsets.shape, bool)

    @property
    def good(self) -> NDArray[np.bool_]:
        """The active lanes that touch an element."""
        return self.elements >= 0


class Memory:
    """The tensors of one run of a kernel, and what is found during it.

    recorder: takes down what happens, if there is one. poisoned: masked lanes that were given no
    other value read poison, not 0; at a Place, only those of its loads. machinery: folders whose
    frames are not the text of a kernel. most_steps: how many steps of an interpreter a program may
    take; no limit if None.

    `atomics` says whether there were atomic operations, `tf32` whether products of float32 were
    rounded to TF32, `undefined` has the lines with masked lanes that were given no other value, and
    `undefined_in` the programs that have these. `kernel` is set to the name of the one that runs,
    where there are several, and `running` is the program; `begun` are all programs, by their
    numbers. `owners` knows whose memory an address is in that a kernel gets as a number; None where
    tensors have no such address.
    """

    # Whether `wrapped` is to be called where a sum or product of 32 bits wraps.
    follows_wraps = False

    def __init__(
        self, tensors: Sequence[CheckedTensor], *, machinery: Sequence[str] = (),
        recorder: Recorder | None = None, poisoned: bool | Place = False,
        most_steps: int | None = None,
    ) -> None:  # fmt: skip
        self.steps, self._steps_before, self._most_steps = 0, 0, most_steps
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self.recorder, self.poisoned = recorder, poisoned
        self.machinery = (_LAB, *machinery)
        self.atomics = self.tf32 = False
        self.undefined: dict[Place | None, None] = {}
        self.undefined_in = set[Program]()
        self.number = 0
        self.running: Program | None = None
        self.kernel: str | None = None
        self.owners: Owners | None = None
        self._found: dict[tuple[str, str | None, Place | None], Finding] = {}
        self._order = Order()
        self.begun = self._order.begun
        self._places: dict[Place | None, int] = {}

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was found, each kind once for a tensor and a line."""
        return tuple(self._found.values())

    @property
    def program(self) -> Program:
        """The program that runs now."""
        return self.begun[self.number].program

    def begin(self, program: Program, group: int | None = None, epoch: int = 0) -> int:
        """A program starts, and gets a number; it runs until another begins or resumes.

        Programs of one group are in order with each other if their epochs differ: the threads of
        a block before and after a barrier. Without a group a program is in order with none.
        """
        self.number, self.running = len(self.begun), program
        self._steps_before = self.steps
        alone = -1 - self.number
        self._order.begin(Begun(program, self.kernel, alone if group is None else group, epoch))
        return self.number

    def resume(self, number: int) -> None:
        """The program that began with this number goes on."""
        self.number, self.running = self._order.latest(number), self.begun[number].program

    def step(self) -> None:
        """Count a step of what runs the kernel. EndlessError if a program has taken too many."""
        self.steps += 1
        if self._most_steps is not None and self.steps - self._steps_before > self._most_steps:
            raise EndlessError(f"after {self._most_steps:,} steps it still runs; does a loop end?")

    def undefined_values(self, dtype: str, shape: tuple[int, ...]) -> Array:
        """What the lanes of a load hold which a mask leaves undefined, as they are stored."""
        place = self.here()
        self.undefined[place] = None
        self.undefined_in.add(self.program)
        if self.poisoned is True or (place is not None and self.poisoned == place):
            return strays(dtype, shape)
        return np.zeros(shape, storage_dtype(dtype))

    def wrapped(self) -> None:
        """A number of 32 bits has wrapped at the line that runs now, as it may."""

    def barrier(self) -> None:
        """Everything so far is in order with everything that follows."""
        self._order.barrier()
        for tensor in self.tensors.values():
            tensor.reader[:] = NOBODY

    def _unordered(self, others: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these accesses, by their programs, may come before or after one made now."""
        return self._order.unordered(self.number, others)

    def load(
        self, lanes: Lanes, other: Array, *, volatile: bool = False, acquires: bool = False
    ) -> Array:
        """Read the active lanes; the rest, and those outside, keep `other` and get poison.

        volatile: it may meet atomic operations of other programs. acquires: as of `update`.
        """
        values = other.copy()
        self._reach("load", lanes, other.dtype)
        good = lanes.good
        values[good] = lanes.tensor.read(lanes.offsets[good], other.dtype)
        values[lanes.outside] = poison(other.dtype)
        if acquires:
            self._order.acquire(self.number, lanes.tensor, lanes.elements[good])
        self._note_reads(lanes.tensor, lanes.elements[good], volatile)
        self._recorded("load", lanes, values)
        return values

    def store(self, lanes: Lanes, values: Array) -> None:
        """Write the active lanes that lie inside."""
        self._reach("store", lanes, values.dtype)
        good = lanes.good
        offsets, written = lanes.offsets[good], values[good]
        self._note_writes(lanes.tensor, lanes.elements[good], offsets, written)
        lanes.tensor.write(offsets, written)
        self._recorded("store", lanes, values)

    def update(
        self, lanes: Lanes, values: Array, combine: Callable[[Any, Any], Any], *,
        exchange: bool = False, acquires: bool = True, releases: bool = True,
    ) -> Array:  # fmt: skip
        """Atomically: each active lane in turn replaces `old` by `combine(old, lane's index)`.

        Returns the old values; `values` are those that the trace shows. exchange: what is left does
        not depend on the old value, so that this may be an element's first. acquires, releases:
        whether what follows comes after what others did before they released the same element, and
        whether this releases it (PTX ISA, "Memory consistency model").
        """
        tensor, dtype = lanes.tensor, values.dtype
        self._reach("atomic", lanes, dtype)
        self.atomics = True
        old = np.zeros(lanes.offsets.shape, dtype)
        fresh = lanes.elements[lanes.good]
        if not tensor.initialised and not exchange:
            self._unwritten(tensor, fresh)
        self._order.update(self.number, tensor, fresh, acquires, releases)
        self._note_updates(tensor, fresh)
        for lane in zip(*np.nonzero(lanes.good), strict=True):
            where = lanes.offsets[lane].reshape(1)
            old[lane] = tensor.read(where, dtype)[0]
            tensor.write(where, np.asarray([combine(old[lane], lane)], dtype))
        tensor.writer[fresh] = _UPDATED
        tensor.place[fresh] = self.place()
        self._recorded("atomic", lanes, values)
        return old

    def here(self) -> Place | None:
        """The line of the kernel's text that runs now."""
        frame = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if not file.startswith(self.machinery):
                return Place(file, frame.f_lineno)
            frame = frame.f_back
        return None

    def place(self) -> int:
        """The number of the line that runs now, to be kept for the elements that it writes."""
        return self._places.setdefault(self.here(), len(self._places))

    def place_of(self, tensor: CheckedTensor, element: int) -> Place | None:
        """The line that wrote an element last; None if that is not known."""
        number = int(tensor.place[element])
        return None if number == NOBODY else list(self._places)[number]

    def false_hint(self, hint: str, values: str) -> None:
        """What the kernel tells its compiler does not hold: the hint, and what belies it."""
        message = (
            f"{hint} does not hold in program {list(self.program)}: {values}; the compiler "
            "believes it, and loads and stores neighbours together"
        )
        self._blame("false-hint", message)

    def outside(
        self, kind: Kind, tensor: CheckedTensor, index: tuple[int, ...], value: Array
    ) -> None:
        """An access to an index that the tensor does not have; `value`, an array of one, is what
        is stored there or loaded instead."""
        where = f"{tensor.name}{list(index)}"
        steps = zip(index, tensor.strides, strict=True)
        lanes = Lanes(tensor, np.array([sum(i * step for i, step in steps) * tensor.itemsize]))
        lanes.elements, lanes.outside = np.full(1, -1), np.ones(1, bool)
        self._outside(kind, lanes, index, f"the shape {list(tensor.shape)}", where)
        self._recorded(kind, lanes, value)

    def outside_of_all(self, kind: Kind, lanes: int, masked: bool, address: int) -> None:
        """An access through an address that is near no tensor."""
        where = NO_TENSOR if self.owners is None else self.owners.words(address)
        message = f"{lanes} lanes of a {kind} go to {where}"
        self._blame(_OUTSIDE[kind], message, masked=masked)

    def _outside(
        self, kind: Kind, lanes: Lanes, index: tuple[int, ...], has: str, where: str
    ) -> None:
        verb, name = "reads" if kind == "load" else "writes", lanes.tensor.name
        message = f"{name} has {has}; program {list(self.program)} {verb} {where}"
        self._blame(_OUTSIDE[kind], message, masked=lanes.masked, tensor=name, index=index)

    def _find(
        self, kind: str, tensor: CheckedTensor, element: int, what: str, **about: Any
    ) -> None:
        """Note a finding about an element; `what` completes "tensor[index] ..."."""
        index = tensor.index(int(element))
        message = f"{tensor.name}{list(index)} {what} (program {list(self.program)})"
        self._blame(kind, message, tensor=tensor.name, index=index, **about)

    def _blame(self, kind: str, message: str, **about: Any) -> None:
        """Note a finding about the line that runs now."""
        self.note(Finding(kind, message, program=self.program, place=self.here(), **about))

    def note(self, finding: Finding) -> None:
        """Take down a finding; of each kind the first for a tensor and a line."""
        finding = replace(finding, kernel=self.kernel)
        key = (finding.kind, finding.tensor, finding.place)
        seen = self._found.get(key)
        self._found[key] = replace(seen, count=seen.count + 1) if seen else finding

    def _reach(self, kind: Kind, lanes: Lanes, dtype: np.dtype[Any]) -> None:
        """Find the elements that lanes of this dtype touch, and whether they may."""
        self.step()
        self.number = self._order.current(self.number)
        tensor, offsets = lanes.tensor, lanes.offsets
        lanes.elements, outside = tensor.locate(offsets, lanes.active, dtype.itemsize)
        lanes.outside = outside
        if np.count_nonzero(outside):
            distance = int(offsets[outside].reshape(-1)[0]) // tensor.itemsize
            gap = 0 <= distance * tensor.itemsize < tensor.extent
            mask = "its mask lets it" if lanes.masked else "it has no mask"
            where = (
                f"at element offset {distance}{', between its rows' if gap else ''} "
                f"({int(outside.sum())} of {outside.size} lanes; {mask})"
            )
            self._outside(kind, lanes, (distance,), f"{tensor.count} elements", where)
        if kind != "load" and tensor.role == "input" and np.count_nonzero(lanes.good):
            self._find("input-written", tensor, lanes.elements[lanes.good][0], "is an input")

    def _note_reads(
        self, tensor: CheckedTensor, elements: NDArray[np.int64], volatile: bool
    ) -> None:
        if tensor.role == "input" or not elements.size:
            return
        if not tensor.initialised:
            self._unwritten(tensor, elements)
        writer = tensor.writer[elements]
        foreign = self._unordered(writer)
        if np.count_nonzero(foreign):
            first = int(np.argmax(foreign))
            what = f"is read, and written by program {self._named(writer[first])}"
            self._find("read-of-other", tensor, elements[first], what)
        elif not volatile:
            what = "is read, and updated atomically by program {}, which nothing orders"
            self._find_updated("read-of-other", tensor, elements, what)
        reader = tensor.reader[elements]
        alone = (reader != _SEVERAL) & ~self._unordered(reader)
        tensor.reader[elements] = np.where(alone, self.number, _SEVERAL)

    def _find_updated(
        self, kind: str, tensor: CheckedTensor, elements: NDArray[np.int64], what: str
    ) -> None:
        """Note that one of these elements was updated by a program in no order with this one."""
        updated = self._order.updated(self.number, tensor, elements)
        if updated is not None:
            self._find(kind, tensor, updated[0], what.format(self._named(updated[1])))

    def _note_updates(self, tensor: CheckedTensor, elements: NDArray[np.int64]) -> None:
        """Races of an atomic operation with what others do that is not atomic."""
        for kind, others, what in (
            ("write-conflict", tensor.writer[elements], "written"),
            ("read-of-other", tensor.reader[elements], "read"),
        ):
            foreign = self._unordered(others)
            if foreign.any():
                first = int(np.argmax(foreign))
                by = f"is updated atomically, and {what} by program {self._named(others[first])}"
                self._find(kind, tensor, elements[first], by)

    def _named(self, number: Any) -> list[int]:
        return list(self.begun[int(number)].program)

    def _unwritten(self, tensor: CheckedTensor, elements: NDArray[np.int64]) -> None:
        unwritten = tensor.writer[elements] == NOBODY
        if unwritten.any():
            first = elements[int(np.argmax(unwritten))]
            self._find("unwritten-read", tensor, first, "is read before anything is written to it")

    def _note_writes(
        self, tensor: CheckedTensor, elements: NDArray[np.int64], offsets: NDArray[np.int64],
        values: Array,
    ) -> None:  # fmt: skip
        if not elements.size:
            return
        if np.count_nonzero(offsets[1:] <= offsets[:-1]):  # else each lane has a place of its own
            _, one, group = np.unique(offsets, return_index=True, return_inverse=True)
            differ = ~_same_bits(values[one][group.reshape(-1)], values)
            if differ.any():
                what = "gets different values from its lanes"
                self._find("lane-conflict", tensor, elements[int(np.argmax(differ))], what)
        writer, reader = tensor.writer[elements], tensor.reader[elements]
        foreign = self._unordered(writer)
        if np.count_nonzero(foreign):
            same = _same_bits(tensor.read(offsets, values.dtype), values)
            wrong = foreign & ~same
            first = int(np.argmax(wrong if wrong.any() else foreign))
            what = f"is written by program {self._named(writer[first])} too"
            if wrong.any():
                self._find("write-conflict", tensor, elements[first], what)
            else:
                self._find("written-twice", tensor, elements[first], what, severity="warning")
        # Who the several were is not known; after a barrier they may all lie before it.
        several = not self.begun[self.number].epoch and not self._order.knows(self.number)
        raced = self._unordered(reader) | ((reader == _SEVERAL) & several)
        if np.count_nonzero(raced):
            first = elements[int(np.argmax(raced))]
            self._find("read-of-other", tensor, first, "is written, and read by another program")
        what = "is written, and updated atomically by program {}, which nothing orders"
        self._find_updated("write-conflict", tensor, elements, what)
        self._order.written(tensor, elements)
        tensor.writer[elements] = self.number
        tensor.place[elements] = self.place()

    def _recorded(self, kind: Kind, lanes: Lanes, values: Array) -> None:
        tensor = lanes.tensor
        # Scratch, which is not among the tensors, is not shown.
        if self.recorder is None or self.tensors.get(tensor.name) is not tensor:
            return
        dtype = tensor.type.dtype if values.dtype == tensor.dtype else str(values.dtype)
        access = Access(
            kind, tensor.name, self.program, 0, self.here(), lanes.masked, lanes.elements.copy(),
            lanes.active.copy(), lanes.outside.copy(), lanes.offsets // tensor.itemsize,
            values.copy(), dtype, values.dtype.itemsize,
        )  # fmt: skip
        self.recorder.access(tensor, access, values)

    def computed(
        self, kind: Step, name: str, operands: Sequence[Block] = (), result: Block | None = None
    ) -> None:
        """Record a step that touches no memory."""
        if self.recorder is not None:
            made = Computation(kind, name, self.program, 0, self.here(), tuple(operands), result)
            self.recorder.computation(made)


def _same_bits(left: Array, right: Array) -> NDArray[np.bool_]:
    if right.dtype.kind == "f":
        return (left == right) | (np.isnan(left) & np.isnan(right))
    return left == right
