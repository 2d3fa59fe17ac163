"""Checking the operators of `lowbit.torch.functional` against their specifications."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lowbit.spec.operations import operations
from lowbit_lab.backends.backend import Request, Variant
from lowbit_lab.backends.source import OPERATOR
from lowbit_lab.checks.cases import check_request
from lowbit_lab.checks.result import CheckResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from functools import partial


def functions() -> Mapping[str, partial[Any]]:
    """The functions that have a specification, by its name, in the order of the specifications.

    ModuleNotFoundError if PyTorch, Triton or jaxtyping is not installed; LookupError if one is
    registered under a name that no specification has.
    """
    from lowbit.torch.registration import specified_functions

    known = specified_functions.load()
    unknown = sorted(set(known) - set(operations.names()))
    if unknown:
        raise LookupError(
            f"{unknown[0]} is the name of no operation in lowbit.spec.operations; write one, or "
            "correct the name given to @specified"
        )
    return {n: known[n] for n in operations.names() if n in known}


def check_gpu(
    name: str | None = None, device: str | None = None, **how: Any
) -> Iterator[CheckResult]:
    """Check one operator, or all, for each dtype that it takes. A function is tried on all cases
    once, for its first operation and dtype; for others on a few. `how`: as `check` takes it.

    ValueError, with the names that there are, for an unknown name; otherwise as `check`.
    """
    known = functions()
    if name is not None and name not in known:
        listed = ", ".join(OPERATOR + one for one in known)
        raise ValueError(f"no operator {OPERATOR}{name}; there are {listed}")
    tried: set[Callable[..., Any]] = set()
    for one in known if name is None else [name]:
        function = known[one].func
        for operation in operations.get(one).variants():
            given = {**known[one].keywords, **operation.static}
            request = Request(Variant(function, constants=given), operation)
            result = check_request(request, device, few=function in tried, **how)
            tried.add(function)
            chosen = [f"{name}={value}" for name, value in operation.static.items()]
            title = ", ".join([one, operation.result.dtype, *chosen])
            yield replace(result, kernel=OPERATOR + one, operation=title)
