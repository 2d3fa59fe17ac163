"""What computes operations on a CPU is right, and a checker that says so catches what is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from lowbit.cli import app
from lowbit.spec import Array, Case, fill_cases
from lowbit.spec.operations import operations
from lowbit_lab.checks.cpu import CpuFunction, check_cpu, check_function, cpu_functions

MATMUL = cpu_functions.get("matmul")


@pytest.mark.deep
@pytest.mark.parametrize("function", cpu_functions.load().values(), ids=lambda one: one.name)
def test_functions_are_right(function: CpuFunction) -> None:
    """On every instruction set, at sizes one off what kernels like, for all dtypes: of many cases
    a ninth, in which all kinds of numbers come up; `lowbit check cpu` has them all."""
    many = len(fill_cases(function.operation)) > 50
    result = check_function(function, every=9 if many else 1)
    assert not result.findings, str(result)


def test_every_operation_is_checked_somewhere() -> None:
    pytest.importorskip("triton")
    from lowbit_lab.checks.operators import functions as operators

    here = {function.operation.name for function in cpu_functions.load().values()}
    assert here | set(operators()) == set(operations.names())
    assert {"gemm", "linear_groups", "linear_weight_only"} <= here


def _off_by_one(case: Case, inputs: Mapping[str, Array], **how: Any) -> Array:
    out = MATMUL(case, inputs, **how)
    out[-1, -1] += case.sizes["K"] == 70
    return out


def _beside(case: Case, inputs: Mapping[str, Array], **how: Any) -> Array:
    out = MATMUL(case, inputs, **how)
    np.lib.stride_tricks.as_strided(out, (out.shape[0], out.shape[1] + 1), out.strides)[0, -1] = 0
    return out


def _by_threads(case: Case, inputs: Mapping[str, Array], **how: Any) -> Array:
    out = MATMUL(case, inputs, **how)
    out[0, 0] -= how["threads"] > 1
    return out


def _by_set(case: Case, inputs: Mapping[str, Array], **how: Any) -> Array:
    out = MATMUL(case, inputs, **how)
    out[0, 0] -= how["isa"] == "generic"
    return out


def _changes_its_input(case: Case, inputs: Mapping[str, Array], **how: Any) -> Array:
    out = MATMUL(case, inputs, **how)
    inputs["a"][0, 0] ^= 1
    return out


def _returns_another(case: Case, inputs: Mapping[str, Array], **how: Any) -> Array:
    return MATMUL(case, inputs, **how).copy()


def _fails(case: Case, inputs: Mapping[str, Array], **how: Any) -> Array:
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (_off_by_one, "wrong-values"),
        (_beside, "out-of-bounds-store"),
        (_by_threads, "order-dependent"),
        (_by_set, "order-dependent"),
        (_changes_its_input, "input-written"),
        (_returns_another, "wrong-result"),
        (_fails, "crash"),
    ],
)
def test_a_wrong_function_is_caught(call: Callable[..., Array], kind: str) -> None:
    result = check_function(replace(MATMUL, call=call), stop=True)
    assert kind in result.kinds, str(result)
    finding = next(one for one in result.findings if one.kind == kind)
    assert finding.sizes
    assert "matmul u8:s8:s32" in finding.message
    assert "more cases were not tried" in result.notes[0]


@pytest.mark.deep
def test_names() -> None:
    with pytest.raises(ValueError, match=r"no function cpu:matmull; there are cpu:matmul, "):
        list(check_cpu("matmull"))
    run = CliRunner().invoke(app, ["check", "cpu:matmul"])
    assert run.exit_code == 0, run.output
    assert "cpu:matmul (" in run.output
    assert "): right in" in run.output
