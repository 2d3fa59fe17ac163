"""Operator tables of calls whose engine has no table of its own: PyTorch's profiler where torch
runs, else the functions that Python sees."""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lowbit.lab.trace.report import Operator

_SECONDS, _MOST_CALLS = 0.5, 20
TORCH, PYTHON = "torch.profiler", "cProfile"


def profiled(call: Callable[[], object]) -> tuple[str, list[Operator]]:
    """Which profiler it was, and its table of a few calls."""
    if "torch" in sys.modules:
        found = _torch(call)
        if found:
            return TORCH, found
    return PYTHON, _python(call)


def _some(call: Callable[[], object]) -> None:
    end = time.perf_counter() + _SECONDS
    for _ in range(_MOST_CALLS):
        call()
        if time.perf_counter() > end:
            return


def _torch(call: Callable[[], object]) -> list[Operator]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as seen:
        _some(call)
    return Operator.rows(
        [
            (one.key, one.self_cpu_time_total * 1e-6, one.cpu_time_total * 1e-6, one.count)
            for one in seen.key_averages()
            if not one.key.startswith("ProfilerStep")
        ]
    )


def _python(call: Callable[[], object]) -> list[Operator]:
    profile = cProfile.Profile()
    profile.enable()
    _some(call)
    profile.disable()
    rows = []
    entries = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    for (file, line, name), (_, calls, own, total, _) in entries.items():
        if file == __file__:  # what calls the subject: its own time is all that nobody else has
            rows.append(("native code without a name of its own in Python", own, own, calls))
        elif "_lsprof" not in name and "perf_counter" not in name:
            place = "" if file == "~" else f" ({Path(file).name}:{line})"
            rows.append((name + place, own, total, calls))
    return Operator.rows(rows)
