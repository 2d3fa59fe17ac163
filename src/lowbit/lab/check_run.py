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
from lowbit.lab.check_cases import SPECIAL, Case, cases_of, strides_of, widened
from lowbit.lab.check_judge import first_index, judge
from lowbit.lab.check_memory import CheckedTensor, EndlessError, Memory, Role
from lowbit.lab.check_numba import NumbaKernel
from lowbit.lab.record import Recorder
from lowbit.lab.report import CheckResult, Finding
from lowbit.lab.trace import Place, Program
from lowbit.spec.typed import Array, Block, Expected, Operation, Sizes, from_function

if TYPE_CHECKING:
    from lowbit.lab.view_page import View

Grid = tuple[int, int, int]
GridLike = int | Sequence[int] | Callable[[dict[str, Any]], int | Sequence[int]]

_AXES = 3
# What a program may take, in steps of an interpreter: this much for each element of the space of
# all sizes, and this much besides.
_STEPS_OF_ONE, _STEPS = 100, 50_000
# A run that takes more is not repeated with every kind of data.
_SLOW = 100_000


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

    @property
    def alternatives(self) -> tuple[Mapping[str, Any], ...]:
        """Other values that it says are as good."""
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
        several = isinstance(wanted, (tuple, list, np.ndarray))
        dims: list[Any] = list(wanted) if several else [wanted]
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
        return Memory(
            tensors,
            machinery=self.reading.machinery(),
            recorder=recorder,
            poisoned=poisoned,
            most_steps=_STEPS + _STEPS_OF_ONE * prod(case.sizes.values()),
        )

    def expected(self, case: Case, inputs: Mapping[str, Array]) -> Expected:
        """The reference's result for these inputs, as they are stored."""
        named = {t.name: widened(inputs[t.name], t.dtype) for t in self.operation.inputs}
        return self.operation.expect(named, case.sizes, self.seed)

    def judge(self, case: Case, run: Run, expected: Expected) -> list[Finding]:
        """What is wrong with the result of a run."""
        return judge(run, expected, lenient=case.fill == SPECIAL and not self.operation.special)

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
    if isinstance(error, EndlessError):
        return Finding("endless", text[0], program=program, place=place)
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
    # Numba's simulator makes each thread one of Python: a thousand blocks take too long.
    long = not isinstance(subject.reading, NumbaKernel)
    cases = cases_of(subject.operation, binding.blocks, bool(binding.takes_strides), long)
    notes: list[str] = []
    fixed = any(isinstance(value, int) and value > 1 for value in given.values())
    one = (1, 1, 1)
    if not callable(grid) and (fixed or subject.grid_at(cases[0].sizes) != one):
        exercise = cases[0].sizes
        cases = [case for case in cases if case.sizes == exercise]
        notes.append("the grid is fixed, so only one set of sizes was tried")
    found = _check_cases(subject, cases, on_gpu, notes)
    findings = [finding for number in sorted(found) for finding in found[number]]
    shown = next((cases[number] for number in sorted(found) if found[number]), None)
    if any(f.severity == "error" for f in findings):
        # What is wrong with plain numbers says more.
        findings = [f for f in findings if f.kind != "special-values"]
    elif callable(grid):
        findings += other_blocks(subject, cases)
    if any(f.kind.startswith("out-of-bounds") for f in findings) and on_gpu:
        notes.append("cases that leave a tensor were not run on the GPU")
    return CheckResult(
        subject.reading.name,
        subject.operation.name,
        subject.reading.description,
        tuple(_merged(findings)),
        len(found),
        ("interpreter", "cuda") if on_gpu else ("interpreter",),
        tuple(notes),
        partial(_view, subject, shown),
    )


def _check_cases(
    subject: Subject, cases: Sequence[Case], on_gpu: bool, notes: list[str]
) -> dict[int, list[Finding]]:
    """What is found in each case, by its number; small ones first, until one does not end."""
    found: dict[int, list[Finding]] = {}
    slow = isinstance(subject.reading, NumbaKernel)
    for number in sorted(range(len(cases)), key=lambda n: prod(cases[n].sizes.values())):
        case = cases[number]
        exercise = case.sizes == cases[0].sizes
        if slow and exercise and number:
            continue
        thorough = number % 3 == 0 and not (slow and exercise)
        found[number], steps = _check_case(subject, case, thorough=thorough, on_gpu=on_gpu)
        if number == 0 and (slow := slow or steps > _SLOW):
            notes.append("it takes many steps, so the exercise was tried with normal data only")
        if any(finding.kind == "endless" for finding in found[number]):
            notes.append("the other cases were not tried")
            break
    return found


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
    if not callable(spec):
        raise TypeError(f"spec is {spec!r}; give an annotated function, or an Operation")
    if not isinstance(initial, (int, float, type(None))):
        raise TypeError(f"initial is {initial!r}; give a number, or None")
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


def _check_case(
    subject: Subject, case: Case, *, thorough: bool, on_gpu: bool
) -> tuple[list[Finding], int]:
    """One case, and how many steps it took; if thorough, once more in another order and with
    poison in undefined lanes."""
    inputs = case.inputs(subject.operation, subject.seed)
    expected = subject.expected(case, inputs)
    run = subject.run(case, inputs)
    findings = [run.crash] if run.crash else subject.judge(case, run, expected)
    findings = [*run.memory.findings, *findings]
    if not run.crash and case.fill != SPECIAL:
        shuffle = prod(subject.grid_at(case.sizes)) > 1
        if thorough or run.memory.atomics:
            findings += _again(subject, case, inputs, run, expected, shuffle)
        outside = any(f.kind.startswith("out-of-bounds") for f in findings)
        if on_gpu and not outside:
            findings += check_cuda.compare(subject, case, inputs, run, expected)
    layout = f"{case.layout} tensors" if case.layout != "contiguous" else None
    sizes = dict(case.sizes)
    placed = [replace(f, sizes=sizes, fill=case.fill, layout=layout) for f in findings]
    return placed, run.memory.steps


def other_blocks(subject: Subject, cases: Sequence[Case]) -> list[Finding]:
    """What goes wrong first with block sizes that the kernel says are as good, an error; or, where
    nobody has said which, with all of them doubled, a warning."""
    free = subject.binding.free_blocks
    doubled = {name: 2 * size for name, size in free.items()}
    choices = [(numbers, "error") for numbers in subject.reading.alternatives]
    choices += [(doubled, "warning")] if doubled else []
    few = [case for case in cases if case.fill == "normal" and case.layout == "contiguous"][:3]
    findings: list[Finding] = []
    for numbers, severity in choices:
        binding = replace(subject.binding, numbers={**subject.binding.numbers, **numbers})
        other = replace(subject, binding=binding)
        tried = (_check_case(other, case, thorough=False, on_gpu=False)[0] for case in few)
        errors = (f for found in tried for f in found if f.severity == "error")
        if (first := next(errors, None)) is not None:
            sizes = ", ".join(f"{name}={size}" for name, size in numbers.items())
            message = f"with {sizes}: {first.title}: {first.message}"
            findings.append(replace(first, kind="block-sizes", message=message, severity=severity))
    return findings


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
    if other.memory.undefined and not other.same_as(plain):
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
