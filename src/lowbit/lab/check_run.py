"""Checking a kernel against the specification of its operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lowbit.lab import check_cuda
from lowbit.lab.check_bind import Binding, Parameter, bind
from lowbit.lab.check_cases import Case, cases_of, strides_of, widened
from lowbit.lab.check_memory import CheckedTensor, Memory, Role
from lowbit.lab.record import Recorder
from lowbit.lab.report import CheckResult, Finding
from lowbit.lab.trace import Place, Program
from lowbit.spec.typed import Array, Block, Expected, Operation, Sizes, from_function

if TYPE_CHECKING:
    from lowbit.lab.view_page import View

Grid = tuple[int, int, int]
GridLike = int | Sequence[int] | Callable[[dict[str, Any]], int | Sequence[int]]

_AXES = 3


class Reading(Protocol):
    """A way to run one kernel on a Memory: by Triton's interpreter, lowbit's own, a simulator."""

    @property
    def name(self) -> str:
        """The kernel's name."""
        ...

    @property
    def text(self) -> Callable[..., None]:
        """The function as it was written."""
        ...

    @property
    def description(self) -> str:
        """What runs it, with its version."""
        ...

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The kernel's parameters."""
        ...

    @property
    def constants(self) -> Mapping[str, Any]:
        """Values that the kernel brings with it."""
        ...

    def machinery(self) -> tuple[str, ...]:
        """The folders whose frames are not a kernel's text."""
        ...

    def run(
        self, memory: Memory, arguments: Mapping[str, Any], programs: Sequence[Program], grid: Grid
    ) -> None:
        """Run these programs in this order."""
        ...


@dataclass(frozen=True)
class Subject:
    """A kernel, bound to an operation: everything that a run needs besides a case.

    `output` names the input that the kernel replaces by the result; `initial` is what the result
    is filled with before the kernel starts, None for poison.
    """

    reading: Reading
    operation: Operation
    binding: Binding
    grid: GridLike
    output: str | None
    initial: float | None
    seed: int

    def grid_at(self, sizes: Sizes) -> Grid:
        """The grid at these sizes. ValueError if it is none."""
        numbers = self.binding.numbers_at(sizes)
        wanted = self.grid(numbers) if callable(self.grid) else self.grid
        dims = [wanted] if isinstance(wanted, (int, np.integer)) else list(wanted)
        if not 1 <= len(dims) <= _AXES or any(
            not isinstance(n, (int, np.integer)) or n < 1 for n in dims
        ):
            raise ValueError(
                f"the grid of {self.reading.name} is {wanted!r} at {dict(sizes)}; it must be one "
                "to three positive numbers, or a function of the sizes that returns them"
            )
        x, y, z = [*(int(n) for n in dims), 1, 1, 1][:_AXES]
        return x, y, z

    def memory(
        self,
        case: Case,
        inputs: Mapping[str, Array],
        poisoned: bool,
        recorder: Recorder | None,
    ) -> Memory:
        """Fresh tensors that hold the inputs, and the result's."""
        result = self.operation.result
        strided = self.binding.takes_strides
        tensors: list[CheckedTensor] = []
        for type_ in self.operation.inputs:
            role: Role = "both" if type_.name == self.output else "input"
            shape = type_.shape(case.sizes)
            strides = strides_of(shape, case.layout if type_.name in strided else "contiguous")
            tensors.append(CheckedTensor(type_, inputs[type_.name], strides, role))
        if self.output is None:
            shape = result.shape(case.sizes)
            strides = strides_of(shape, case.layout if result.name in strided else "contiguous")
            dtype = np.dtype("uint16" if result.dtype == "bfloat16" else result.dtype)
            filled = np.full(shape, self.initial or 0, dtype)
            tensors.append(
                CheckedTensor(result, filled, strides, "output", self.initial is not None)
            )
        machinery = self.reading.machinery()
        return Memory(tensors, machinery=machinery, recorder=recorder, poisoned=poisoned)

    def expected(self, case: Case, inputs: Mapping[str, Array]) -> Expected:
        """The reference's result for these inputs, as they are stored."""
        named = {t.name: widened(inputs[t.name], t.dtype) for t in self.operation.inputs}
        return self.operation.expect(named, case.sizes, self.seed)

    def run(
        self,
        case: Case,
        inputs: Mapping[str, Array],
        *,
        shuffled: bool = False,
        poisoned: bool = False,
        recorder: Recorder | None = None,
    ) -> Run:
        """Run the kernel once, its programs in order or shuffled."""
        memory = self.memory(case, inputs, poisoned, recorder)
        strides = {name: tensor.strides for name, tensor in memory.tensors.items()}
        arguments = self.binding.arguments(case.sizes, strides)
        grid = self.grid_at(case.sizes)
        programs: list[Program] = list(product(*(range(n) for n in grid)))
        if shuffled:
            order = np.random.default_rng(self.seed).permutation(len(programs))
            # Last first, and nothing where it was: a shuffle of two may shuffle nothing.
            programs = [programs[i] for i in (order if len(order) > 2 else (1, 0))]
        crash = None
        try:
            self.reading.run(memory, arguments, programs, grid)
        except Exception as error:
            crash = _crash(error, memory)
        return Run(memory, memory.tensors[self.output or self.operation.result.name], crash)


