"""One run of a kernel: in which order, for how long, and what it left behind."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import FunctionType
from typing import Any, NoReturn

import numpy as np

from lowbit.lab.report import Finding
from lowbit.lab.run.memory import EndlessError, Memory
from lowbit.lab.run.tensor import NOBODY, CheckedTensor, widened
from lowbit.lab.run.trace import Place, Program
from lowbit.spec import SPECIAL, Array, Case, Expected, Sizes

# What an interpreter cannot run, so that it says nothing of a kernel.


class UnsupportedError(RuntimeError):
    """What runs kernels here cannot run this one. That is no fault of the kernel."""


def refusals(names: Mapping[str, Any], package: str, runner: str) -> dict[str, Callable[..., Any]]:
    """For each function of this package among these names, one that raises UnsupportedError: they
    stand for code of the device, and have no body of their own."""
    return {
        name: _refusal(f"{found.__module__}.{found.__name__}", runner)
        for name, found in names.items()
        if isinstance(found, FunctionType) and f"{found.__module__}.".startswith(f"{package}.")
    }


def _refusal(name: str, runner: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(f"{runner} cannot run {name}, which only a GPU has")

    return refuse


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


# What a run's result says: elements that were never written, and wrong values.

# What no function of a number takes for the same: an even one, a ReLU, a limit.
_IN_PLACE_OF_NAN = (1.0, 100.0, -100.0)


def judge(run: Run) -> list[Finding]:
    """Elements that were never written, and wrong values among the others."""
    output = run.output
    findings: list[Finding] = []
    unwritten = np.zeros(output.shape, bool)
    if not output.initialised:
        unwritten = (output.writer == NOBODY).reshape(output.shape)
        if unwritten.any():
            index = first_index(unwritten)
            count = int(unwritten.sum())
            message = f"{count} of {output.count} elements, first {output.name}{list(index)}"
            findings.append(
                Finding("unwritten", message, tensor=output.name, index=index, count=count)
            )
    got = run.result
    wrong = run.wrong & ~unwritten
    strange = np.zeros(output.shape, bool)
    free = _forgiven(run.trial)
    if free is not None:
        wrong &= ~free
    if free is not None and run.trial.case.fill in SPECIAL:
        # A warning only: where the largest numbers overflow, an infinity is as good as a NaN.
        strange = wrong & (np.isnan(got) | (np.isinf(got) & (run.trial.case.fill == "largest")))
    for kind, where in (("wrong-values", wrong & ~strange), ("special-values", strange)):
        if where.any():
            findings.append(wrong_values(kind, run, where))
    return findings


def _forgiven(trial: Trial) -> Array | None:
    """The elements that may be anything, where the data is special. None if all is judged.

    A right kernel may leave out what the reference multiplies by zero, multiply by the zeros of a
    mask, and add up in another order. So infinities may end as anything where the reference ends as
    NaN; a NaN has to come out where the result depends on the number in its place; and numbers that
    are too large for the reference in float32 are for a kernel too.
    """
    case, expected = trial.case, trial.expected
    operation, exact = case.operation, case.exact(trial.inputs)
    if case.fill not in (*SPECIAL, "huge") or operation.special:
        return None

    def reference(change: Callable[[Array], Array], names: Sequence[str]) -> Array:
        with np.errstate(all="ignore"):
            given = {n: change(a) if n in names else a for n, a in exact.items()}
            return np.asarray(operation(**given))

    def constant(names: Sequence[str]) -> Array:
        first, *others = (
            reference(lambda a, x=x: np.where(np.isnan(a), x, a), names) for x in _IN_PLACE_OF_NAN
        )
        return np.logical_and.reduce([first == other for other in others])

    floats = [tensor.name for tensor in operation.inputs if tensor.is_float]
    free = np.isnan(expected.reference)
    if case.fill == "nan":
        free &= np.logical_or.reduce([constant(n) for n in (floats, *([n] for n in floats))])
    elif case.fill in ("largest", "huge") and all(t.dtype != "float64" for t in operation.inputs):
        narrow = reference(lambda a: a.astype(np.float32), floats).astype(np.float64)
        free |= expected.wrong(narrow) | ~np.isfinite(narrow)
        # Integers that were multiplied have made it float64 again.
        free |= np.abs(expected.reference) > np.finfo(np.float32).max
    return free


def wrong_values(kind: str, run: Run, wrong: Array) -> Finding:
    """The finding that a run's result has wrong elements."""
    index = first_index(wrong)
    output, memory, expected = run.output, run.memory, run.trial.expected
    element = int(np.argmax(wrong))
    writer = int(output.writer[element])
    begun = memory.begun[writer] if writer >= 0 else None
    value, wanted = run.result[index].item(), expected.reference[index].item()
    by = f", written by program {list(begun.program)}" if begun else ""
    budget = expected.budget[index].item()
    within = f" within {budget:.3g}" if budget and np.isfinite(budget) else ""
    count = int(wrong.sum())
    message = (
        f"{count} of {output.count} elements; first {output.name}{list(index)}: expected "
        f"{wanted:.9g}{within}, got {value:.9g}{by}"
    )
    return Finding(
        kind,
        message,
        "warning" if kind == "special-values" else "error",
        tensor=output.name,
        index=index,
        program=begun and begun.program,
        place=memory.place_of(output, element),
        expected=wanted,
        got=value,
        count=count,
        kernel=begun and begun.kernel,
    )


def first_index(flags: Array) -> tuple[int, ...]:
    """The index of the first true element in C order."""
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(flags)), flags.shape))
