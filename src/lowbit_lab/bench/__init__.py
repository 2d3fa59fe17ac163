"""Benchmarks: lowbit and its peers on the same data, checked, and timed against each other."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowbit_lab.bench.core.clock import Limits
    from lowbit_lab.bench.core.record import Record
    from lowbit_lab.bench.core.runner import run
    from lowbit_lab.bench.core.suite import Plan, Suite

__all__ = ["Limits", "Plan", "Record", "Suite", "run"]

_MODULES = {
    "Limits": "clock",
    "Plan": "suite",
    "Record": "record",
    "Suite": "suite",
    "run": "runner",
}


# Imported when asked for: networks are trained where what records need is not installed.
def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"lowbit_lab.bench.core.{_MODULES[name]}")
    return globals().setdefault(name, getattr(module, name))
