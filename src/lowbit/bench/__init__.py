"""Benchmarks: lowbit and its peers on the same data, checked, and timed against each other."""

from __future__ import annotations

from lowbit.bench.core.clock import Limits
from lowbit.bench.core.record import Record
from lowbit.bench.core.runner import run
from lowbit.bench.core.suite import Plan, Suite, suites

__all__ = ["Limits", "Plan", "Record", "Suite", "run", "suites"]
