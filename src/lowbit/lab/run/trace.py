"""What a kernel does to memory and registers, step by step."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

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
    trace's registers, `event` its events; changes may follow the last one."""

    event: int
    register: int
    values: NDArray[Any] | None


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
