"""Where a benchmark runs: machine, libraries, threads."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import lowbit
from lowbit import isa
from lowbit.bench.problem import DISTRIBUTION, GEMMS
from lowbit.bench.record import Context
from lowbit.bench.timing import Limits
from lowbit.jit.threads import runtime
from lowbit.product.dispatch import active_kernel
from lowbit.registry.extras import installed

_LIBRARIES = ("numpy", "llvmlite", "torch", "threadpoolctl", "mkl", "numkong")


def versions() -> dict[str, str]:
    """Versions of Python, lowbit and the libraries that it works with, where installed."""
    found = {"python": platform.python_version(), "lowbit": lowbit.__version__}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of the checkout that lowbit runs from, with `-dirty` if changed; None outside."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    command += ["--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def gather(threads: tuple[int, ...], seed: int, limits: Limits) -> Context:
    """The context of a run that starts now."""
    report = isa.report()
    return Context(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        cpu=report["cpu"],
        features=tuple(report["features"]),
        num_cpus=os.cpu_count() or 1,
        caches=report["caches"],
        isa=report["active"],
        kernels={spec.name: active_kernel()[0] for spec in GEMMS},
        threads=threads,
        thread_runtime=runtime(),
        versions=versions(),
        commit=commit(),
        seed=seed,
        distribution=DISTRIBUTION,
        noise_limit=limits.noise,
        time_limit_seconds=limits.seconds,
    )


@contextmanager
def thread_count(threads: int) -> Iterator[None]:
    """Let NumPy's BLAS and PyTorch use this many threads, and what they had afterwards.

    lowbit's own functions are told in each call.
    """
    with ExitStack() as stack:
        if installed("threadpoolctl"):
            from threadpoolctl import threadpool_limits

            stack.enter_context(threadpool_limits(threads))
        if installed("torch"):
            import torch

            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(threads)
        # Now, before a peer brings another OpenMP runtime into the process.
        runtime()
        yield