@dataclass(frozen=True, eq=False)
class Run:
    """What a run left behind."""

    memory: Memory
    output: CheckedTensor
    crash: Finding | None

    @property
    def result(self) -> Array:
        """The result in float64, int64 or bool."""
        return widened(self.output.values, self.output.type.dtype)

    def same_as(self, other: Run) -> bool:
        """Whether both left the same bits, NaN aside."""
        return bool(np.array_equal(self.result, other.result, self.output.type.is_float))


def _crash(error: Exception, memory: Memory) -> Finding:
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    place, frame = None, error.__traceback__
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if not file.startswith(memory.machinery):
            place = Place(file, frame.tb_lineno)
        frame = frame.tb_next
    program = memory.program if memory.programs else None
    text = str(error).strip().splitlines()
    message = f"{type(error).__name__}: {text[0] if text else 'without a message'}"
    return Finding("crash", message, program=program, place=place)


def check(
    kernel: Any,
    spec: Operation | Callable[..., Any],
    *,
    grid: GridLike = 1,
    output: str | None = None,
    initial: float | None = None,
    device: str | None = None,
    seed: int = 0,
    **given: Block | float,
) -> CheckResult:
    """Whether a kernel does what a specification says, for many sizes and kinds of data.

    kernel: a function under triton.jit, a lowbit kernel, or one under numba.cuda.jit where the
    simulator is on (NUMBA_ENABLE_CUDASIM=1). spec: an Operation, or a function whose annotations
    carry shapes and dtypes in jaxtyping's form and whose body is the reference. grid: the number
    of programs on up to three axes, or a function that makes it from a dict of all sizes and
    block sizes; one that is no function is run at the exercise's sizes only. output: the input
    that the kernel replaces by the result. initial: what the caller fills the result with.
    device: "cpu" for the interpreter alone, "cuda" to run on the GPU too; by default where there
    is one. given: values of other parameters, block sizes for example, or functions of the sizes.

    ValueError or TypeError if the arguments do not fit together; RuntimeError if what runs the
    kernel is of a version that is not known, or there is no GPU for device "cuda".
    """
    subject = subject_of(kernel, spec, grid, output, initial, seed, given)
    on_gpu = check_cuda.wanted(device, subject.reading)
    binding = subject.binding
    cases = cases_of(subject.operation, binding.blocks, bool(binding.takes_strides))
    notes: list[str] = []
    fixed = any(isinstance(value, int) and value > 1 for value in given.values())
    if not callable(grid) and (fixed or prod(np.atleast_1d(grid)) > 1):
        exercise = cases[0].sizes
        cases = [case for case in cases if case.sizes == exercise]
        notes.append("the grid is fixed, so only one set of sizes was tried")
    findings: list[Finding] = []
    shown: Case | None = None
    for number, case in enumerate(cases):
        found = _check_case(subject, case, thorough=number % 3 == 0, on_gpu=on_gpu)
        shown = case if found and shown is None else shown
        findings += found
    if any(f.kind.startswith("out-of-bounds") for f in findings) and on_gpu:
        notes.append("cases that leave a tensor were not run on the GPU")
    return CheckResult(
        subject.reading.name,
        subject.operation.name,
        subject.reading.description,
        tuple(_merged(findings)),
        len(cases),
        ("interpreter", "cuda") if on_gpu else ("interpreter",),
        tuple(notes),
        partial(_view, subject, shown),
    )


def _view(subject: Subject, case: Case | None) -> View:
    from lowbit.lab.view_run import view_subject

    return view_subject(subject, case)


def subject_of(
    kernel: Any,
    spec: Operation | Callable[..., Any],
    grid: GridLike,
    output: str | None,
    initial: float | None,
    seed: int,
    given: Mapping[str, Block | float],
) -> Subject:
    """The kernel, bound to the operation. Raises as `check` does."""
    operation = spec if isinstance(spec, Operation) else from_function(spec)
    known = [t.name for t in operation.inputs]
    if output is not None and output not in known:
        raise ValueError(f"output is {output!r}; it must be an input: {', '.join(known)}")
    reading = reading_of(kernel)
    binding = bind(reading.parameters, operation, {**reading.constants, **given}, output)
    return Subject(reading, operation, binding, grid, output, initial, seed)


