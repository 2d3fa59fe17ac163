"""What a kernel did to memory, access by access: what a view of it draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lowbit.lab.report import Finding
from lowbit.lab.run.program import Place, Program

Kind = Literal["load", "store", "atomic"]


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

    kind: Literal["product", "reduction", "scan", "instruction", "assignment"]
    name: str
    program: Program
    step: int
    place: Place | None
    operands: tuple[Block, ...]
    result: Block | None

    @property
    def left(self) -> tuple[int, ...]:
        """The shape of the first operand."""
        return self.operands[0].values.shape

    @property
    def right(self) -> tuple[int, ...]:
        """The shape of the second operand."""
        return self.operands[1].values.shape


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


@dataclass(frozen=True)
class Machine:
    """What a lowbit kernel has at its disposal: registers of so many bytes, and tiles."""

    name: str
    vector_registers: int
    vector_bytes: int
    tiles: int


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


@dataclass(frozen=True, eq=False)
class TracedTensor:
    """A tensor of the traced run: its shape, strides in elements, and what it is for.

    before, after: the elements around the run, as they are stored (bfloat16 as uint16); an output
    without initial values is None before, and `written` says which elements have a value after.
    expected, wrong: of the result, the reference in float64 or int64 and where it is missed.
    least_bytes: what has to be moved at least, each element once.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    role: Literal["input", "output"]
    itemsize: int
    least_bytes: int
    before: NDArray[Any] | None
    after: NDArray[Any]
    written: NDArray[np.bool_]
    traffic: Traffic
    expected: NDArray[Any] | None = None
    wrong: NDArray[np.bool_] | None = None


@dataclass(frozen=True, eq=False)
class Trace:
    """What a kernel did at one set of sizes, in the order in which it happened.

    findings: what a check says of this run. dropped: how many events happened after the last one
    that was recorded; the traffic of the tensors counts them all the same. registers, changes,
    machine: of lowbit's CPU kernels.
    """

    kernel: str
    operation: str
    backend: str
    sizes: Mapping[str, int]
    fill: str
    grid: tuple[int, ...]
    tensors: tuple[TracedTensor, ...]
    events: tuple[Event, ...]
    registers: tuple[Register, ...]
    changes: tuple[Change, ...]
    machine: Machine | None
    findings: tuple[Finding, ...]
    dropped: int
    source: str
    first_line: int
    file: str

    @property
    def accesses(self) -> tuple[Access, ...]:
        """The events that touch memory."""
        return tuple(event for event in self.events if isinstance(event, Access))

    @property
    def products(self) -> tuple[Computation, ...]:
        """The multiplications of two blocks."""
        found = (event for event in self.events if isinstance(event, Computation))
        return tuple(event for event in found if event.kind == "product")

    @property
    def least_bytes(self) -> int:
        """Each input read once and the output written once."""
        return sum(tensor.least_bytes for tensor in self.tensors)

    def bytes(self, kind: Kind) -> int:
        """The bytes of all recorded accesses of this kind."""
        return sum(access.bytes for access in self.accesses if access.kind == kind)

    def reads(self, tensor: str) -> NDArray[np.int64]:
        """How often each element of a tensor is read, in the tensor's shape.

        KeyError if there is no such tensor.
        """
        found = {t.name: t for t in self.tensors}
        if tensor not in found:
            raise KeyError(f"no tensor {tensor!r}; there are {', '.join(found)}")
        return found[tensor].traffic.reads.reshape(found[tensor].shape)
