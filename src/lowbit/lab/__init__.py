"""The lab: looking at what kernels do, and why they are right or wrong, fast or slow.

`check` compares a kernel with the specification of its operation; `trace_kernel` records every
access of one run; `view` shows it as a page.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowbit.lab.check_cpu import CpuKernel
    from lowbit.lab.check_run import check
    from lowbit.lab.check_script import check_file
    from lowbit.lab.check_trace import trace_kernel
    from lowbit.lab.interpret import interpreter
    from lowbit.lab.report import CheckResult, Finding
    from lowbit.lab.trace import Access, Trace
    from lowbit.lab.view_page import View
    from lowbit.lab.view_run import view

# Loaded when first used: the command line imports this package to say its version.
_HOMES = {
    "Access": "trace",
    "CheckResult": "report",
    "CpuKernel": "check_cpu",
    "Finding": "report",
    "Trace": "trace",
    "View": "view_page",
    "check": "check_run",
    "check_file": "check_script",
    "interpreter": "interpret",
    "trace_kernel": "check_trace",
    "view": "view_run",
}

__all__ = [
    "Access",
    "CheckResult",
    "CpuKernel",
    "Finding",
    "Trace",
    "View",
    "check",
    "check_file",
    "interpreter",
    "trace_kernel",
    "view",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
