"""Taking down what a kernel does while it runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from lowbit.isa.instruction_set import InstructionSet
from lowbit.lab.run.tensor import CheckedTensor
from lowbit.lab.run.trace import (
    Access,
    Block,
    Change,
    Computation,
    Event,
    Program,
    Register,
    Traffic,
)


class Recorder:
    """Events, registers and traffic of one run.

    limit: how many lanes and other values are recorded, None for all. What comes later is counted
    as `dropped`, and in the traffic.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.events: list[Event] = []
        self.registers: list[Register] = []
        self.changes: list[Change] = []
        self._traffic: dict[str, Traffic] = {}
        self.machine: InstructionSet | None = None
        self.dropped = 0
        self._room = limit
        self._steps: Counter[Program] = Counter()
        # The arrays are kept, since the number of one that is gone may be given to another.
        self._loaded: dict[int, tuple[NDArray[Any], int]] = {}

    def access(self, tensor: CheckedTensor, access: Access, values: NDArray[Any]) -> None:
        """Note an access; its step is filled in. values: the array that the kernel goes on with,
        known again if it becomes an operand."""
        self._count(tensor, access)
        if self._add(access, access.values.size) and access.kind == "load":
            self._loaded[id(values)] = values, len(self.events) - 1

    def computation(self, made: Computation) -> None:
        """Note a computation; its step and the loads that its blocks come from are filled in."""
        blocks = tuple(map(self._sourced, made.operands))
        size = sum(block.values.size for block in blocks)
        self._add(replace(made, operands=blocks), size)

    def join(self, first: int, program: Program) -> None:
        """The accesses since event `first` are one: rows that one instruction loads or stores."""
        parts = cast("list[Access]", self.events[first:])
        if len(parts) < 2:
            return

        def stacked(name: str) -> NDArray[Any]:
            return np.stack([getattr(part, name) for part in parts])

        lanes = ("elements", "active", "outside", "offsets", "values")
        self.events[first:] = [replace(parts[0], **{name: stacked(name) for name in lanes})]
        self._steps[program] -= len(parts) - 1

    def change(self, register: int, values: NDArray[Any] | None, *, later: bool = False) -> None:
        """A register holds this, or nothing any more, from the last event on; `later`: from the
        next one on."""
        if self.dropped:
            return
        event = len(self.events) - (0 if later else 1)
        self.changes.append(Change(event, register, None if values is None else values.copy()))
        if values is not None and self._room is not None:
            self._room -= values.size

    def _add(self, event: Event, size: int) -> bool:
        step = self._steps[event.program]
        self._steps[event.program] += 1
        if self.dropped or (self._room is not None and size > self._room):
            self.dropped += 1
            return False
        if self._room is not None:
            self._room -= size
        self.events.append(replace(event, step=step))
        return True

    def _sourced(self, block: Block) -> Block:
        found = self._loaded.get(id(block.values))
        return replace(
            block, values=block.values.copy(), source=found[1] if found else block.source
        )

    def traffic_of(self, tensor: CheckedTensor) -> Traffic:
        """What all programs together did to a tensor."""
        if tensor.name not in self._traffic:
            reads, writes = np.zeros((2, tensor.count), np.int64)
            self._traffic[tensor.name] = Traffic(reads, writes)
        return self._traffic[tensor.name]

    def _count(self, tensor: CheckedTensor, access: Access) -> None:
        traffic = self.traffic_of(tensor)
        touched = _touched(tensor, access)
        if access.kind != "store":
            np.add.at(traffic.reads, touched, 1)
            traffic.loaded += access.bytes
        if access.kind != "load":
            np.add.at(traffic.writes, touched, 1)
            traffic.stored += access.bytes
        traffic.outside += int(access.outside.sum())


def _touched(tensor: CheckedTensor, access: Access) -> NDArray[np.int64]:
    """The elements of an access: several for each lane that is wider than an element, and each
    once where lanes are parts of one."""
    good = access.elements >= 0
    if access.itemsize < tensor.itemsize:
        return np.unique(access.elements[good])
    first = access.offsets[good]
    wide = range(access.itemsize // tensor.itemsize)
    owner, size = tensor.elements.owner, tensor.itemsize
    return np.concatenate([owner[(first + more) * size] for more in wide])


def block(values: Any, dtype: str | None = None) -> Block:
    """A block of these values."""
    array = np.asarray(values)
    return Block(array, dtype or str(array.dtype))
