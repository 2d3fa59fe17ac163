"""The lab: looking at what kernels do, and why they are right or wrong, fast or slow.

`check` compares a kernel with the specification of its operation; `trace_kernel` records every
access of one run; `view` shows it as a page.
"""

from __future__ import annotations

from lowbit.lab.backends.interpreter import interpreter
from lowbit.lab.backends.kinds.cpu import CpuKernel

# Also as names of this package: its folders `check` and `view` are called like their functions.
from lowbit.lab.check.run import check, check_file
from lowbit.lab.report import CheckResult, Finding
from lowbit.lab.run.trace import Access, Trace
from lowbit.lab.view.page import View
from lowbit.lab.view.run import view
from lowbit.lab.view.trace import trace_kernel

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
