"""Where and how a benchmark runs, as its record holds it."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.registry.extras import versions
from lowbit_lab.bench.core import peak
from lowbit_lab.bench.core.clock import interleave
from lowbit_lab.bench.core.peak import Ceiling

if TYPE_CHECKING:
    from lowbit_lab.bench.core.suite import Plan


def commit() -> str | None:
    """The commit of the checkout that lowbit runs from, with `-dirty` if changed; None outside."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    command += ["--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def physical_memory() -> float:
    """Bytes that the machine has; infinite where it does not tell."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return math.inf


class Clock:
    """What times the calls of a suite, and says where: `Cpu` or `Cuda`.

    refusals: exceptions by which a peer says that it does not do a case; own_refusals: the same for
    lowbit's own.
    """

    refusals: tuple[type[Exception], ...] = (ValueError, RuntimeError, NotImplementedError)
    own_refusals: tuple[type[Exception], ...] = ()

    time = staticmethod(interleave)
    isolates = False  # whether each is timed in a process of its own, where it has several threads

    def using(self, threads: int) -> AbstractContextManager[None]:
        """While a case is prepared and timed with so many threads."""
        raise NotImplementedError

    def tidy(self) -> None:
        """After a case."""

    def copies(self, sizes: Sequence[int]) -> list[int] | None:
        """How many copies of the weights, of so many bytes by implementation, are gone round for
        none to be in a cache; None: as many of each as exceed the last one together."""
        return None

    def ceiling(self, isa: str, threads: int, dtype: str) -> Ceiling:
        """What the machine can do at most."""
        return peak.measure(isa, threads, dtype=dtype)

    def context(self, plan: Plan) -> dict[str, Any]:
        """Of a run that has ended: only now are all libraries loaded."""
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "threads": list(plan.threads),
            "versions": versions(),
            "commit": commit(),
            "seed": plan.seed,
            "noise_limit": plan.limits.noise,
            "time_limit_seconds": plan.limits.seconds,
        }
