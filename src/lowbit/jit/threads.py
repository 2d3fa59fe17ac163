"""Threads: the OpenMP runtime that is already in the process, else Python's own threads.

A compiled kernel may be entered by any number of threads (see jit.emit), so all that is needed
here is to call one function from several threads at once. The runtime is the one that PyTorch has
loaded, so that two libraries never fight for the cores and `torch.set_num_threads` and
`OMP_NUM_THREADS` are obeyed. Without one, and in a child after `fork`, where an OpenMP runtime
would hang, Python threads do it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from lowbit.jit.entry import FUNCTION, enter, slots

_OPENMP_NAMES = ("libgomp", "libiomp5", "libomp")


class _OpenMP:
    """GOMP_parallel, which GCC's, Intel's and LLVM's runtimes all export."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.name = name
        self._parallel = ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
        self._max_threads = library.omp_get_max_threads

    def max_threads(self) -> int:
        return self._max_threads()

    def run(self, address: int, threads: int, arguments: tuple[Any, ...]) -> None:
        enter()(address, self._parallel, threads, *arguments)


class _PythonThreads:
    """A pool of Python threads; calls into compiled code release the GIL."""

    name = "Python threads"

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def max_threads(self) -> int:
        with contextlib.suppress(ValueError):
            first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
            return max(1, int(first))
        return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1

    def run(self, address: int, threads: int, arguments: tuple[Any, ...]) -> None:
        function, memory = FUNCTION(address), slots(arguments)
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(os.cpu_count() or 1, "lowbit")
        waiting: list[Future[None]] = []
        # While the interpreter shuts down no work is taken any more: this thread does it all.
        with contextlib.suppress(RuntimeError):
            for _ in range(threads - 1):
                waiting.append(self._pool.submit(function, memory))
        function(memory)
        # All items are taken by now. An interrupt must not free memory that others still write.
        interrupted: BaseException | None = None
        while not all(future.done() for future in waiting):
            try:
                wait(waiting)
            except BaseException as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted


_found: _OpenMP | _PythonThreads | None = None
_searched_with_torch = False


def _loaded_openmp() -> _OpenMP | None:
    """An OpenMP runtime among the libraries that the process has mapped."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in lines if ".so" in line and "/" in line}
    torch = sys.modules.get("torch")
    # Of several, the one that PyTorch brought: it is the one whose threads run.
    home = str(Path(torch.__file__).parent.parent) if torch and torch.__file__ else "/"
    ordered = sorted(paths, key=lambda path: (not path.startswith(home), path))
    for wanted in _OPENMP_NAMES:
        for path in ordered:
            if Path(path).name.startswith(wanted):
                with contextlib.suppress(OSError, AttributeError):
                    return _OpenMP(ctypes.CDLL(path), Path(path).name)
    return None


def _runtime() -> _OpenMP | _PythonThreads:
    """The runtime to use; looked for again once PyTorch has been imported."""
    global _found, _searched_with_torch
    has_torch = "torch" in sys.modules
    if _found is None or (has_torch and not _searched_with_torch):
        _searched_with_torch = has_torch
        _found = _loaded_openmp() or _found or _PythonThreads()
    return _found


def _after_fork() -> None:
    global _found, _searched_with_torch
    _found, _searched_with_torch = _PythonThreads(), True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def max_threads() -> int:
    """How many threads a call may use: what PyTorch or else OMP_NUM_THREADS says, or all cores."""
    torch = sys.modules.get("torch")
    if torch is not None:  # OpenMP's own setting is one for each thread, PyTorch's is not
        return torch.get_num_threads()
    return _runtime().max_threads()


def runtime() -> str:
    """The name of the thread runtime, for people."""
    return _runtime().name


def run(address: int, threads: int, arguments: tuple[Any, ...]) -> None:
    """Enter the kernel at `address` from `threads` threads at once, and wait for them."""
    _runtime().run(address, threads, arguments)
