"""Known-wrong functions of tensors are caught and named; unusual right ones pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from lowbit.spec import Operation
from lowbit_lab import check
from lowbit_lab.backends.source import load

HERE = Path(__file__).parent
WRONG = [one for path in sorted(HERE.glob("wrong_functions/*.py")) for one in load(path).WRONG]
UNUSUAL = [
    one for path in sorted(HERE.glob("unusual_functions/*.py")) for one in load(path).UNUSUAL
]


def _names(known: list[Any]) -> list[str]:
    return [function.__name__ for function, *_ in known]


@pytest.mark.deep("forgets_contiguous")
@pytest.mark.parametrize(("function", "spec", "finds", "kernel"), WRONG, ids=_names(WRONG))
def test_a_wrong_function_is_caught_and_named(
    function: Callable[..., Any], spec: Operation, finds: str, kernel: str | None
) -> None:
    # What the first case does not show, others have to.
    result = check(function, spec, device="cpu", stop=True)
    if finds not in result.kinds:
        result = check(function, spec, device="cpu")
    assert not result.ok
    findings = [finding for finding in result.findings if finding.kind == finds]
    assert findings, str(result)
    assert findings[0].sizes
    assert kernel in {finding.kernel for finding in findings}
    assert kernel is None or kernel in str(result)


@pytest.mark.deep
@pytest.mark.parametrize(("function", "spec", "warnings"), UNUSUAL, ids=_names(UNUSUAL))
def test_an_unusual_function_passes(
    function: Callable[..., Any], spec: Operation, warnings: tuple[str, ...]
) -> None:
    result = check(function, spec, device="cpu")
    assert result.ok, str(result)
    assert {finding.kind for finding in result.findings} == set(warnings)
