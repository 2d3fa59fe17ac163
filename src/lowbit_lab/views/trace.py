"""Recording every access of one run of a kernel."""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowbit.jit.memory import offsets_of
from lowbit.spec import Block as BlockSize
from lowbit.spec import Case, Operation, Sizes
from lowbit_lab.backends.backend import GridLike, Request, Subject, Variant, Way
from lowbit_lab.backends.language import bound
from lowbit_lab.run.findings import Finding
from lowbit_lab.run.outcome import Run, Trial, judge
from lowbit_lab.run.tensor import NOBODY, CheckedTensor, widened
from lowbit_lab.run.trace import (
    Access,
    Block,
    Computation,
    Event,
    Grid,
    Kind,
    Place,
    Program,
    Recorder,
    first_line,
)
from lowbit_lab.views.lines import as_data, line_traffic, threads_of


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
    grid: GridLike | None = None,
    sizes: Sizes | None = None,
    fill: str = "normal",
    output: str | None = None,
    initial: float | None = None,
    seed: int = 0,
    **given: BlockSize | float,
) -> Trace:
    """Run a kernel once and record what it does; the arguments are those of `check`.

    sizes: of the run, those of the exercise if None; fill: the data, one of spec.FILLS.
    Raises as `check` does, and RuntimeError with its message if the kernel stops with an error.
    """
    variant = Variant(kernel, grid=grid, constants=given)
    subject = bound(Request(variant, spec, output, initial, seed))
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


# A trace as plain data: what the page of a view shows, and its JSON holds. See docs/view.md.

SCHEMA = "lowbit-view-3"

# What the numbers of a program are, by how many there are: of lowbit's, Triton's, Numba's kernels.
_AXES: Mapping[int, list[list[Any]]] = {
    2: [["region", 1], ["item", 1]],
    3: [["program", 3]],
    6: [["block", 3], ["thread", 3]],
}
_THREAD = 6
_BETWEEN_TWO = ("read-of-other", "write-conflict", "written-twice", "unwritten-read")
_OF_FINDING = ("kind", "title", "severity", "message", "tensor")
_MACHINE = ("name", "vector_registers", "vector_bytes", "tiles")  # of an instruction set
# Larger integers are no JavaScript numbers.
_EXACT = 2**53


def view_data(trace: Trace, notes: Sequence[str], also: Sequence[Finding] = ()) -> dict[str, Any]:
    """Everything about a trace in dicts, lists, numbers and strings. also: findings of other runs,
    shown where this one has none of their kind."""
    kinds = {finding.kind for finding in trace.findings}
    findings = [*trace.findings, *(one for one in also if one.kind not in kinds)]
    subject, case, recorder = trace.subject, trace.run.trial.case, trace.recorder
    sources = _Sources(trace, findings)
    order = order_of(trace.events)
    tensors = trace.run.memory.tensors
    offsets = {name: _elements_at(tensor) for name, tensor in tensors.items()}
    own = [name for name in tensors if name in trace.fresh]
    traffic = line_traffic(trace.events, own, threads_of(order)) if not recorder.machine else {}
    return {
        "schema": SCHEMA,
        "kernel": subject.name,
        "operation": subject.operation.name,
        "doc": subject.operation.doc,
        "backend": subject.description,
        "sizes": dict(case.sizes),
        "fill": case.fill,
        "grid": list(trace.grid),
        "notes": [*notes, *_cut(recorder)],
        "dropped": recorder.dropped,
        "layout": case.layout,
        "findings": [
            {
                **_finding(finding, sources),
                "element": _element(finding, trace),
                "event": _event_of(finding, trace),
                "other": _other_side(finding, trace),
            }
            for finding in findings
        ],
        "tensors": [_tensor(tensor, trace) for tensor in tensors.values()],
        "program_axes": _AXES.get(len(next(iter(order), ())), []),
        "programs": [list(program) for program in order],
        "events": [_event(event, order, sources, offsets) for event in trace.events],
        "machine": recorder.machine and {n: getattr(recorder.machine, n) for n in _MACHINE},
        "registers": [
            {"name": r.name, "type": r.type, "slots": r.slots, "line": sources.line(r.place)}
            for r in recorder.registers
        ],
        "changes": [
            {
                "event": change.event,
                "register": change.register,
                **_shaped(change.values, change.dtype),
            }
            for change in recorder.changes
        ],
        "lines": as_data(traffic, {place: sources.line(place) for place in traffic}),
        "sources": sources.listed,
    }


