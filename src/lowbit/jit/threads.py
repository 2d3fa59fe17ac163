"""Threads: those of PyTorch where it is loaded, else some that live as long as a call.

A compiled kernel may be entered by any number of threads (see jit.emit), so all that is needed is a
function of compiled code that calls it from several at once and returns when all have ended. It is
that of the OpenMP runtime that PyTorch runs on (jit.openmp), so that two libraries never fight for
the cores and `torch.set_num_threads` and `OMP_NUM_THREADS` are obeyed. Without PyTorch, and in a
child after `fork`, where an OpenMP runtime would hang, it is jit.team's. A runtime that other
libraries brought is left to them.
"""

from __future__ import annotations

import contextlib
import operator
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from lowbit.jit import openmp, team

OWN = "threads of each call"

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


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def max_threads() -> int:
    """How many threads a call may use: what PyTorch or else OMP_NUM_THREADS says, or all cores."""
    count = _torch_threads()
    if count is not None:  # OpenMP's own setting is one for each thread, PyTorch's is not
        return count()
    with contextlib.suppress(ValueError):
        first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
        return max(1, int(first))
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@cache
def counter() -> int | None:
    """The address of a function, int (), that says what `max_threads` does; None: there is none.

    Only to be asked once PyTorch is loaded, which then says how many there are.
    """
    return openmp.count_of_torch()


def torch_counts() -> bool:
    """Whether PyTorch says how many threads a call may use."""
    return _torch_threads() is not None


def checked(wanted: Any) -> int:
    """A number of threads as an int. ValueError if it is none, or less than 1."""
    with contextlib.suppress(TypeError):
        if not isinstance(wanted, bool) and operator.index(wanted) >= 1:
            return operator.index(wanted)
    raise ValueError(f"threads must be an integer of at least 1, got {wanted!r}")


def runtime() -> str:
    """The name of the thread runtime, for people."""
    return _runtime()[0]


def runner() -> int:
    """The address of the function: void (kernel, its slots, number of threads, unused)."""
    return _runtime()[1]
