"""Recording every access of one run of a kernel."""

from __future__ import annotations

import inspect
import math
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np

from lowbit.lab.backends.backend import GridLike, Request, Subject, Way
from lowbit.lab.run.judge import judge
from lowbit.lab.run.outcome import Run
from lowbit.lab.run.record import Recorder
from lowbit.lab.run.tensor import CheckedTensor
from lowbit.lab.run.trace import Trace, TracedTensor, Traffic
from lowbit.spec import Block, Case, Expected, Operation, Sizes


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

    sizes: of the run, those of the exercise if None; fill: the data, one of spec.FILLS.
    Raises as `check` does, and RuntimeError with its message if the kernel stops with an error.
    """
    subject = Request(kernel, spec, grid, output, initial, seed, given).bound()
    operation = subject.operation
    trace = trace_of(subject, Case(operation, sizes or operation.exercise, fill))
    crashes = [finding for finding in trace.findings if finding.kind == "crash"]
    if crashes:
        raise RuntimeError(f"{subject.name} stops with an error: {crashes[0]}")
    return trace


def trace_of(subject: Subject, case: Case, limit: int | None = None) -> Trace:
    """Run a kernel once and record it: all of it, or the first `limit` lanes and values.

    A kernel that stops with an error leaves what it did until then, and the error as a finding.
    TypeError if it is none, but a function that launches some.
    """
    source, first_line = _source(subject)
    recorder = Recorder(limit)
    inputs = case.inputs(subject.seed)
    expected = case.expect(inputs, subject.seed)
    run = subject.run(case, inputs, Way(recorder=recorder))
    fresh = subject.tensors(case, inputs)
    given = {tensor.name: tensor.values for tensor in fresh if tensor.role != "output"}
    ending = [run.crash] if run.crash else judge(case, inputs, run, expected)
    return Trace(
        kernel=subject.name,
        operation=subject.operation.name,
        backend=subject.description,
        sizes=case.sizes,
        fill=case.fill,
        grid=subject.grid_at(case.sizes),
        tensors=tuple(
            _traced(subject, run, tensor, given.get(tensor.name), expected)
            for tensor in run.memory.tensors.values()
        ),
        events=tuple(recorder.events),
        registers=tuple(recorder.registers),
        changes=tuple(recorder.changes),
        machine=recorder.machine,
        findings=(*run.memory.findings, *ending),
        dropped=recorder.dropped,
        source=source,
        first_line=first_line,
        file=subject.text.__code__.co_filename,
    )


def _traced(
    subject: Subject, run: Run, tensor: CheckedTensor, given: Any, expected: Expected
) -> TracedTensor:
    assert run.memory.recorder is not None
    is_result = tensor is run.output
    replaced = is_result and subject.output is not None
    nothing = np.zeros((2, tensor.count), np.int64)
    before = given
    if given is None and subject.initial is not None:
        before = np.full(tensor.shape, subject.initial, tensor.dtype)
    written = (tensor.writer != -1).reshape(tensor.shape)
    if before is not None:
        written = np.ones(tensor.shape, bool)
    return TracedTensor(
        name=tensor.name,
        dtype=tensor.type.dtype,
        shape=tensor.shape,
        strides=tensor.strides,
        role="output" if is_result else "input",
        itemsize=tensor.itemsize,
        # What is replaced by the result is read and written.
        least_bytes=math.prod(tensor.shape) * tensor.itemsize * (2 if replaced else 1),
        before=before,
        after=tensor.values,
        written=written,
        traffic=run.memory.recorder.traffic.get(tensor.name, Traffic(nothing[0], nothing[1])),
        expected=expected.reference if is_result else None,
        wrong=expected.wrong(run.result) if is_result else None,
    )


def _source(subject: Subject) -> tuple[str, int]:
    """The kernel's text and the number of its first line; empty where Python cannot find it."""
    text = subject.text
    try:
        lines, first = inspect.getsourcelines(text)
    except (OSError, TypeError):
        return "", 1
    return textwrap.dedent("".join(lines)), first
