"""One run of a kernel: in which order, for how long, and what it left behind."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from lowbit.lab.report import Finding
from lowbit.lab.run.memory import EndlessError, Memory
from lowbit.lab.run.program import Place, Program
from lowbit.lab.run.tensor import CheckedTensor, widened
from lowbit.lab.run.unsupported import UnsupportedError
from lowbit.spec import Array, Case, Expected, Sizes

# What a program may take, in steps of an interpreter: this much for each element of the space of
# all sizes, and this much besides.
_STEPS_OF_ONE, _STEPS = 100, 50_000


@dataclass(frozen=True, eq=False)
class Trial:
    """A case with its data, and what has to come of it."""

    case: Case
    inputs: Mapping[str, Array]
    expected: Expected

    @classmethod
    def of(cls, case: Case, seed: int) -> Trial:
        inputs = case.inputs(seed)
        return cls(case, inputs, case.expect(inputs, seed))


@dataclass(frozen=True, eq=False)
class Run:
    """What a run of a trial left behind. `several`: whether there were programs to shuffle."""

    trial: Trial
    memory: Memory
    output: CheckedTensor
    crash: Finding | None
    several: bool

    @property
    def result(self) -> Array:
        """The result in float64, int64 or bool."""
        return widened(self.output.values, self.output.type.dtype)

    @property
    def wrong(self) -> Array:
        """The elements of the result that miss the reference."""
        return self.trial.expected.wrong(self.result)

    def same_as(self, other: Run) -> bool:
        """Whether both left the same bits, NaN aside."""
        return bool(np.array_equal(self.result, other.result, self.output.type.is_float))


def most_steps(sizes: Sizes) -> int:
    """How many steps of an interpreter a program may take at these sizes."""
    return _STEPS + _STEPS_OF_ONE * prod(sizes.values())


def shuffled(programs: list[Program], seed: int | None) -> list[Program]:
    """The programs in another order, of several, unless the seed is None."""
    if seed is None or len(programs) < 2:
        return programs
    order = np.random.default_rng(seed).permutation(len(programs))
    # Last first, and nothing where it was: a shuffle of two may shuffle nothing.
    return [programs[i] for i in (order if len(order) > 2 else (1, 0))]


def cause_of(error: BaseException) -> BaseException:
    """The error that others were raised for."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def last_line(error: BaseException, machinery: Sequence[str]) -> Place | None:
    """The last line that took part in an error and is no machinery's."""
    walked = traceback.walk_tb(error.__traceback__)
    places = [Place(frame.f_code.co_filename, line) for frame, line in walked]
    own = [place for place in places if not place.file.startswith(tuple(machinery))]
    return own[-1] if own else None


def crash_of(error: Exception, memory: Memory) -> Finding:
    """The finding that something stops with an error.

    UnsupportedError, with the line, if the error is one.
    """
    cause = cause_of(error)
    place = last_line(cause, memory.machinery)
    text = (str(cause).strip() or "without a message").splitlines()[0]
    if isinstance(cause, UnsupportedError):
        raise UnsupportedError(f"{text} (at {place})" if place else text) from error
    endless = isinstance(cause, EndlessError)
    return Finding(
        "endless" if endless else "crash",
        text if endless else f"{type(cause).__name__}: {text}",
        program=memory.running,
        place=place,
        kernel=memory.kernel,
    )
