"""Implementations in processes of their own: tried there first, or timed there on several threads.

Threads that wait for work spin on their cores for some time. Whoever comes next pays for that, at
its barriers, even on the same pool. In a process of its own an implementation has its threads as a
user's program has them, and the next process is asked when they are asleep.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

from lowbit_lab.bench.core.clock import RemoteCall, Turn, settle
from lowbit_lab.bench.core.cpu import Cpu
from lowbit_lab.bench.core.remote import Remote, RemoteError

if TYPE_CHECKING:
    from lowbit_lab.bench.core.case import Case, Implementation
    from lowbit_lab.bench.core.suite import Suite

_SECONDS = 600.0  # to prepare a large case
# Threads that have slept are all there by then, and it is known whose threads serve (jit.threads).
_AWAKE_SECONDS = 5e-3


class Workers:
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


def _timed(turn: Turn) -> list[float]:
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
                _timed(turn)
                seconds = statistics.median(_timed(turn))
                settle()
                task = yield seconds


# Trying a foreign implementation in a process of its own before it may run in ours.

_TRIAL_SECONDS = 300.0

# oneDNN names what it runs: ...,exec,cpu,matmul,brg_matmul:avx512_core_vnni,...,8x96:96x64,0.1
_ONEDNN_EXEC = re.compile(
    r"exec,cpu,matmul,(?P<kernel>[^,]+),.*,(?P<shape>\d+x\d+:\d+x\d+),[^,\n]*$", re.MULTILINE
)


def attempt(
    suite: Suite, implementation: Implementation, cases: Sequence[Case], seed: int
) -> tuple[dict[Case, str], dict[str, str]]:
    """Run an implementation once on each case, in a process of its own; after a crash in another
    one, on those that are left.

    By case, why not to use the implementation; by the name of a case, the kernel if it was told.
    """
    reasons: dict[Case, str] = {}
    kernels: dict[str, str] = {}
    start = partial(Remote, _reasons, suite, implementation, seed, ONEDNN_VERBOSE="1")
    for refused, printed in trials(start, dict.fromkeys(map(suite.tried, cases))):
        reasons |= refused
        found = _ONEDNN_EXEC.finditer(printed)
        kernels |= {match["shape"]: match["kernel"] for match in found}
    refused = {case: reasons[suite.tried(case)] for case in cases if suite.tried(case) in reasons}
    return refused, kernels


def trials(
    start: Callable[[], Remote], tried: Iterable[Any]
) -> Iterator[tuple[dict[Any, str], str]]:
    """Ask a process, and after a crash another one, of each of these why not to use it: what each
    process said, by what it was asked, and what it printed."""
    left = [*tried]
    while left:
        reasons: dict[Any, str] = {}
        with closing(start()) as process:
            process.answer(_TRIAL_SECONDS)
            while left:
                asked = left.pop(0)
                try:
                    reason = process.ask(asked, _TRIAL_SECONDS)
                except RemoteError as error:
                    reasons[asked] = f"tried in a process of its own: {error}"
                    break
                reasons |= {} if reason is None else {asked: reason}
            yield reasons, process.printed()


def _reasons(suite: Suite, one: Implementation, seed: int) -> Generator[str | None, Case, None]:
    """In the process: of each case that it comes through, why not to use the implementation."""
    reason = None
    while True:
        case = yield reason
        reason = None
        try:
            ready = one.prepare(suite.make(case, seed), threads=1)
            ready.read(ready.call())
        except (ValueError, RuntimeError, NotImplementedError) as error:
            reason = f"refused: {first_line(error)}"


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
