"""Threads: those of PyTorch while they are awake, else a pool.

A compiled kernel may be entered by any number of threads (see jit.emit), so all that is needed is a
function of compiled code that calls it from several at once and returns when all have ended. It is
that of the OpenMP runtime that PyTorch runs on (jit.openmp) while its threads spin, as they do for
some milliseconds after each of its regions, so that two libraries never fight for the cores. Else
it is jit.team's, and always without PyTorch and in a child after `fork`, where an OpenMP runtime
would hang. A runtime that other libraries brought is left to them. `torch.set_num_threads` and
`OMP_NUM_THREADS` are obeyed either way.

An OpenMP region ends when the last of its threads has come to the barrier. Where they slept, some
wake on a core where another one spins, and wait for a slice of the scheduler, some milliseconds. If
one has lost its core to another process, that is so in each call. `Shared` looks whether they
sleep, notices stalls, and takes jit.team's threads, for which nobody waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import operator
import os
import sys
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from lowbit.jit import openmp, team
from lowbit.jit.compile import immortal

OWN = "threads of its own"

_of_torch: tuple[str, int] | None = None  # name, address of the function
_searched = False  # which is done once, after PyTorch has been imported


def _torch_threads() -> Callable[[], int] | None:
    """PyTorch's number of threads, as soon as an import of it has come so far."""
    return getattr(sys.modules.get("torch"), "get_num_threads", None)


def _runtime() -> tuple[str, int]:
    global _of_torch, _searched
    if not _searched and _torch_threads() is not None:
        _of_torch, _searched = openmp.of_torch(), True
    return _of_torch or (OWN, team.address())


def _after_fork() -> None:
    global _of_torch, _searched
    _of_torch, _searched = None, _torch_threads() is not None
    _starter.function = 0
    _of_pool.clear()
    team.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def max_threads() -> int:
    """How many threads a call may use: what PyTorch or else OMP_NUM_THREADS says, or all cores."""
    count = _torch_threads()
    if count is not None:  # OpenMP's own setting is one for each thread, PyTorch's is not
        return count()
    if given := os.environ.get("OMP_NUM_THREADS"):
        with contextlib.suppress(ValueError):
            return max(1, int(given.split(",")[0]))
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def counter() -> int:
    """The address of a function, int (), that says what `max_threads` does, if PyTorch has one; 0
    where what that was a second ago will do."""
    function = 0 if _torch_threads() is None else openmp.count_of_torch() or 0
    if not function and not _starter.threads:  # no call of several threads has asked yet
        _starter.threads = max_threads()
    return function


def checked(wanted: Any) -> int:
    """A number of threads as an int. ValueError if it is none, or less than 1."""
    with contextlib.suppress(TypeError):
        if not isinstance(wanted, bool) and operator.index(wanted) >= 1:
            return operator.index(wanted)
    raise ValueError(f"threads must be an integer of at least 1, got {wanted!r}")


def runtime() -> str:
    """The name of the thread runtime, for people."""
    return _runtime()[0]


STALL = 2e-3  # seconds that a region lasts at least where a thread has lost its core
_IN_A_ROW = 3  # such regions that are no accident
_WHILE = 1.0  # seconds for which what was found out holds
_SOON, _LATER = 5e-3, 20e-3  # seconds for which it holds that PyTorch's threads sleep, at first
_own, _until = True, 0.0  # whether jit.team's serve, and until when, by the monotonic clock
_pause = _SOON


class Starter(ctypes.Structure):
    """What starts the threads of calls that machine code finds (jit.cached_call): the address of
    that function, until when, in nanoseconds, and `max_threads`. 0: the next call comes to Python,
    because there was none yet, or one took as long as STALL."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("function", "until", "threads"))


_starter = immortal(Starter())


def starter_at() -> int:
    """Where cached calls look for what starts threads."""
    return ctypes.addressof(_starter)


_TASKS = "/proc/self/task"
_SAMPLE = 4  # threads, about, that tell whether it is worth the time to look at all
_turns = itertools.count()
_of_pool: dict[str, bool] = {}  # of threads that were met, by number: whether they are jit.team's


def _runs(thread: str) -> bool:
    """Whether a thread runs or waits for a core."""
    with contextlib.suppress(OSError), open(f"{_TASKS}/{thread}/stat") as file:
        _, name, state = file.read().replace(")", "(").split("(", 2)
        _of_pool[thread] = name == team.THREAD
        return state.startswith(" R")
    return False


def running() -> int | None:
    """How many threads of this process run, the caller included; None if nobody tells."""
    return sum(map(_runs, os.listdir(_TASKS))) if os.path.isdir(_TASKS) else None


def _awake() -> bool:
    """Whether PyTorch's threads are: half of them run besides the caller, or nobody tells."""
    if not os.path.isdir(_TASKS):
        return True
    caller = str(threading.get_native_id())
    others = [t for t in os.listdir(_TASKS) if t != caller and not _of_pool.get(t)]
    apart = len(others) // _SAMPLE + 1
    if not any(map(_runs, others[next(_turns) % apart :: apart])):  # others each time
        return False
    return sum(_runs(t) and not _of_pool[t] for t in others) >= max(1, max_threads() // 2)


def _look(begin: float, alone: bool) -> None:
    """Decide who serves from now on. PyTorch's next operator may wake threads that sleep, so that
    is looked up again soon, and as long as it stays so, after twice the time before."""
    global _own, _until, _pause
    _own = alone or not _awake()
    _pause = min(2 * _pause, _LATER) if _own and begin < _until + _pause else _SOON
    _until = begin + (_pause if _own and not alone else _WHILE)


def _serve(starter: int, until: float) -> None:
    _starter.function, _starter.until = starter, int(until * 1e9)
    _starter.threads = max_threads()


class Shared:
    """A call of several threads: `call` is given first the address of what starts them, a function
    void (kernel, its slots, number of threads, unused)."""

    __slots__ = ("_call", "_least", "_long", "_quiet_until")

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call
        self._long = 0  # the last calls in a row that took suspiciously long
        self._least = 0.0  # seconds that these took at least
        self._quiet_until = 0.0

    def __call__(self, *arguments: Any) -> None:
        global _own, _until
        own, runner = team.address(), _runtime()[1]
        begin = monotonic()
        if begin >= _until:
            _look(begin, alone=runner == own)
        if _own:
            self._call(own, *arguments)
            _serve(own, _until)
        elif self._long == _IN_A_ROW:  # was that the work itself? the other threads tell
            self._call(own, *arguments)
            now = monotonic()
            if now - begin < self._least / 2:
                _own, _until = True, now + _WHILE
            self._long, self._quiet_until = 0, now + _WHILE
        else:
            self._call(runner, *arguments)
            now = monotonic()
            took = now - begin
            if took < STALL or now < self._quiet_until:
                self._long = 0
                _serve(runner, _until)
            else:
                self._least = min(took, self._least) if self._long else took
                self._long += 1
