"""What runs: launches of compiled programs on operands. One record, whatever was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.jit import verbose
from lowbit.jit.cached_call import Check, Copied, Fresh
from lowbit.jit.chain import chain
from lowbit.jit.entry import word
from lowbit.jit.kernel import Program
from lowbit.jit.launch import Launch, Place, moved
from lowbit.jit.workspace import aligned_empty, workspace
from lowbit.kernels.cpu.shared.layout import LINE
from lowbit.product.arguments import row_stride

SCRATCH = "scratch"
_KEPT_SCRATCH = 64 << 20  # bytes up to which it is kept from call to call

# An array, its address, a number, or None where it is not used.
Operand = npt.NDArray[Any] | int | None


def shifted(
    launch: Launch, distances: Mapping[str, int], names: Mapping[str, str] | None = None
) -> Launch:
    """The same on operands so many bytes further, and of other names."""
    names = names or {}
    places = {
        name: Place(names.get(at.buffer, at.buffer), at.offset + distances.get(at.buffer, 0))
        for name, at in launch.places.items()
    }
    return Launch(launch.program, {**launch.words, **places})


def identity(*parameters: str) -> dict[str, Place]:
    """The places of parameters that are called like their operands."""
    return {name: Place(name) for name in parameters}


class Chunks(Sequence[Launch]):
    """Launches for chunks of rows, by the first row. They are made when they are asked for, since
    rows that no memory holds are refused only when the output is allocated."""

    def __init__(self, firsts: range, make: Callable[[int], Launch]) -> None:
        self._firsts, self._make = firsts, make

    def __len__(self) -> int:
        return len(self._firsts)

    def __getitem__(self, which: Any) -> Any:
        return self._make(self._firsts[which])


def _bound(launches: Sequence[Launch], threads: int) -> tuple[Callable[..., None], tuple[str, ...]]:
    """A function that runs launches, and the operands that it takes, by name; of several launches,
    machine code goes from one to the next."""
    names = tuple(dict.fromkeys(name for launch in launches for name in launch.buffers()))
    if len(launches) != 1:
        return chain(launches, {}, names, threads, launches), (*names, "clock")  # which none gives
    (launch,) = launches
    found = {name: (names.index(at.buffer), at.offset) for name, at in launch.places.items()}
    return launch.program.bind(threads, found, **launch.numbers), names


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
    _bound: tuple[Callable[..., None], tuple[str, ...]] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.little &= not verbose.LEVEL  # machine code would not log calls

    def run(self, operands: Mapping[str, Any], logged: bool = False) -> None:
        """Compute. logged: somebody else says so, if anybody does."""
        if self.streaming is not None and not word(operands["out"]) % LINE:
            self.streaming.run(operands, logged)
            return
        if verbose.LEVEL and not logged:
            with verbose.told(self.text):
                self.run(operands, logged=True)
            return
        bound = self._bound
        if bound is None:
            bound = self._bound = _bound([*self.launches], self.threads)
        memory, start = None, 0
        if self.scratch > _KEPT_SCRATCH:
            memory = aligned_empty((self.scratch,), np.uint8)
            start = word(memory)
        elif self.scratch:
            memory, start = workspace.reserve(self.scratch)
        call, names = bound
        call(*map({**operands, **self.constants, SCRATCH: start}.get, names))
        del memory  # until here nothing else may use it

    def steps(
        self, operands: Mapping[str, Any], start: Any
    ) -> Iterator[tuple[Program, dict[str, Any]]]:
        """The launches, as programs and a word for each parameter. start: of the scratch.
        Operands may be any objects that a distance in bytes can be added to."""
        given = {**operands, **self.constants, SCRATCH: start}.get
        for one in self.launches:
            places = one.places.items()
            found = {name: moved(given(at.buffer), at.offset) for name, at in places}
            yield one.program, {**one.words, **found}

    def parameter(self, operand: str) -> str:
        """What the program of the one launch calls an operand."""
        (launch,) = self.launches
        return next(name for name, at in launch.places.items() if at.buffer == operand)

    def cached_call(
        self, operands: Mapping[str, Operand], checks: Sequence[Check], fresh: Fresh | None
    ) -> Callable[..., Any] | None:
        """What tells calls like one that was run, and runs them: see jit.cached_call.

        Only for those that are `little`. operands: those that no argument of a call is.
        """
        (launch,) = self.launches
        words, scratch = launch.numbers, dict[str, int]()
        for name, at in launch.places.items():
            if at.buffer == SCRATCH:
                scratch[name] = at.offset
            elif operands.get(at.buffer) is not None:
                words[name] = word(operands[at.buffer]) + at.offset
            elif at.buffer in self.spare:
                scratch[name] = self.spare[at.buffer]
        padded = any(isinstance(check, Copied) for check in checks)
        size = self.scratch + (self.spare_bytes if padded else 0)
        return launch.program.cached_call(
            words, scratch, size, checks, fresh, operands, self.keeps_gil, self.threads
        )

    def into(self, result: npt.NDArray[Any], operands: dict[str, Any]) -> None:
        """`run` into an array that may lie otherwise than the output that was asked for: then into
        a new one, which is copied. It becomes one of the operands."""
        stride = self.request.out_stride
        lies_so = result.flags.c_contiguous if not stride else row_stride(result) == stride
        operands["out"] = target = result if lies_so else np.empty(result.shape, result.dtype)
        self.run(operands)
        if target is not result:
            result[...] = target
