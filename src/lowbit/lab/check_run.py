"""Checking a kernel against the specification of its operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from types import FunctionType
from typing import Any

import numpy as np

from lowbit.lab import check_cuda
from lowbit.lab.check_bind import bind
from lowbit.lab.check_judge import first_index
from lowbit.lab.check_subject import GridLike, Reading, Run, Subject, Tested
from lowbit.lab.report import CheckResult, Finding
from lowbit.spec import SPECIAL, Array, Block, Case, Expected, Operation, from_function

Tell = Callable[[str, int, int, str | None], None]
"""Is told the kernel's name, how many cases have been tried, of how many, and the first error."""

# A run that takes more is not repeated with every kind of data.
_SLOW = 100_000


def check(
    kernel: Any,
    spec: Operation | Callable[..., Any],
    *,
    grid: GridLike = 1,
    output: str | None = None,
    initial: float | None = None,
    device: str | None = None,
    seed: int = 0,
    stop: bool = False,
    tell: Tell | None = None,
    **given: Any,
) -> CheckResult:
    """Whether a kernel does what a specification says, for many sizes and kinds of data.

    kernel: a function under triton.jit, a lowbit kernel, or one under numba.cuda.jit where the
    simulator is on (NUMBA_ENABLE_CUDASIM=1); or a function of torch tensors, named as the inputs of
    the specification, that launches Triton kernels and returns the result: of it `grid`, `output`
    and `initial` are left out, and `given` are its other arguments. spec: an Operation, or a
    function whose annotations carry shapes and dtypes in jaxtyping's form and whose body is the
    reference. grid: the number of programs on up to three axes, or a function that makes it from a
    dict of all sizes and block sizes; one that is no function is run at the exercise's sizes only.
    output: the input that the kernel replaces by the result. initial: what the caller fills the
    result with. device: "cpu" for the interpreter alone, "cuda" to run on the GPU too; by default
    where there is one. stop: end after the first case in which an error is found. tell: called
    after each case. given: values of other parameters, block sizes for example, or functions of
    the sizes.

    ValueError or TypeError if the arguments do not fit together; RuntimeError if what runs the
    kernel is of a version that is not known, or there is no GPU for device "cuda".
    """
    tested = tested_of(kernel, spec, grid, output, initial, seed, given)
    return check_tested(tested, device, *tested.cases(), stop=stop, tell=tell)


def check_tested(
    tested: Tested,
    device: str | None,
    cases: Sequence[Case],
    notes: Sequence[str] = (),
    *,
    stop: bool = False,
    tell: Tell | None = None,
) -> CheckResult:
    """The outcome of these cases, the exercise first. Raises as `check` does."""
    on_gpu = check_cuda.wanted(device, tested)
    notes = list(notes)
    found = _check_cases(tested, cases, on_gpu, notes, stop, tell)
    findings = [finding for number in sorted(found) for finding in found[number]]
    shown = next((cases[number] for number in sorted(found) if found[number]), None)
    if any(f.severity == "error" for f in findings):
        # What is wrong with plain numbers says more.
        findings = [f for f in findings if f.kind != "special-values"]
    else:
        findings += other_blocks(tested, cases)
    if any(f.kind.startswith("out-of-bounds") for f in findings) and on_gpu:
        notes.append("cases that leave a tensor were not run on the GPU")
    return CheckResult(
        tested.name,
        tested.operation.name,
        tested.description,
        tuple(_merged(findings)),
        len(found),
        ("interpreter", "cuda") if on_gpu else ("interpreter",),
        tuple(notes),
        tested.viewer(shown),
    )


def _check_cases(
    tested: Tested,
    cases: Sequence[Case],
    on_gpu: bool,
    notes: list[str],
    stop: bool,
    tell: Tell | None,
) -> dict[int, list[Finding]]:
    """What is found in each case, by its number: the exercise, then from small to large, until one
    does not end."""
    found: dict[int, list[Finding]] = {}
    first: Finding | None = None
    slow = tested.slow
    small = sorted(range(1, len(cases)), key=lambda n: prod(cases[n].sizes.values()))
    for number in (0, *small):
        case = cases[number]
        exercise = case.sizes == cases[0].sizes
        if slow and exercise and number:
            continue
        thorough = number % 3 == 0 and not (slow and exercise)
        found[number], steps = _check_case(tested, case, thorough=thorough, on_gpu=on_gpu)
        if number == 0 and (slow := slow or steps > _SLOW):
            notes.append("it takes many steps, so the exercise was tried with normal data only")
        first = first or next((f for f in found[number] if f.severity == "error"), None)
        if tell is not None:
            tell(tested.name, len(found), len(cases), None if first is None else str(first))
        endless = any(finding.kind == "endless" for finding in found[number])
        if len(found) < len(cases) and (endless or (stop and first is not None)):
            notes.append(f"{len(cases) - len(found)} more cases were not tried")
            break
    return found


