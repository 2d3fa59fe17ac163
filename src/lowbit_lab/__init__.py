"""The lab: looking at what kernels do, and why they are right or wrong, fast or slow.

`check` compares a kernel with the specification of its operation; `trace_kernel` records every
access of one run; `view` shows it as a page; `watch` needs no specification, and looks at every
launch of a program.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowbit_lab.backends.host import interpreter
    from lowbit_lab.checks.result import CheckResult
    from lowbit_lab.checks.run import check, check_file
    from lowbit_lab.languages.lowbit import CpuKernel
    from lowbit_lab.run.bind import Packed, Scratch
    from lowbit_lab.run.findings import Finding
    from lowbit_lab.run.trace import Access
    from lowbit_lab.views.run import View, view
    from lowbit_lab.views.trace import Trace, trace_kernel
    from lowbit_lab.watched.watch import watch

# Loaded when first used: a benchmark does without the checker, and most without PyTorch and LLVM.
_HOMES = {
    "Access": "run.trace",
    "CheckResult": "checks.result",
    "CpuKernel": "languages.lowbit",
    "Finding": "run.findings",
    "Packed": "run.bind",
    "Scratch": "run.bind",
    "Trace": "views.trace",
    "View": "views.run",
    "check": "checks.run",
    "check_file": "checks.run",
    "interpreter": "backends.host",
    "trace_kernel": "views.trace",
    "view": "views.run",
    "watch": "watched.watch",
}

__all__ = [
    "Access",
    "CheckResult",
    "CpuKernel",
    "Finding",
    "Packed",
    "Scratch",
    "Trace",
    "View",
    "check",
    "check_file",
    "interpreter",
    "trace_kernel",
    "view",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
