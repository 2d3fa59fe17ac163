"""In which order the programs of a run stand: what has happened before what, whichever order they
run in.

A program that releases an element, by an atomic operation, tells it all that it has done and knows
of; one that acquires it knows that from then on (happens-before by vector clocks: Lamport 1978;
FastTrack, Flanagan and Freund 2009). What a program does after a release has a number of its own,
so that whoever acquires what was released does not know of it. Sets of numbers are bits of an
integer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowbit_lab.run.tensor import CheckedTensor
from lowbit_lab.run.trace import Program


class Begun(NamedTuple):
    """A program that has begun, perhaps only from a barrier on: see `Memory.begin`. kernel: the
    name of its kernel, where there are several."""

    program: Program
    kernel: str | None
    group: int
    epoch: int


class Order:
    """What is known of the order of accesses, by the numbers of those who made them.

    begun: who has a number.
    """

    def __init__(self) -> None:
        self.begun: list[Begun] = []
        self._closed: set[int] = set()  # numbers that have released
        self._known: list[int] = []  # by number, as is the next
        self._first: list[int] = []  # what the same one had at first
        self._own: dict[int, int] = {}  # all that the same one has had, by the first
        self._latest: dict[int, int] = {}  # by first number
        self._epochs: dict[int, dict[int, int]] = {}  # by group and epoch
        self._released: dict[tuple[int, int], int] = {}  # by tensor and element
        self._updates: dict[int, dict[int, int]] = {}
        self._ordered = 0

    def begin(self, begun: Begun) -> None:
        """Somebody has begun, and gets the next number."""
        epochs, known = self._epochs.setdefault(begun.group, {}), 0
        for epoch, others in epochs.items():
            if epoch < begun.epoch:
                known |= others
        self._append(begun, known, len(self.begun))

    def _append(self, begun: Begun, known: int, first: int) -> int:
        number = self._latest[first] = len(self.begun)
        self.begun.append(begun)
        self._known.append(known)
        self._first.append(first)
        self._own[first] = self._own.get(first, 0) | 1 << number
        self._note(number)
        return number

    def _note(self, number: int) -> None:
        """What the others of a group know behind their next barrier."""
        begun = self.begun[number]
        epochs = self._epochs[begun.group]
        epochs[begun.epoch] = epochs.get(begun.epoch, 0) | self._known[number] | 1 << number

    def latest(self, first: int) -> int:
        """The number of what the one who began with this number does now."""
        return self._latest[first]

    def barrier(self) -> None:
        """Everything so far is in order with everything that follows."""
        self._ordered = len(self.begun)
        self._released.clear()
        self._updates.clear()

    def knows(self, number: int) -> bool:
        """Whether one has acquired what another has released."""
        return self._known[number] & ~self._own[self._first[number]] != 0

    def unordered(self, number: int, others: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these may come before or after what `number` does now."""
        found = (others >= self._ordered) & (others != number)
        for other in set(others[found].tolist()):
            if self._before(other, number):
                found[others == other] = False
        return found

    def _before(self, other: int, number: int) -> bool:
        if self._known[number] >> other & 1:
            return True
        left, right = self.begun[other], self.begun[number]
        return left.group == right.group and left.epoch != right.epoch

    def current(self, number: int) -> int:
        """The number of what the one with this number does next: another after a release."""
        if number not in self._closed:
            return number
        known = self._known[number] | 1 << number
        return self._append(self.begun[number], known, self._first[number])

    def acquire(self, number: int, tensor: CheckedTensor, elements: NDArray[np.int64]) -> None:
        """What others have released with these elements is known from now on."""
        for element in set(elements.tolist()):
            self._known[number] |= self._released.get((tensor.key, element), 0)
        self._note(number)

    def update(
        self, number: int, tensor: CheckedTensor, elements: NDArray[np.int64], acquires: bool,
        releases: bool,
    ) -> None:  # fmt: skip
        """An atomic operation on elements."""
        if acquires:
            self.acquire(number, tensor, elements)
        held = self._updates.setdefault(tensor.key, {})
        known = self._known[number] | 1 << number
        for element in set(elements.tolist()):
            held[element] = held.get(element, 0) | 1 << number
            if releases:
                place = tensor.key, element
                self._released[place] = self._released.get(place, 0) | known
        if releases:
            self._closed.add(number)

    def updated(
        self, number: int, tensor: CheckedTensor, elements: NDArray[np.int64]
    ) -> tuple[int, int] | None:
        """The first of these elements that another has updated in no order with what `number` does
        now, and who; None if there is none."""
        held = self._updates.get(tensor.key, {})
        for element in elements.tolist() if held else ():
            others = held.get(element, 0) & ~(self._known[number] | 1 << number)
            while others:
                other = (others & -others).bit_length() - 1
                if not self._before(other, number):
                    return element, other
                others &= others - 1
        return None

    def written(self, tensor: CheckedTensor, elements: NDArray[np.int64]) -> None:
        """Elements have been written otherwise: what was released there is gone."""
        held = self._updates.get(tensor.key, {})
        for element in elements.tolist() if held else ():
            held.pop(element, None)
            self._released.pop((tensor.key, element), None)
