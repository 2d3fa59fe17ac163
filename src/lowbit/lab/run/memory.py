"""Memory that sees every access: what each program of a kernel reads and writes, and what is
wrong with it. All backends touch memory through this.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lowbit.lab.report import Finding
from lowbit.lab.run.program import Place, Program
from lowbit.lab.run.record import Recorder
from lowbit.lab.run.tensor import NOBODY, CheckedTensor, poison
from lowbit.lab.run.trace import Access, Block, Computation, Kind
from lowbit.spec import Array

# Instead of the number of a program: more than one; somebody whose access is in order with every
# later one, because it was atomic.
_SEVERAL, _SETTLED = -2, -3
_LAB = str(Path(__file__).parent.parent)


class EndlessError(RuntimeError):
    """A program has taken more steps than any sensible one takes."""


class Memory:
    """The tensors of one run of a kernel, and what is found during it.

    recorder: takes down what happens, if there is one. poisoned: masked lanes that were given no
    other value read poison, not 0. machinery: folders whose frames are not the text of a kernel.
    most_steps: how many steps of an interpreter a program may take; no limit if None.

    `atomics` and `undefined` say whether there were atomic operations, and masked lanes that were
    given no other value. `kernel` is set to the name of the one that runs, where there are several,
    and `running` is the program.
    """

    def __init__(
        self,
        tensors: Sequence[CheckedTensor],
        *,
        machinery: Sequence[str] = (),
        recorder: Recorder | None = None,
        poisoned: bool = False,
        most_steps: int | None = None,
    ) -> None:
        self.steps, self._begun, self._most_steps = 0, 0, most_steps
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self.recorder = recorder
        self.programs: list[Program] = []
        self.poisoned = poisoned
        self.atomics = False
        self.undefined = False
        self.machinery = (_LAB, *machinery)
        self._found: dict[tuple[str, str | None, Place | None], Finding] = {}
        self._synchronised: set[int] = set()
        self._groups: list[int] = []
        self._epochs: list[int] = []
        self._ordered = 0
        self.number = 0
        self.running: Program | None = None
        self.kernel: str | None = None
        self._kernels: list[str | None] = []
        self._places: dict[Place | None, int] = {}

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was found, each kind once for a tensor and a line."""
        return tuple(self._found.values())

    @property
    def program(self) -> Program:
        """The program that runs now."""
        return self.programs[self.number]

    def begin(self, program: Program, group: int | None = None, epoch: int = 0) -> int:
        """A program starts, and gets a number; it runs until another begins or resumes.

        Programs of one group are in order with each other if their epochs differ: the threads of
        a block before and after a barrier. Without a group a program is in order with none.
        """
        self.number, self.running = len(self.programs), program
        self._begun = self.steps
        self.programs.append(program)
        self._kernels.append(self.kernel)
        self._groups.append(-1 - self.number if group is None else group)
        self._epochs.append(epoch)
        return self.number

    def resume(self, number: int) -> None:
        """The program of this number goes on."""
        self.number, self.running = number, self.programs[number]

    def step(self) -> None:
        """Count a step of what runs the kernel. EndlessError if a program has taken too many."""
        self.steps += 1
        if self._most_steps is not None and self.steps - self._begun > self._most_steps:
            raise EndlessError(f"after {self._most_steps:,} steps it still runs; does a loop end?")

    def barrier(self) -> None:
        """Everything so far is in order with everything that follows."""
        self._ordered = len(self.programs)
        for tensor in self.tensors.values():
            tensor.reader[:] = NOBODY

    def kernel_of(self, number: int) -> str | None:
        """The name of the kernel whose program has this number, where there are several."""
        return self._kernels[number]

    def _unordered(self, others: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these accesses, by their programs, may come before or after one made now."""
        unordered = (others >= self._ordered) & (others != self.number)
        for other in np.unique(others[unordered]):
            together = self._groups[other] == self._groups[self.number]
            if together and self._epochs[other] != self._epochs[self.number]:
                unordered[others == other] = False
        if self.number in self._synchronised:
            unordered[:] = False
        return unordered

    def load(
        self,
        tensor: CheckedTensor,
        offsets: NDArray[np.int64],
        active: NDArray[np.bool_],
        other: Array,
        masked: bool,
    ) -> Array:
        """Read the active lanes; the rest, and those outside, keep `other` and get poison."""
        values = other.copy()
        elements, outside = self._locate("load", tensor, offsets, active, other.dtype, masked)
        good = elements >= 0
        values[good] = tensor.read(offsets[good], other.dtype)
        values[outside] = poison(other.dtype)
        self._note_reads(tensor, elements[good])
        self._recorded("load", tensor, offsets, elements, active, outside, values, masked)
        return values

    def store(
        self,
        tensor: CheckedTensor,
        offsets: NDArray[np.int64],
        active: NDArray[np.bool_],
        values: Array,
        masked: bool,
    ) -> None:
        """Write the active lanes that lie inside."""
        elements, outside = self._locate("store", tensor, offsets, active, values.dtype, masked)
        good = elements >= 0
        if tensor.role == "input" and good.any():
            self.find("input-written", tensor, elements[good][0], "is an input")
        self._note_writes(tensor, elements[good], offsets[good], values[good])
        tensor.write(offsets[good], values[good])
        self._recorded("store", tensor, offsets, elements, active, outside, values, masked)

    def update(
        self,
        tensor: CheckedTensor,
        offsets: NDArray[np.int64],
        active: NDArray[np.bool_],
        values: Array,
        combine: Callable[[Any, Any], Any],
        *,
        exchange: bool = False,
    ) -> Array:
        """Atomically: each active lane in turn replaces `old` by `combine(old, lane's index)`.

        Returns the old values; `values` are those that the trace shows. exchange: what is left does
        not depend on the old value, so that this may be an element's first.
        """
        dtype = values.dtype
        elements, outside = self._locate("atomic", tensor, offsets, active, dtype, True)
        good = elements >= 0
        if tensor.role == "input" and good.any():
            self.find("input-written", tensor, elements[good][0], "is an input")
        self.atomics = True
        self._synchronised.add(self.number)
        old = np.zeros(offsets.shape, dtype)
        fresh = elements[good]
        if not tensor.initialised and not exchange:
            self._unwritten(tensor, fresh)
        for lane in zip(*np.nonzero(good), strict=True):
            where = offsets[lane].reshape(1)
            old[lane] = tensor.read(where, dtype)[0]
            tensor.write(where, np.asarray([combine(old[lane], lane)], dtype))
        tensor.writer[fresh] = _SETTLED
        tensor.place[fresh] = self.place()
        self._recorded("atomic", tensor, offsets, elements, active, outside, values, True)
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

    def outside(
        self, kind: Kind, tensor: CheckedTensor, index: tuple[int, ...], value: Array
    ) -> None:
        """An access to an index that the tensor does not have; `value`, an array of one, is what
        is stored there or loaded instead."""
        where = f"{tensor.name}{list(index)}"
        self._outside(kind, tensor, index, False, f"the shape {list(tensor.shape)}", where)
        offset = sum(i * step for i, step in zip(index, tensor.strides, strict=True))
        lane = np.array([offset * tensor.itemsize])
        yes, nowhere = np.ones(1, bool), np.full(1, -1)
        self._recorded(kind, tensor, lane, nowhere, yes, yes, value, False)

    def outside_of_all(self, kind: Kind, lanes: int, masked: bool) -> None:
        """An access through an address that is near no tensor."""
        message = f"{lanes} lanes of a {kind} go to an address that belongs to no tensor"
        self._note_outside(kind, message, masked)

    def _outside(
        self,
        kind: Kind,
        tensor: CheckedTensor,
        index: tuple[int, ...],
        masked: bool,
        has: str,
        where: str,
    ) -> None:
        verb = "reads" if kind == "load" else "writes"
        message = f"{tensor.name} has {has}; program {list(self.program)} {verb} {where}"
        self._note_outside(kind, message, masked, tensor=tensor.name, index=index)

    def _note_outside(self, kind: Kind, message: str, masked: bool, **about: Any) -> None:
        self.note(
            Finding(
                f"out-of-bounds-{'load' if kind == 'load' else 'store'}",
                message,
                program=self.program,
                place=self.here(),
                masked=masked,
                **about,
            )
        )

    def find(
        self, kind: str, tensor: CheckedTensor, element: int, what: str, *, warn: bool = False
    ) -> None:
        """Note a finding about an element; `what` completes "tensor[index] ..."."""
        index = tensor.index(int(element))
        self.note(
            Finding(
                kind,
                f"{tensor.name}{list(index)} {what} (program {list(self.program)})",
                severity="warning" if warn else "error",
                tensor=tensor.name,
                index=index,
                program=self.program,
                place=self.here(),
            )
        )

    def note(self, finding: Finding) -> None:
        """Take down a finding; of each kind the first for a tensor and a line."""
        finding = replace(finding, kernel=self.kernel)
        key = (finding.kind, finding.tensor, finding.place)
        seen = self._found.get(key)
        self._found[key] = replace(seen, count=seen.count + 1) if seen else finding

    def _locate(
        self,
        kind: Kind,
        tensor: CheckedTensor,
        offsets: NDArray[np.int64],
        active: NDArray[np.bool_],
        dtype: np.dtype[Any],
        masked: bool,
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        self.step()
        elements, outside = tensor.locate(offsets, active, dtype.itemsize)
        if outside.any():
            distance = int(offsets[outside].reshape(-1)[0]) // tensor.itemsize
            gap = 0 <= distance * tensor.itemsize < tensor.elements.owner.size
            mask = "its mask lets it" if masked else "it has no mask"
            where = (
                f"at element offset {distance}{', between its rows' if gap else ''} "
                f"({int(outside.sum())} of {outside.size} lanes; {mask})"
            )
            has = f"{tensor.count} elements"
            self._outside(kind, tensor, (distance,), masked, has, where)
        return elements, outside

    def _note_reads(self, tensor: CheckedTensor, elements: NDArray[np.int64]) -> None:
        if tensor.role == "input" or not elements.size:
            return
        if not tensor.initialised:
            self._unwritten(tensor, elements)
        writer = tensor.writer[elements]
        foreign = self._unordered(writer)
        if foreign.any():
            first = int(np.argmax(foreign))
            other = list(self.programs[int(writer[first])])
            self.find(
                "read-of-other", tensor, elements[first], f"is read, and written by program {other}"
            )
        reader = tensor.reader[elements]
        alone = (reader != _SEVERAL) & ~self._unordered(reader)
        tensor.reader[elements] = np.where(alone, self.number, _SEVERAL)

    def _unwritten(self, tensor: CheckedTensor, elements: NDArray[np.int64]) -> None:
        unwritten = tensor.writer[elements] == NOBODY
        if unwritten.any():
            first = elements[int(np.argmax(unwritten))]
            self.find("unwritten-read", tensor, first, "is read before anything is written to it")

    def _note_writes(
        self,
        tensor: CheckedTensor,
        elements: NDArray[np.int64],
        offsets: NDArray[np.int64],
        values: Array,
    ) -> None:
        if not elements.size:
            return
        self._conflict_of_lanes(tensor, elements, offsets, values)
        writer, reader = tensor.writer[elements], tensor.reader[elements]
        foreign = self._unordered(writer)
        if foreign.any():
            same = _same_bits(tensor.read(offsets, values.dtype), values)
            wrong = foreign & ~same
            first = int(np.argmax(wrong if wrong.any() else foreign))
            other = list(self.programs[int(writer[first])])
            kind = "write-conflict" if wrong.any() else "written-twice"
            what = f"is written by program {other} too"
            self.find(kind, tensor, elements[first], what, warn=not wrong.any())
        # Who the several were is not known; after a barrier they may all lie before it.
        several = self._epochs[self.number] == 0 and self.number not in self._synchronised
        raced = self._unordered(reader) | ((reader == _SEVERAL) & several)
        if raced.any():
            first = elements[int(np.argmax(raced))]
            self.find("read-of-other", tensor, first, "is written, and read by another program")
        tensor.writer[elements] = self.number
        tensor.place[elements] = self.place()

    def _conflict_of_lanes(
        self,
        tensor: CheckedTensor,
        elements: NDArray[np.int64],
        offsets: NDArray[np.int64],
        values: Array,
    ) -> None:
        _, first, group = np.unique(offsets, return_index=True, return_inverse=True)
        if first.size == offsets.size:
            return
        group = group.reshape(-1)
        wrong = ~_same_bits(values[first][group], values)
        if wrong.any():
            element = elements[int(np.argmax(wrong))]
            self.find("lane-conflict", tensor, element, "gets different values from its lanes")

    def _recorded(
        self,
        kind: Kind,
        tensor: CheckedTensor,
        offsets: NDArray[np.int64],
        elements: NDArray[np.int64],
        active: NDArray[np.bool_],
        outside: NDArray[np.bool_],
        values: Array,
        masked: bool,
    ) -> None:
        # What is not of the operation, as a block's shared array, is not shown.
        if self.recorder is None or self.tensors.get(tensor.name) is not tensor:
            return
        access = Access(
            kind,
            tensor.name,
            self.program,
            0,
            self.here(),
            masked,
            elements.copy(),
            active.copy(),
            outside.copy(),
            offsets // tensor.itemsize,
            values.copy(),
            tensor.type.dtype if values.dtype == tensor.dtype else str(values.dtype),
            values.dtype.itemsize,
        )
        self.recorder.access(tensor, access, values)

    def computed(
        self,
        kind: Literal["product", "reduction", "scan", "instruction", "assignment"],
        name: str,
        operands: Sequence[Block] = (),
        result: Block | None = None,
    ) -> None:
        """Record a step that touches no memory."""
        if self.recorder is not None:
            made = Computation(kind, name, self.program, 0, self.here(), tuple(operands), result)
            self.recorder.computation(made)


def _same_bits(left: Array, right: Array) -> NDArray[np.bool_]:
    if right.dtype.kind == "f":
        return (left == right) | (np.isnan(left) & np.isnan(right))
    return left == right
