"""One run of a kernel: in which order, for how long, and what it left behind."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import FunctionType
from typing import Any, NoReturn

import numpy as np

from lowbit.registry.locks import cached_property
from lowbit.spec import SPECIAL, Array, Case, Expected, Sizes
from lowbit.spec.dtypes import FLOAT32_UNIT
from lowbit_lab.run.findings import Finding
from lowbit_lab.run.memory import EndlessError, Memory
from lowbit_lab.run.special import forgiven, leaked
from lowbit_lab.run.tensor import NOBODY, CheckedTensor, widened
from lowbit_lab.run.trace import Place, Program

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

    @cached_property
    def in_tf32(self) -> Expected:
        """What has to come of it where products of float32 are rounded to TF32."""
        return self.case.expect_in_tf32(self.inputs, self.expected)


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
    def expected(self) -> Expected:
        """What has to come of it, as the kernel multiplies."""
        return self.trial.in_tf32 if self.memory.tf32 else self.trial.expected

    @property
    def wrong(self) -> Array:
        """The elements of the result that miss the reference."""
        return self.expected.wrong(self.result)

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
    strange, leaks, chosen = np.zeros((3, *output.shape), bool)
    case = run.trial.case
    kept = forgiven(case, run.trial.inputs, run.expected)
    if kept is not None:
        wrong &= ~kept.free
        chosen = wrong & kept.chosen
    if kept is not None and case.fill in SPECIAL:
        # A warning only: where the largest numbers overflow, an infinity is as good as a NaN.
        strange = wrong & (np.isnan(got) | (np.isinf(got) & (case.fill == "largest"))) & ~chosen
        leaks = leaked(case, run.trial.inputs, strange)
    # Large numbers that are all but equal at the end, as a maximum and the sum of all exponentials.
    rounded = np.zeros_like(wrong)
    if case.fill == "rising" and got.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            rounded = wrong & (np.abs(got - run.expected.reference) <= _roundings(run.trial))
    for kind, where in (
        ("wrong-values", wrong & ~strange & ~chosen & ~rounded),
        ("cancellation", rounded),
        ("nan-leak", leaks),
        ("special-values", strange & ~leaks),
        ("nan-chosen", chosen),
    ):
        if where.any():
            findings.append(wrong_values(kind, run, where))
    return findings


_WARNINGS = ("special-values", "nan-chosen", "cancellation")


def wrong_values(kind: str, run: Run, wrong: Array) -> Finding:
    """The finding that a run's result has wrong elements."""
    index = first_index(wrong)
    output, memory, expected = run.output, run.memory, run.expected
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
    if kind == "wrong-values" and 0 < abs(value - wanted) <= _roundings(run.trial):
        message += (
            "; that is no more than roundings of numbers as large as the inputs: if such cancel "
            "here, state how far as slack= of the specification"
        )
    return Finding(
        kind,
        message,
        "warning" if kind in _WARNINGS else "error",
        tensor=output.name,
        index=index,
        program=begun and begun.program,
        place=memory.place_of(output, element),
        expected=wanted,
        got=value,
        count=count,
        kernel=begun and begun.kernel,
    )


def _roundings(trial: Trial) -> float:
    """What roundings of the inputs' largest finite number make, as far as they may cancel in a
    result; 0 where an operation says how far it may be off."""
    one, exact = trial.case.operation, trial.case.exact(trial.inputs)
    if one.slack is not None or one.budget is not None or not one.result.is_float:
        return 0.0
    floats = [np.abs(exact[t.name][np.isfinite(exact[t.name])]) for t in one.inputs if t.is_float]
    size = max((float(values.max(initial=0)) for values in floats), default=0.0)
    return (one.sum_length(trial.case.sizes) + 8) * FLOAT32_UNIT * size


def first_index(flags: Array) -> tuple[int, ...]:
    """The index of the first true element in C order."""
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(flags)), flags.shape))
