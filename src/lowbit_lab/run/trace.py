"""What a kernel does to memory and registers, step by step."""

from __future__ import annotations

import ast
import linecache
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from lowbit.isa.instruction_set import InstructionSet
from lowbit_lab.run.tensor import CheckedTensor

# Programs of a grid, and lines of a kernel's text.

Node = TypeVar("Node", bound=ast.stmt)
Program = tuple[int, ...]
Grid = tuple[int, int, int]


def grid_of(dims: Sequence[int]) -> Grid:
    """One to three numbers of programs as a grid."""
    x, y, z = [*map(int, dims), 1, 1][:3]
    return x, y, z


def programs_of(grid: Grid) -> list[Program]:
    """In order: the last axis counts fastest."""
    return list(product(*map(range, grid)))


def corners_of(grid: Grid) -> list[Program]:
    """The programs that are first or last along each axis."""
    return list(product(*(sorted({0, max(0, n - 1)}) for n in grid)))


def first_line(node: ast.stmt) -> int:
    """The number of a statement's first line, that of a decorator perhaps."""
    return min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])


@dataclass(frozen=True)
class Place:
    """A line of the kernel's text."""

    file: str
    line: int

    def around(self, *kinds: type[Node]) -> Node | None:
        """The innermost statement of these kinds around the line; None if there is none."""
        try:
            tree = ast.parse("".join(linecache.getlines(self.file)))
        except SyntaxError:
            return None
        found = [node for node in ast.walk(tree) if isinstance(node, kinds)]
        around = [n for n in found if first_line(n) <= self.line <= (n.end_lineno or 0)]
        return max(around, key=first_line, default=None)

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line}"


Kind = Literal["load", "store", "atomic"]
Step = Literal["product", "reduction", "scan", "instruction", "assignment"]


@dataclass(frozen=True, eq=False)
class Access:
    """One load, store or atomic operation of one program: all its lanes together.

    elements, active, outside, offsets and values have one entry for each lane, in the lanes' own
    shape. elements: int64, the element in the tensor's C order; -1 for a lane that is masked or
    outside. active: bool, the lanes whose mask is true. outside: bool, active lanes that touch no
    element. offsets: int64, the distance from the tensor's first element, in elements as they lie
    in memory. values: what was loaded or stored, of `dtype` (NumPy's name, or bfloat16, whose
    values are uint16); itemsize: bytes of a lane; step: the number of this event in its program.
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
    offsets: NDArray[np.int64]
    values: NDArray[Any]
    dtype: str
    itemsize: int

    @property
    def bytes(self) -> int:
        """The bytes that the active lanes touch."""
        return int(self.active.sum()) * self.itemsize


@dataclass(frozen=True, eq=False)
class Block:
    """Values that a program computes with; `source` is the load, among the trace's events, that
    they come from unchanged. dtype: NumPy's name, or bfloat16, whose values are uint16."""

    values: NDArray[Any]
    dtype: str
    source: int | None = None


@dataclass(frozen=True, eq=False)
class Computation:
    """A step that touches no memory.

    "product": of two blocks, as by tl.dot; "reduction" and "scan": of one block or several;
    "instruction": one that works on tiles; "assignment": a register gets a new value, `result`.
    """

    kind: Step
    name: str
    program: Program
    step: int
    place: Place | None
    operands: tuple[Block, ...]
    result: Block | None


Event = Access | Computation


@dataclass(frozen=True)
class Register:
    """A variable of a lowbit kernel, or a tile. `slots`: the vector registers that it takes."""

    name: str
    type: str
    slots: int
    place: Place | None


@dataclass(frozen=True, eq=False)
class Change:
    """What a register holds from an event on; None: nothing any more. `register` counts the
    trace's registers, `event` its events; changes may follow the last one. dtype: of the values, if
    it is not NumPy's."""

    event: int
    register: int
    values: NDArray[Any] | None
    dtype: str | None = None


@dataclass(eq=False)
class Traffic:
    """What all programs together did to one tensor.

    reads, writes: int64, for each element in C order; atomic operations count as both. loaded,
    stored: bytes of active lanes, inside or not; outside: active lanes that touch no element.
    """

    reads: NDArray[np.int64]
    writes: NDArray[np.int64]
    loaded: int = 0
    stored: int = 0
    outside: int = 0


# Taking down what a kernel does while it runs.


class Recorder:
    """Events, registers and traffic of one run.

    limit: how many lanes and other values are recorded, None for all. What comes later is counted
    as `dropped`, and in the traffic. `watch` is called before each event is added.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.events: list[Event] = []
        self.registers: list[Register] = []
        self.changes: list[Change] = []
        self._traffic: dict[str, Traffic] = {}
        self.machine: InstructionSet | None = None
        self.dropped = 0
        self.watch: Callable[[], None] | None = None
        self._room = limit
        self._steps: Counter[Program] = Counter()
        # The arrays are kept, since the number of one that is gone may be given to another.
        self._loaded: dict[int, tuple[NDArray[Any], int]] = {}

    @property
    def room(self) -> int | None:
        """How many lanes and other values may still be recorded."""
        return self._room

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
        if self.watch is not None:
            self.watch()
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
