"""Recording every access of one run of a kernel."""

from __future__ import annotations

import inspect
import math
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np

from lowbit.lab.check_cases import Case
from lowbit.lab.check_run import GridLike, Subject, subject_of
from lowbit.lab.trace import Trace, TracedTensor
from lowbit.spec.typed import Block, Operation, Sizes


def trace_kernel(
    kernel: Any,
    spec: Operation | Callable[..., Any],
    *,
    grid: GridLike = 1,
    sizes: Sizes | None = None,
    fill: str = "normal",
    output: str | None = None,
    initial: float | None = None,
    seed: int = 0,
    **given: Block | float,
) -> Trace:
    """Run a kernel once and record what it does; the arguments are those of `check`.

    sizes: of the run, those of the exercise if None; fill: the data, one of check_cases.FILLS.
    Raises as `check` does, and RuntimeError with its message if the kernel stops with an error.
    """
    subject = subject_of(kernel, spec, grid, output, initial, seed, given)
    operation = subject.operation
    case = Case(operation.complete(sizes or operation.exercise), fill)
    run = subject.run(case, case.inputs(operation, seed), record=True)
    if run.crash is not None:
        raise RuntimeError(f"{subject.reading.name} stops with an error: {run.crash}")
    memory = run.memory
    tensors = tuple(
        TracedTensor(
            t.name,
            t.type.dtype,
            t.shape,
            t.strides,
            "output" if t is run.output else "input",
        )
        for t in memory.tensors.values()
    )
    types = (*operation.inputs, operation.result)
    source, first_line = _source(subject)
    return Trace(
        subject.reading.name,
        operation.name,
        case.sizes,
        subject.grid_at(case.sizes),
        tensors,
        tuple(memory.accesses),
        tuple(memory.products),
        sum(math.prod(t.shape(case.sizes)) * _itemsize(t.dtype) for t in types),
        source,
        first_line,
    )


def _itemsize(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def _source(subject: Subject) -> tuple[str, int]:
    """The kernel's text and the number of its first line; empty where Python cannot find it."""
    try:
        lines, first = inspect.getsourcelines(subject.reading.text)
    except (OSError, TypeError):
        return "", 1
    return textwrap.dedent("".join(lines)), first