def reading_of(kernel: Any) -> Reading:
    """What runs this kernel. TypeError if nothing does."""
    from lowbit.jit.kernel import Kernel
    from lowbit.lab import check_cpu, check_numba, check_triton

    if isinstance(kernel, (Kernel, check_cpu.CpuKernel)):
        return kernel if isinstance(kernel, check_cpu.CpuKernel) else check_cpu.CpuKernel(kernel)
    if check_triton.is_triton(kernel):
        return check_triton.TritonKernel.of(kernel)
    if check_numba.is_numba(kernel):
        return check_numba.NumbaKernel.of(kernel)
    raise TypeError(
        f"cannot check {kernel!r}; give a function under triton.jit or numba.cuda.jit, or a "
        "lowbit kernel"
    )


def _check_case(subject: Subject, case: Case, *, thorough: bool, on_gpu: bool) -> list[Finding]:
    """One case; if thorough, once more in another order and with poison in undefined lanes."""
    inputs = case.inputs(subject.operation, subject.seed)
    expected = subject.expected(case, inputs)
    run = subject.run(case, inputs)
    findings = [run.crash] if run.crash else judge(run, expected)
    findings = [*run.memory.findings, *findings]
    if not run.crash:
        shuffle = prod(subject.grid_at(case.sizes)) > 1
        if thorough or run.memory.atomics:
            findings += _again(subject, case, inputs, run, expected, shuffle)
        outside = any(f.kind.startswith("out-of-bounds") for f in findings)
        if on_gpu and not outside:
            findings += check_cuda.compare(subject, case, inputs, run, expected)
    layout = f"{case.layout} tensors" if case.layout != "contiguous" else None
    sizes = dict(case.sizes)
    return [replace(f, sizes=sizes, fill=case.fill, layout=layout) for f in findings]


def judge(run: Run, expected: Expected) -> list[Finding]:
    """Elements that were never written, and wrong values among the others."""
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
    if wrong.any():
        index = first_index(wrong)
        element = int(np.ravel_multi_index(index, output.shape)) if index else 0
        writer = int(output.writer[element])
        program = run.memory.programs[writer] if writer >= 0 else None
        findings.append(wrong_values("wrong-values", output, expected, got, wrong, program))
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
    value, wanted = got[index].item(), expected.value[index].item()
    by = f", written by program {list(program)}" if program is not None else ""
    budget = expected.budget[index].item()
    within = f" within {budget:.3g}" if budget else ""
    count = int(wrong.sum())
    message = (
        f"{count} of {output.count} elements; first {output.name}{list(index)}: expected "
        f"{wanted:.9g}{within}, got {value:.9g}{by}"
    )
    return Finding(
        kind,
        message,
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


def _again(
    subject: Subject,
    case: Case,
    inputs: Mapping[str, Array],
    run: Run,
    expected: Expected,
    shuffle: bool,
) -> list[Finding]:
    other = subject.run(case, inputs, shuffled=shuffle, poisoned=True)
    if other.crash:
        return [other.crash]
    if other.same_as(run):
        return []
    findings: list[Finding] = []
    plain = subject.run(case, inputs, shuffled=shuffle) if shuffle else run
    differs = ~((plain.result == run.result) | (np.isnan(plain.result) & np.isnan(run.result)))
    if differs.any():
        index = first_index(differs)
        name, values = run.output.name, (run.result[index], plain.result[index])
        message = f"{name}{list(index)} is {values[0]:.9g} in order and {values[1]:.9g} shuffled"
        # Atomic float additions may round differently; both results must be right all the same.
        rounding = run.memory.atomics and not expected.wrong(plain.result).any()
        kind = "rounding-order" if rounding else "order-dependent"
        findings.append(
            Finding(
                kind,
                message,
                "warning" if rounding else "error",
                tensor=name,
                index=index,
            )
        )
    if not other.same_as(plain):
        findings.append(
            Finding(
                "undefined-lanes",
                "a masked load without other= gives its masked lanes no value, and the result "
                "depends on them; pass other=",
                "warning",
                tensor=run.output.name,
            )
        )
    return findings


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """The first of each kind, tensor and line, errors first, with how often it was seen."""
    first: dict[tuple[Any, ...], Finding] = {}
    for finding in findings:
        key = (finding.kind, finding.tensor, finding.place, finding.device)
        seen = first.get(key)
        first[key] = replace(seen, more=seen.more + 1) if seen else finding
    return sorted(first.values(), key=lambda f: f.severity != "error")
