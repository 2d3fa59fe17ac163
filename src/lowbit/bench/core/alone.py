"""Timing on several threads: a process for each implementation.

Threads that wait for work spin on their cores for some time. Whoever comes next pays for that, at
its barriers, even on the same pool. In a process of its own an implementation has its threads as a
user's program has them, and the next process is asked when they are asleep.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from lowbit.bench.core.clock import RemoteCall, Turn, settle
from lowbit.bench.core.cpu import Cpu
from lowbit.bench.core.remote import Remote, RemoteError

if TYPE_CHECKING:
    from lowbit.bench.core.case import Case, Implementation
    from lowbit.bench.core.suite import Suite

_SECONDS = 600.0  # to prepare a large case
# Threads that have slept are all there by then, and it is known whose threads serve (jit.threads).
_AWAKE_SECONDS = 5e-3


class Alone:
    """The processes, each started when it is first needed. The suite makes the data of cases."""

    def __init__(self, suite: Suite, seed: int) -> None:
        self._suite, self._seed = suite, seed
        self._running: dict[tuple[str, int], Remote] = {}

    def calls(
        self, case: Case, threads: int, several: Iterable[Implementation]
    ) -> dict[str, list[RemoteCall]]:
        """How to time each of some implementations of a case. RuntimeError: one cannot, there."""
        made = {}
        for one in several:
            key = one.name, threads
            if key not in self._running:
                self._running[key] = Remote(_turns, threads)
                self._running[key].answer(_SECONDS)
            process = self._running[key]
            try:
                process.ask((self._suite, case, self._seed, one.name), _SECONDS)
            except RemoteError as error:
                raise RuntimeError(f"{one.name}, in a process of its own: {error}") from None
            made[one.name] = [RemoteCall(partial(process.ask, None, _SECONDS))]
        return made

    def close(self) -> None:
        """End the processes."""
        for process in self._running.values():
            process.close()
        self._running.clear()


def _taken(turn: Turn) -> list[float]:
    """What calls take, one after another for some milliseconds."""
    before, start = len(turn.seconds), time.perf_counter()
    while time.perf_counter() - start < _AWAKE_SECONDS:
        turn.take()
    return turn.seconds[before:]


def _turns(threads: int) -> Generator[float | None, Any, None]:
    """In a process: answer what is to be prepared with None, and each turn, which None asks for,
    with the seconds of a call."""
    with Cpu().using(threads):
        task = yield None
        while True:
            suite, case, seed, name = task
            implementation = next(one for one in suite.implementations() if one.name == name)
            call = implementation.prepare(suite.make(case, seed), threads).call
            turn = Turn(name, [call], implementation.pool)
            settle()
            task = yield None
            while task is None:
                _taken(turn)
                seconds = statistics.median(_taken(turn))
                settle()
                task = yield seconds
