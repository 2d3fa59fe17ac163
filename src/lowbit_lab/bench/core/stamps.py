"""What of a call is not spent in kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from lowbit.graph.plan import Plan
from lowbit.jit.chain import ticks_per_second

RUNS = 15


def outside_kernels(call: Callable[[], object]) -> float:
    """The share of a call's time in which no step of a network runs: the median of `RUNS` calls,
    after one more. Steps are timed by the processor's clock."""
    call()
    shares = []
    for _ in range(RUNS):
        with _stamped() as stamps:
            begin = time.perf_counter()
            call()
            seconds = time.perf_counter() - begin
        ticks = sum(int(clock[-1] - clock[0]) for clock in stamps)
        shares.append(1 - ticks / ticks_per_second() / seconds)
    return float(np.median(shares))


@contextmanager
def _stamped() -> Iterator[list[np.ndarray]]:
    """The clock before the first step and after each, of all plans that run meanwhile."""
    run, stamps = Plan.run, list[np.ndarray]()

    def stamped(plan: Plan, inputs: list[np.ndarray], clock: np.ndarray | None = None) -> object:
        stamps.append(np.zeros(1 + len(plan.steps), np.int64) if clock is None else clock)
        return run(plan, inputs, stamps[-1])

    Plan.run = stamped  # type: ignore[assignment, method-assign]
    try:
        yield stamps
    finally:
        Plan.run = run  # type: ignore[method-assign]
