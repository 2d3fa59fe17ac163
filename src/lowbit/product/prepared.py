"""What runs: launches of compiled programs on operands. One record, whatever was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit.jit import verbose
from lowbit.jit.entry import word
from lowbit.jit.kernel import Program
from lowbit.jit.recognize import Check, Copied, Fresh
from lowbit.jit.workspace import aligned_empty, workspace
from lowbit.kernels.cpu.shared.layout import LINE

SCRATCH = "scratch"
_KEPT_SCRATCH = 64 << 20  # bytes up to which it is kept from call to call

# An array, its address, a number, or None where it is not used.
Operand = npt.NDArray[Any] | int | None


class Place(NamedTuple):
    """Where a parameter's memory begins: so many bytes behind an operand, or in the scratch."""

    operand: str
    offset: int = 0


class Launch(NamedTuple):
    """One run of a program: `words` that no call changes, and `places` of the other parameters."""

    program: Program
    words: Mapping[str, int]
    places: Mapping[str, Place]

    def moved(self, distances: Mapping[str, int], names: Mapping[str, str] | None = None) -> Launch:
        """The same on operands so many bytes further, and of other names."""
        names = names or {}
        places = {
            parameter: Place(names.get(operand, operand), offset + distances.get(operand, 0))
            for parameter, (operand, offset) in self.places.items()
        }
        return self._replace(places=places)


def identity(*parameters: str) -> dict[str, Place]:
    """The places of parameters that are called like their operands."""
    return {name: Place(name) for name in parameters}


@dataclass(eq=False)
class Prepared:
    """A request made ready to run, on operands by name.

    - request: what was asked for. shape: of the output. text: what a line of jit.verbose says.
    - launches: in the order in which they run, each on so many threads; none where there is nothing
      to multiply. scratch: the bytes that they need, from a multiple of 64 on.
    - plan: the dispatcher's answer. constants: operands that no call gives.
    - weight: a packed weight's operands.
    - spare: offsets in the scratch, of known calls, for operands that are given as numbers or have
      to be padded; `spare_bytes` more of it for these.
    - streaming: the same past the caches, for outputs that begin at a multiple of 64 bytes.
    - little: its calls may become known. keeps_gil: they are over in a few microseconds.
    """

    request: Any
    shape: tuple[int, ...]
    launches: Sequence[Launch] = ()
    threads: int = 1
    scratch: int = 0
    text: str = "nothing to compute"
    plan: Any = None
    constants: Mapping[str, Operand] = field(default_factory=dict)
    weight: Callable[[Any], Mapping[str, Operand]] = lambda _: {}
    spare: Mapping[str, int] = field(default_factory=dict)
    spare_bytes: int = 0
    streaming: Prepared | None = None
    little: bool = False
    keeps_gil: bool = False
    _calls: Sequence[tuple[Callable[..., None], Sequence[Place]]] | None = field(
        default=None, init=False
    )

    def __post_init__(self) -> None:
        self.little &= not verbose.LEVEL  # machine code would not log calls

    def run(self, operands: Mapping[str, Any]) -> None:
        """Compute."""
        if self.streaming is not None and not word(operands["out"]) % LINE:
            self.streaming.run(operands)
        elif verbose.LEVEL:
            with verbose.told(self.text):
                self._run(operands)
        else:
            self._run(operands)

    def _run(self, operands: Mapping[str, Any]) -> None:
        if self._calls is None:
            self._calls = [
                (launch.program.bind(self.threads, tuple(launch.places), **launch.words),
                 tuple(launch.places.values()))
                for launch in self.launches
            ]  # fmt: skip
        if self.scratch > _KEPT_SCRATCH:
            memory = aligned_empty((self.scratch,), np.uint8)
            start = memory.ctypes.data
        else:
            memory, start = workspace.reserve(self.scratch)
        given = {**operands, **self.constants, SCRATCH: start}.get
        for call, places in self._calls:
            call(*[given(at) if not offset else moved(given(at), offset) for at, offset in places])
        del memory  # until here nothing else may use it

    def steps(
        self, operands: Mapping[str, Any], start: Any
    ) -> Iterator[tuple[Program, dict[str, Any]]]:
        """The launches, as programs and a word for each parameter. start: of the scratch.
        Operands may be any objects that a distance in bytes can be added to."""
        given = {**operands, **self.constants, SCRATCH: start}.get
        for program, words, places in self.launches:
            named = {name: moved(given(at), offset) for name, (at, offset) in places.items()}
            yield program, {**words, **named}

    def parameter(self, operand: str) -> str:
        """What the program of the one launch calls an operand."""
        (launch,) = self.launches
        return next(name for name, place in launch.places.items() if place.operand == operand)

    def recognizer(
        self, operands: Mapping[str, Operand], checks: Sequence[Check], fresh: Fresh | None
    ) -> Callable[..., Any] | None:
        """What recognizes calls like one that was run, and runs them: see jit.recognize.

        Only for those that are `little`. operands: those that no argument of a call is.
        """
        (launch,) = self.launches
        words, scratch = dict(launch.words), dict[str, int]()
        for name, (operand, offset) in launch.places.items():
            if operand == SCRATCH:
                scratch[name] = offset
            elif operands.get(operand) is not None:
                words[name] = word(operands[operand]) + offset
            elif operand in self.spare:
                scratch[name] = self.spare[operand]
        padded = any(isinstance(check, Copied) for check in checks)
        size = self.scratch + (self.spare_bytes if padded else 0)
        return launch.program.recognizer(
            words, scratch, size, checks, fresh, operands, self.keeps_gil, self.threads
        )

    def into(self, result: npt.NDArray[Any], operands: Mapping[str, Any]) -> None:
        """`run` into an array that may lie otherwise than the output that was asked for: then into
        a new one, which is copied."""
        target = result if self._lies_so(result) else np.empty(result.shape, result.dtype)
        self.run({**operands, "out": target})
        if target is not result:
            result[...] = target

    def _lies_so(self, result: npt.NDArray[Any]) -> bool:
        stride = self.request.out_stride
        if not stride:
            return result.flags.c_contiguous
        row, step = result.strides
        return row == stride * result.itemsize and (step == result.itemsize or result.shape[1] == 1)


def moved(address: Any, distance: int) -> Any:
    """The place `distance` bytes further; nowhere stays nowhere."""
    if address is None or not distance:
        return address
    return (word(address) if isinstance(address, np.ndarray) else address) + distance


def row_stride(out: object) -> int:
    """Elements from row to row of an output [M, N] of which kernels can write whole rows; 0: rows
    are beside each other, or it is copied from an array where they are."""
    if not isinstance(out, np.ndarray) or out.ndim != 2 or out.flags.c_contiguous:
        return 0
    (row, step), item = out.strides, out.itemsize
    return row // item if not row % item and (step == item or out.shape[1] == 1) else 0
