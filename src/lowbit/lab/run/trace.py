"""What a kernel does to memory and registers, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lowbit.lab.run.program import Place, Program

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
