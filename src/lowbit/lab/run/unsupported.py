"""What an interpreter cannot run, so that it says nothing of a kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, NoReturn


class UnsupportedError(RuntimeError):
    """What runs kernels here cannot run this one. That is no fault of the kernel."""


def refusals(names: Mapping[str, Any], package: str, runner: str) -> dict[str, Callable[..., Any]]:
    """For each function of this package among these names, one that raises UnsupportedError: they
    stand for code of the device, and have no body of their own."""
    return {
        name: _refusal(f"{found.__module__}.{found.__name__}", runner)
        for name, found in names.items()
        if isinstance(found, FunctionType) and f"{found.__module__}.".startswith(f"{package}.")
    }


def _refusal(name: str, runner: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(f"{runner} cannot run {name}, which only a GPU has")

    return refuse
