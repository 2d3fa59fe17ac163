"""What a run's result says: elements that were never written, and wrong values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lowbit.lab.report import Finding
from lowbit.lab.run.outcome import Run, Trial
from lowbit.lab.run.tensor import NOBODY
from lowbit.spec import SPECIAL, Array

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
    if case.fill not in SPECIAL or operation.special:
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
    elif case.fill == "largest" and all(t.dtype != "float64" for t in operation.inputs):
        narrow = reference(lambda a: a.astype(np.float32), floats)
        free |= expected.wrong(narrow.astype(np.float64))
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
