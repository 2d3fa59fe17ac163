"""Checking what computes operations on a CPU against their specifications: compiled, on each
instruction set that the machine has, with one thread and with several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

import lowbit
from lowbit import isa as instruction_sets
from lowbit.lab.check.cases import merged
from lowbit.lab.check.cpu_functions import CpuFunction, cpu_functions, step_functions
from lowbit.lab.report import CheckResult, Finding, Tell
from lowbit.lab.run.tensor import POISON
from lowbit.lab.source import FUNCTION
from lowbit.spec import Array, Case, edge_cases, fill_cases

_THREADS = 3


def functions() -> dict[str, CpuFunction]:
    """All of them by name; the steps where Numba is installed."""
    try:
        return {**cpu_functions.load(), **step_functions()}
    except ModuleNotFoundError:
        return cpu_functions.load()


def check_cpu(
    name: str | None = None, *, stop: bool = False, tell: Tell | None = None
) -> Iterator[CheckResult]:
    """Check one function, or all. stop, tell: as `check` takes them.

    ValueError, with the names that there are, for an unknown name.
    """
    known = functions()
    if name is not None and name not in known:
        listed = ", ".join(FUNCTION + one for one in known)
        raise ValueError(f"no function {FUNCTION}{name}; there are {listed}")
    for one in known.values() if name is None else [known[name]]:
        yield check_function(one, stop=stop, tell=tell)


def check_function(
    function: CpuFunction, *, every: int = 1, stop: bool = False, tell: Tell | None = None
) -> CheckResult:
    """Check a function: all fills, and sizes one off those that kernels like; of these cases the
    first and each `every`th after it."""
    spec, title = function.operation, FUNCTION + function.name
    cases = [*fill_cases(spec), *edge_cases(spec, rounds=2)][::every]
    found: list[Finding] = []
    tried = 0
    for tried, case in enumerate(cases, 1):
        found += _case(function, case)
        if tell is not None:
            tell(title, tried, len(cases), str(found[0]) if found else None)
        if found and stop:
            break
    sets = f"lowbit {lowbit.__version__} for {', '.join(instruction_sets.available())}"
    left = len(cases) - tried
    return CheckResult(
        title,
        spec.name,
        sets if function.compiled else "Numba",
        tuple(merged(found)),
        tried,
        ("cpu",),
        (f"{left} more cases were not tried",) if left else (),
    )


def _case(function: CpuFunction, case: Case) -> Iterator[Finding]:
    """What is wrong with a case, and with which instruction set: each is run with one thread and
    with several, which must give the same bits, as all sets must where the function says so."""
    inputs = case.inputs()
    expected, name = case.expect(inputs), case.operation.result.name
    bits: dict[str, bytes] = {}
    for run, how in _runs(function):
        try:
            out, wrong = _run(function, case, inputs, how)
        except Exception as error:  # it is the function's fault, for the case is a legal one
            lines = str(error).splitlines() or ["without a message"]
            wrong = [Finding("crash", f"{type(error).__name__}: {lines[0]}")]
        else:
            verdict = expected.check(out)
            if not verdict.ok:
                wrong.append(Finding("wrong-values", verdict.message, tensor=name))
            key = "" if function.same_bits else run
            if out.tobytes() != bits.setdefault(key, out.tobytes()):
                other = f"other bits than with one thread{'' if key else ', or on another set'}"
                wrong.append(Finding("order-dependent", f"{how} gives {other}", tensor=name))
        for one in wrong:
            message = f"{one.message} ({case})"
            yield replace(one, message=message, sizes=case.sizes, fill=case.fill, device=run)


def _runs(function: CpuFunction) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a function is called with, and what that is called."""
    if not function.compiled:
        yield "cpu", {}
        return
    for isa in instruction_sets.available():
        for threads in (1, _THREADS):
            yield isa, {"isa": isa, "threads": threads}


def _run(
    function: CpuFunction, case: Case, inputs: Mapping[str, Array], how: Mapping[str, Any]
) -> tuple[Array, list[Finding]]:
    """The result, written into the middle of poison, and what is wrong but for its values."""
    name, findings = case.operation.result.name, list[Finding]()
    rows, columns = case.shape(name)
    storage = case.dtype(name).storage
    whole = np.full((rows + 2, (columns + 7) * storage.itemsize), POISON, np.uint8)
    inside = np.zeros(whole.shape, bool)
    inside[1:-1, 3 * storage.itemsize : (3 + columns) * storage.itemsize] = True
    out = whole.view(storage)[1:-1, 3 : 3 + columns]
    given = {one: array.copy() for one, array in inputs.items()}
    result = function(case, given, out=out, **how)
    for one, array in given.items():
        if array.tobytes() != inputs[one].tobytes():
            findings.append(Finding("input-written", f"{one} was changed", tensor=one))
    if not isinstance(result, np.ndarray) or not np.shares_memory(result, out):
        findings.append(Finding("wrong-result", "it does not return `out`", tensor=name))
    if (whole[~inside] != POISON).any():
        findings.append(Finding("out-of-bounds-store", f"around {name}", tensor=name))
    return out, findings
