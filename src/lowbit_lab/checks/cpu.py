"""Checking what computes operations on a CPU against their specifications: compiled, on each
instruction set that the machine has, with one thread and with several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import lowbit
from lowbit import isa as instruction_sets
from lowbit.numerics import QTensor, int_format
from lowbit.registry import Registry
from lowbit.spec import Array, Case, Operation, edge_cases, fill_cases
from lowbit.spec.operations import operations
from lowbit_lab.backends.source import FUNCTION
from lowbit_lab.checks.cases import merged
from lowbit_lab.checks.result import CheckResult, OnProgress
from lowbit_lab.run.findings import Finding
from lowbit_lab.run.tensor import POISON

# What computes operations on a CPU: lowbit's functions on NumPy arrays.
#
# Each is called with a case of its operation and the inputs of that case, and returns the result;
# `lowbit check cpu` checks them all.


@dataclass(frozen=True)
class CpuFunction:
    """Something that computes an operation.

    call: (case, inputs, out=, isa=, threads=), which returns `out`, filled. same_bits:
    whether the result is the same on every set, as it is for any number of threads.
    """

    name: str
    operation: Operation
    call: Callable[..., Array]
    same_bits: bool = True

    def __call__(self, case: Case, inputs: Mapping[str, Array], **how: Any) -> Array:
        return self.call(case, inputs, **how)


cpu_functions: Registry[CpuFunction] = Registry("function on a CPU")


def _computes(
    *names: str, same_bits: bool = True
) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
    """Register what computes the operations of these names."""

    def register(call: Callable[..., Array]) -> Callable[..., Array]:
        for name in names:
            cpu_functions.add(
                name, CpuFunction(name, operations.get(name), call, same_bits=same_bits)
            )
        return call

    return register


@_computes("matmul")
def _matmul(case: Case, inputs: Mapping[str, Array], **how: Any) -> Array:
    return lowbit.matmul(inputs["a"], weight(case, inputs), **how)


@_computes("matmul_scaled")
def _matmul_scaled(case: Case, inputs: Mapping[str, Array], **how: Any) -> Array:
    if "out_scale" in inputs:
        how["out_scale"] = float(inputs["out_scale"])
        how["out_zero_point"] = int(inputs["out_zero_point"])
    how |= {name: inputs.get(name) for name in ("a_scale", "a_zero_point")}
    how |= {"out_dtype": case.dtype("c").name, **_post_ops(case, inputs)}
    return lowbit.matmul_scaled(inputs["a"], weight(case, inputs), **how)


@_computes("linear_dynamic", "linear_groups")
def _linear_dynamic(case: Case, inputs: Mapping[str, Array], **how: Any) -> Array:
    how |= {"symmetric": case.static["symmetric"], **_post_ops(case, inputs)}
    return lowbit.linear_dynamic(_rows(inputs["x"]), weight(case, inputs), **how)


@_computes("linear_weight_only")
def _linear_weight_only(case: Case, inputs: Mapping[str, Array], **how: Any) -> Array:
    how |= {"out_dtype": case.dtype("c").name, **_post_ops(case, inputs)}
    return lowbit.linear_weight_only(_rows(inputs["x"]), weight(case, inputs), **how)


@_computes("gemm", same_bits=False)
def _gemm(case: Case, inputs: Mapping[str, Array], **how: Any) -> Array:
    how |= {"alpha": case.static["alpha"], "out_dtype": case.dtype("out").name}
    if "c" in inputs:
        how |= {"c": inputs["c"], "beta": case.static["beta"]}
    return lowbit.gemm(inputs["a"], inputs["b"], **how)


def weight(case: Case, inputs: Mapping[str, Array]) -> Any:
    """The right operand b of a case as lowbit takes it: packed, with its scales if it has any."""
    b, fmt = inputs["b"], int_format(case.dtype("b").name)
    scale = inputs.get("b_scale")
    if scale is None:
        return lowbit.pack(b, dtype=fmt.name) if fmt.bits == 4 else b
    zero = inputs.get("b_zero_point", np.zeros(scale.shape, np.int32))
    groups: dict[str, int] = {}
    if b.ndim == 3:
        groups = {"group_size": b.shape[1], "group_axis": 0}
    return lowbit.pack(QTensor(b.reshape(-1, b.shape[-1]), scale, zero, fmt, axis=1, **groups))


def _rows(x: Array) -> Array:
    return x.reshape(len(x), -1)


def _post_ops(case: Case, inputs: Mapping[str, Array]) -> dict[str, Any]:
    """What follows a product: the operands that there are and that take part, and the order."""
    order = case.static["post_ops"]
    operands = {name: inputs[name] for name in ("bias", "residual") if name in inputs}
    if order is None:
        return operands
    kept = [s for s in order if s in operands or s not in ("bias", "residual")]
    steps = tuple(s if isinstance(s, str) else lowbit.Clamp(*s) for s in kept)
    used = {name: operand for name, operand in operands.items() if name in steps}
    return {**used, "post_ops": steps}


_THREADS = 3


def check_cpu(
    name: str | None = None, *, stop: bool = False, on_progress: OnProgress | None = None
) -> Iterator[CheckResult]:
    """Check one function, or all. stop, on_progress: as `check` takes them.

    ValueError, with the names that there are, for an unknown name.
    """
    known = cpu_functions.load()
    if name is not None and name not in known:
        listed = ", ".join(FUNCTION + one for one in known)
        raise ValueError(f"no function {FUNCTION}{name}; there are {listed}")
    for one in known.values() if name is None else [known[name]]:
        yield check_function(one, stop=stop, on_progress=on_progress)


def check_function(
    function: CpuFunction,
    *,
    every: int = 1,
    stop: bool = False,
    on_progress: OnProgress | None = None,
) -> CheckResult:
    """Check a function: all fills, and sizes one off those that kernels like; of these cases the
    first and each `every`th after it."""
    spec, title = function.operation, FUNCTION + function.name
    cases = [*fill_cases(spec), *edge_cases(spec, rounds=2)][::every]
    found: list[Finding] = []
    tried = 0
    for tried, case in enumerate(cases, 1):
        found += _case(function, case)
        if on_progress is not None:
            on_progress(title, tried, len(cases), str(found[0]) if found else None)
        if found and stop:
            break
    sets = f"lowbit {lowbit.__version__} for {', '.join(instruction_sets.available())}"
    left = len(cases) - tried
    return CheckResult(
        title,
        spec.name,
        sets,
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
    for run, how in _runs():
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


def _runs() -> Iterator[tuple[str, dict[str, Any]]]:
    """What a function is called with, and what that is called."""
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
