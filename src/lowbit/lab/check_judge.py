"""What a run's result says: elements that were never written, and wrong values."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from lowbit.lab.check_tensor import CheckedTensor
from lowbit.lab.report import Finding
from lowbit.lab.trace import Program
from lowbit.spec import Array, Expected

if TYPE_CHECKING:
    from lowbit.lab.check_subject import Run


def judge(run: Run, expected: Expected, *, lenient: bool) -> list[Finding]:
    """Elements that were never written, and wrong values among the others.

    lenient: where the reference is NaN anything is right, and a NaN elsewhere is a warning. For
    data with infinities and NaN, since right kernels may multiply them by the zeros of a mask.
    """
    output = run.output
    findings: list[Finding] = []
    unwritten = np.zeros(output.shape, bool)
    if not output.initialised:
        unwritten = (output.writer == -1).reshape(output.shape)
        if unwritten.any():
            index = first_index(unwritten)
            count = int(unwritten.sum())
            message = f"{count} of {output.count} elements, first {output.name}{list(index)}"
            findings.append(
                Finding("unwritten", message, tensor=output.name, index=index, count=count)
            )
    got = run.result
    wrong = expected.wrong(got) & ~unwritten
    strange = np.zeros(output.shape, bool)
    if lenient:
        wrong &= ~np.isnan(expected.reference)
        strange = wrong & np.isnan(got)
    for kind, where in (("wrong-values", wrong & ~strange), ("special-values", strange)):
        if where.any():
            element = int(np.argmax(where))
            writer = int(output.writer[element])
            program = run.memory.programs[writer] if writer >= 0 else None
            made = wrong_values(kind, output, expected, got, where, program)
            kernel = run.memory.kernel_of(writer) if writer >= 0 else None
            findings.append(replace(made, kernel=kernel))
    return findings


def wrong_values(
    kind: str,
    output: CheckedTensor,
    expected: Expected,
    got: Array,
    wrong: Array,
    program: Program | None,
    device: str = "interpreter",
) -> Finding:
    """The finding that a result has wrong elements."""
    index = first_index(wrong)
    value, wanted = got[index].item(), expected.reference[index].item()
    by = f", written by program {list(program)}" if program is not None else ""
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
        program=program,
        expected=wanted,
        got=value,
        count=count,
        device=device,
    )


def first_index(flags: Array) -> tuple[int, ...]:
    """The index of the first true element in C order."""
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(flags)), flags.shape))