def order_of(events: Sequence[Event]) -> dict[Program, int]:
    """The programs that have events, numbered as they began; threads, which run as they happen to,
    as their blocks and they are counted: along x first."""
    programs = list(dict.fromkeys(event.program for event in events))
    if programs and len(programs[0]) == _THREAD:
        programs.sort(key=lambda program: (program[2::-1], program[:2:-1]))
    return {program: number for number, program in enumerate(programs)}


def _event_of(finding: Finding, trace: Trace) -> int | None:
    """The event that a finding is about: of those of its program and line the first that touches
    its element, or goes where it says that there is none; else the first; None if there is none."""
    own = [
        (number, event)
        for number, event in enumerate(trace.events)
        if (event.program, event.place) == (finding.program, finding.place)
    ]
    if finding.kind.startswith("out-of-bounds"):
        own = [(n, e) for n, e in own if isinstance(e, Access) and e.outside.any()]
    element = _element(finding, trace)
    for number, event in own:
        if isinstance(event, Access) and event.tensor == finding.tensor:
            if element is not None and element in event.elements:
                return number
            if element is None and _distance(finding, trace) in event.offsets[event.outside]:
                return number
    return own[0][0] if own else None


def _distance(finding: Finding, trace: Trace) -> int | None:
    """How far from the first element of its tensor a finding is, in elements as they lie."""
    tensor, index = trace.run.memory.tensors.get(finding.tensor or ""), finding.index
    if tensor is None or not index:
        return None
    if len(index) != len(tensor.strides):
        return index[0]
    return sum(place * step for place, step in zip(index, tensor.strides, strict=True))


def _element(finding: Finding, trace: Trace) -> int | None:
    """The number in C order of the element that a finding is about; None if there is none."""
    tensor = trace.run.memory.tensors.get(finding.tensor or "")
    if tensor is None or finding.index is None or len(finding.index) != len(tensor.shape):
        return None
    pairs = zip(finding.index, tensor.shape, strict=True)
    outside = any(not 0 <= i < size for i, size in pairs)
    return None if outside else int(np.ravel_multi_index(finding.index, tensor.shape))


def _other_side(finding: Finding, trace: Trace) -> int | None:
    """The event of another program that a finding is about as well: what it did to the element
    last before the finding's own event, else first after it. None if there is none."""
    element = _element(finding, trace)
    if finding.kind not in _BETWEEN_TWO or element is None:
        return None
    touches = [
        (number, event)
        for number, event in enumerate(trace.events)
        if isinstance(event, Access)
        and event.tensor == finding.tensor
        and element in event.elements
    ]
    place = finding.program, finding.place
    own = next(((n, e) for n, e in touches if (e.program, e.place) == place), None)
    if own is None:
        return None
    others = [
        n
        for n, e in touches
        if e.program != finding.program and not e.kind == own[1].kind == "load"
    ]
    before = [n for n in others if n < own[0]]
    return before[-1] if before else next(iter(others), None)


def numbers(values: NDArray[Any], dtype: str | None = None) -> list[Any]:
    """Values, flat, as JSON can hold them: floats in the fewest digits that mean the same; "nan",
    "inf", "-inf", addresses, and integers of more than 53 bits as strings."""
    flat = values.reshape(-1)
    if dtype == "bfloat16":
        flat = widened(flat, dtype).astype(np.float32)
    if flat.dtype.kind == "f":
        finite = np.isfinite(flat)
        texts = flat.astype(str)
        return [float(t) if f else str(t) for t, f in zip(texts, finite, strict=True)]
    plain = flat.tolist()
    if flat.dtype.kind == "O":  # addresses, which a kernel for CPUs may hold in a variable
        return [str(one) for one in plain]
    if flat.dtype.itemsize < 8:
        return plain
    return [n if abs(n) <= _EXACT else str(n) for n in plain]


def _cut(recorder: Recorder) -> list[str]:
    if not recorder.dropped:
        return []
    return [
        f"The steps end after the first {len(recorder.events):,}: {recorder.dropped:,} more were "
        "not recorded. Heat maps and totals count all of them."
    ]


def _tensor(tensor: CheckedTensor, trace: Trace) -> dict[str, Any]:
    run, dtype = trace.run, tensor.type.dtype
    is_result = tensor is run.output
    before, traffic = trace.fresh.get(tensor.name), trace.recorder.traffic_of(tensor)
    given = before is not None and before.initialised
    wrong = run.wrong if is_result else np.zeros(0, bool)
    known = zip(numbers(tensor.values, dtype), tensor.writer != NOBODY, strict=True)
    return {
        "name": tensor.name,
        "dtype": dtype,
        "shape": list(tensor.shape),
        "strides": list(tensor.strides),
        "role": "output" if is_result else "input" if before else "shared",
        "itemsize": tensor.itemsize,
        "before": numbers(before.values, dtype) if before and given else None,
        "after": [value if given or written else None for value, written in known],
        "expected": _expected(run.trial.expected.reference, tensor) if is_result else None,
        "wrong": np.flatnonzero(wrong).tolist(),
        "reads": traffic.reads.tolist(),
        "writes": traffic.writes.tolist(),
        "loaded_bytes": traffic.loaded,
        "stored_bytes": traffic.stored,
        "least_bytes": trace.least_bytes_of(tensor) if before else 0,
        "outside_lanes": traffic.outside,
    }


