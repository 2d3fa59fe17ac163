"""Recording every access of one run of a kernel."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowbit.lab.backends.backend import GridLike, Request, Subject, Way
from lowbit.lab.report import Finding
from lowbit.lab.run.outcome import Run, Trial, judge
from lowbit.lab.run.record import Recorder
from lowbit.lab.run.tensor import CheckedTensor
from lowbit.lab.run.trace import Access, Computation, Event, Grid, Kind
from lowbit.spec import Block, Case, Operation, Sizes


@dataclass(frozen=True, eq=False)
class Trace:
    """What a kernel did at one set of sizes.

    run: what it left behind; recorder: what happened, in its order; fresh: the tensors as they were
    before, by name. findings: what a check says of this run. source: the kernel's text, empty where
    Python cannot find it, and first_line the number of its first line.
    """

    subject: Subject
    run: Run
    recorder: Recorder
    fresh: Mapping[str, CheckedTensor]
    findings: tuple[Finding, ...]
    source: str
    first_line: int

    @property
    def grid(self) -> Grid:
        """How many programs there were on each axis."""
        return self.subject.grid_at(self.run.trial.case.sizes)

    @property
    def events(self) -> Sequence[Event]:
        """The steps of all programs, as far as they were recorded."""
        return self.recorder.events

    @property
    def accesses(self) -> tuple[Access, ...]:
        """The events that touch memory."""
        return tuple(event for event in self.events if isinstance(event, Access))

    @property
    def products(self) -> tuple[Computation, ...]:
        """The multiplications of two blocks."""
        found = (event for event in self.events if isinstance(event, Computation))
        return tuple(event for event in found if event.kind == "product")

    def least_bytes_of(self, tensor: CheckedTensor) -> int:
        """Each element once; twice in an input that the result replaces."""
        replaced = tensor.name == self.subject.request.output
        return tensor.count * tensor.itemsize * (2 if replaced else 1)

    @property
    def least_bytes(self) -> int:
        """Each input read once and the output written once."""
        return sum(map(self.least_bytes_of, self.fresh.values()))

    def bytes(self, kind: Kind) -> int:
        """The bytes of all recorded accesses of this kind."""
        return sum(access.bytes for access in self.accesses if access.kind == kind)

    def reads(self, tensor: str) -> NDArray[np.int64]:
        """How often each element of a tensor is read, in the tensor's shape.

        KeyError if there is no such tensor.
        """
        if tensor not in self.fresh:
            raise KeyError(f"no tensor {tensor!r}; there are {', '.join(self.fresh)}")
        one = self.fresh[tensor]
        return self.recorder.traffic_of(one).reads.reshape(one.shape)


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
    text = subject.text
    if text is None:
        raise TypeError(
            f"{subject.name} is a function of tensors; only a single kernel can be shown: give one "
            "that it launches"
        )
    try:
        lines, first_line = inspect.getsourcelines(text)
    except (OSError, TypeError):
        lines, first_line = [], 1
    recorder, trial = Recorder(limit), Trial.of(case, subject.request.seed)
    run = subject.run(trial, Way(recorder=recorder))
    ending = [run.crash] if run.crash else judge(run)
    return Trace(
        subject,
        run,
        recorder,
        {tensor.name: tensor for tensor in subject.tensors(trial)},
        (*run.memory.findings, *ending),
        textwrap.dedent("".join(lines)),
        first_line,
    )
