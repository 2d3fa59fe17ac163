"""Benchmarks: lowbit and its peers on the same data, checked, and timed against each other."""

from __future__ import annotations

from lowbit.bench.problem import gemm_case, parse_shape
from lowbit.bench.record import Record
from lowbit.bench.shapes import SUITES, works_of
from lowbit.bench.suite import Plan, run
from lowbit.bench.timing import Limits

__all__ = ["SUITES", "Limits", "Plan", "Record", "gemm_case", "parse_shape", "run", "works_of"]