def tested_of(
    kernel: Any,
    spec: Operation | Callable[..., Any],
    grid: GridLike,
    output: str | None,
    initial: float | None,
    seed: int,
    given: Mapping[str, Any],
) -> Tested:
    """The kernel, or function of tensors, bound to the operation. Raises as `check` does."""
    if not isinstance(kernel, FunctionType):
        return subject_of(kernel, spec, grid, output, initial, seed, given)
    from lowbit.lab.check_function import TestedFunction

    if (grid, output, initial) != (1, None, None):
        raise ValueError(
            f"{kernel.__name__} is a function of tensors, which launches its kernels itself: leave "
            "out grid, output and initial (a kernel needs @triton.jit)"
        )
    return TestedFunction.of(kernel, operation_of(spec), seed, given)


def operation_of(spec: Operation | Callable[..., Any]) -> Operation:
    """The operation that a specification states. TypeError if it is none."""
    if not callable(spec):
        raise TypeError(f"spec is {spec!r}; give an annotated function, or an Operation")
    return spec if isinstance(spec, Operation) else from_function(spec)


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
    operation = operation_of(spec)
    if not isinstance(initial, (int, float, type(None))):
        raise TypeError(f"initial is {initial!r}; give a number, or None")
    known = [t.name for t in operation.inputs]
    if output is not None and output not in known:
        raise ValueError(f"output is {output!r}; it must be an input: {', '.join(known)}")
    reading = reading_of(kernel)
    binding = bind(reading.parameters, operation, {**reading.constants, **given}, output)
    return Subject(operation, seed, reading, binding, grid, output, initial, given)


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
    if isinstance(kernel, FunctionType):
        raise TypeError(
            f"{kernel.__name__} is a function of tensors; only a single kernel can be shown: give "
            "one that it launches"
        )
    raise TypeError(
        f"cannot check {kernel!r}; give a function under triton.jit or numba.cuda.jit, a lowbit "
        "kernel, or a function of tensors that launches kernels"
    )


def _check_case(
    tested: Tested, case: Case, *, thorough: bool, on_gpu: bool
) -> tuple[list[Finding], int]:
    """One case, and how many steps it took; if thorough, once more in another order and with
    poison in undefined lanes."""
    inputs = case.inputs(tested.seed)
    expected = tested.expected(case, inputs)
    run = tested.run(case, inputs)
    findings = [run.crash] if run.crash else tested.judge(case, inputs, run, expected)
    findings = [*run.memory.findings, *findings]
    if not run.crash and case.fill not in SPECIAL:
        if thorough or run.memory.atomics:
            findings += _again(tested, case, inputs, run, expected)
        outside = any(f.kind.startswith("out-of-bounds") for f in findings)
        if on_gpu and not outside:
            findings += check_cuda.compare(tested, case, inputs, run, expected)
    layout = f"{case.layout} tensors" if case.layout != "contiguous" else None
    sizes = dict(case.sizes)
    placed = [replace(f, sizes=sizes, fill=case.fill, layout=layout) for f in findings]
    return placed, run.memory.steps


def other_blocks(tested: Tested, cases: Sequence[Case]) -> list[Finding]:
    """What goes wrong first in each variant of what is tested."""
    few = [case for case in cases if case.fill == "normal" and case.layout == "contiguous"][:3]
    findings: list[Finding] = []
    for words, other, severity in tested.variants():
        tried = (_check_case(other, case, thorough=False, on_gpu=False)[0] for case in few)
        errors = (f for found in tried for f in found if f.severity == "error")
        if (first := next(errors, None)) is not None:
            message = f"with {words}: {first.title}: {first.message}"
            findings.append(replace(first, kind="block-sizes", message=message, severity=severity))
    return findings


def _again(
    tested: Tested,
    case: Case,
    inputs: Mapping[str, Array],
    run: Run,
    expected: Expected,
) -> list[Finding]:
    other = tested.run(case, inputs, shuffled=run.several, poisoned=True)
    if other.crash:
        return [other.crash]
    if other.same_as(run):
        return []
    findings: list[Finding] = []
    plain = tested.run(case, inputs, shuffled=run.several) if run.several else run
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
