"""The lab: looking at what kernels do, and why they are right or wrong, fast or slow.

`check` compares a kernel with the specification of its operation; `trace_kernel` records every
access of one run; `view` shows it as a page.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# At once, since folders are called like these two: importing one later would take the name.
from lowbit.lab.check.run import check, check_file
from lowbit.lab.view.run import view

if TYPE_CHECKING:
    from lowbit.lab.backends.interpreter import interpreter
    from lowbit.lab.backends.kinds.cpu import CpuKernel
    from lowbit.lab.report import CheckResult, Finding
    from lowbit.lab.run.trace import Access, Trace
    from lowbit.lab.view.page import View
    from lowbit.lab.view.trace import trace_kernel

# Loaded when first used: some need PyTorch.
_HOMES = {
    "Access": "run.trace",
    "CheckResult": "report",
    "CpuKernel": "backends.kinds.cpu",
    "Finding": "report",
    "Trace": "run.trace",
    "View": "view.page",
    "interpreter": "backends.interpreter",
    "trace_kernel": "view.trace",
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
