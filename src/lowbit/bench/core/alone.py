"""Timing on several threads: a process for each implementation.

Threads that wait for work spin on their cores for some time. Whoever comes next pays for that, at
its barriers, even on the same pool. In a process of its own an implementation has its threads as a
user's program has them, and the next process is asked when they are asleep.

Run as `python -m lowbit.bench.core.alone THREADS`, a process is told what to prepare, and then to
take its turns.
"""

from __future__ import annotations

import base64
import pickle
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from lowbit.bench.core.apart import Apart, answering
from lowbit.bench.core.clock import RemoteCall, Turn, settle
from lowbit.bench.core.cpu import Cpu

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
        self._running: dict[tuple[str, int], Apart] = {}

    def calls(
        self, case: Case, threads: int, several: Iterable[Implementation]
    ) -> dict[str, list[RemoteCall]]:
        """How to time each of some implementations of a case. RuntimeError: one cannot, there."""
        made = {}
        for one in several:
            key = one.name, threads
            if key not in self._running:
                self._running[key] = Apart("lowbit.bench.core.alone", str(threads))
            process = self._running[key]
            task = pickle.dumps((self._suite, case, self._seed, one.name))
            try:
                process.ask(base64.b64encode(task).decode(), _SECONDS)
            except RuntimeError as error:
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


def main(arguments: Sequence[str]) -> None:
    """Answer what is to be prepared with null, and each turn with the seconds of a call."""
    threads, ready = int(arguments[0]), list[Turn]()
    with Cpu().using(threads), answering() as (answer, questions):
        for task in questions:
            if task is None:
                (turn,) = ready
                _taken(turn)
                seconds = statistics.median(_taken(turn))
                settle()
                answer(seconds)
                continue
            suite, case, seed, name = pickle.loads(base64.b64decode(task))
            one = next(one for one in suite.implementations() if one.name == name)
            call = one.prepare(suite.make(case, seed), threads).call
            ready = [Turn(one.name, [call], one.pool)]
            settle()
            answer(None)


if __name__ == "__main__":
    main(sys.argv[1:])