def _expected(reference: NDArray[Any], result: CheckedTensor) -> list[Any]:
    """The reference to the digits that the result's dtype has."""
    if not result.type.is_float:
        return numbers(reference)
    kept = np.float64 if result.type.dtype == "float64" else np.float32
    with np.errstate(over="ignore"):
        return numbers(reference.astype(kept))


def _elements_at(tensor: CheckedTensor) -> dict[int, int]:
    """The element at each offset in memory."""
    at = offsets_of(tensor.shape, tensor.strides)
    return {offset: element for element, offset in enumerate(at.reshape(-1).tolist())}


def _event(
    event: Event,
    order: Mapping[Program, int],
    sources: _Sources,
    offsets: Mapping[str, Mapping[int, int]],
) -> dict[str, Any]:
    common = {
        "kind": event.kind,
        "program": order[event.program],
        "step": event.step,
        "line": sources.line(event.place),
    }
    if isinstance(event, Computation):
        return {**common, **_computation(event)}
    return {**common, **_access(event, offsets[event.tensor])}


def _access(access: Access, elements: Mapping[int, int]) -> dict[str, Any]:
    """masked: lane, and the element that it would have touched or -1. outside: lane and offset."""
    offsets = access.offsets.reshape(-1).tolist()
    idle = np.flatnonzero(~access.active).tolist()
    out = np.flatnonzero(access.outside).tolist()
    return {
        "tensor": access.tensor,
        "has_mask": access.masked,
        "itemsize": access.itemsize,
        "bytes": access.bytes,
        "elements": access.elements.reshape(-1).tolist(),
        "masked": [[lane, elements.get(offsets[lane], -1)] for lane in idle],
        "outside": [[lane, offsets[lane]] for lane in out],
        **_shaped(access.values, access.dtype),
    }


def _computation(computation: Computation) -> dict[str, Any]:
    return {
        "name": computation.name,
        "operands": [_block(block) for block in computation.operands],
        "result": None if computation.result is None else _block(computation.result),
    }


def _block(block: Block) -> dict[str, Any]:
    return {"source": block.source, **_shaped(block.values, block.dtype)}


def _shaped(values: NDArray[Any] | None, dtype: str | None = None) -> dict[str, Any]:
    if values is None:
        return {"shape": None, "values": None}
    return {"shape": list(values.shape), "values": numbers(values, dtype)}


def _finding(finding: Finding, sources: _Sources) -> dict[str, Any]:
    return {
        **{name: getattr(finding, name) for name in _OF_FINDING},
        "program": finding.program and list(finding.program),
        "line": sources.line(finding.place),
    }


class _Sources:
    """The texts that the page shows: the kernel's, and functions elsewhere that it called."""

    def __init__(self, trace: Trace, findings: Sequence[Finding]) -> None:
        self.listed: list[dict[str, Any]] = []
        self._files: list[str] = []
        assert trace.subject.text is not None
        file = trace.subject.text.__code__.co_filename
        self._add(file, trace.first_line, trace.source.splitlines())
        for one in (*trace.events, *findings):
            if one.place is not None and self.line(one.place) is None:
                self._add(one.place.file, *function_at(one.place))

    def line(self, place: Place | None) -> list[int] | None:
        """Which text, and which line of its file; None if it is in none."""
        if place is None:
            return None
        for number, (file, text) in enumerate(zip(self._files, self.listed, strict=True)):
            if file == place.file and 0 <= place.line - text["first_line"] < len(text["lines"]):
                return [number, place.line]
        return None

    def _add(self, file: str, first_line: int, lines: Sequence[str]) -> None:
        self._files.append(file)
        text = {"file": Path(file).name, "first_line": first_line, "lines": list(lines)}
        self.listed.append(text)


def function_at(place: Place) -> tuple[int, list[str]]:
    """The first line and the lines of the innermost function around a line, else the line alone."""
    lines, found = linecache.getlines(place.file), place.around(ast.FunctionDef)
    first = first_line(found) if found else place.line
    last = (found and found.end_lineno) or place.line
    return first, textwrap.dedent("".join(lines[first - 1 : last])).splitlines() or [""]
