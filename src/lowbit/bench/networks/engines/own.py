"""lowbit's own sessions, without PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from lowbit.bench.models.model import Array, Arrays
from lowbit.bench.networks.engine import (
    DYNAMIC,
    FLOAT,
    INPUTS,
    STATIC,
    Engine,
    Opened,
    Work,
    engines,
)
from lowbit.graph import Graph, Session, load

_RUNS = 15
_PROCESSES = 5
_SECONDS = 60.0
# From the start of Python's own work to the first result: NumPy, lowbit, file, plan, call.
_FIRST = """
import time
begin = time.perf_counter()
import json, sys
import numpy as np
from lowbit.graph import Session, load
path, threads, inputs = json.loads(sys.argv[1])
Session(load(path), threads=threads)(*(np.zeros(shape, dtype) for shape, dtype in inputs))
print(time.perf_counter() - begin)
"""


class Lowbit(Engine):
    """A network in a file, loaded and run."""

    ours = True

    def __init__(self, name: str, file: str, config: str = "") -> None:
        self.name, self.files, self.config = name, (file,), config

    def open(self, work: Work) -> Opened:
        path = work.file(self.files[0])
        session = Session(load(path), threads=work.threads)
        arrays = tuple(one[: work.batch] for one in work.arrays(INPUTS))
        session(*arrays)
        plan = session.plan(dict(zip(session.graph.inputs, arrays, strict=True)))

        def measure() -> Mapping[str, Any]:
            return {
                "file_bytes": path.stat().st_size,
                "arena_bytes": plan.peak_bytes,
                "outside_kernels": outside_kernels(session.graph, work.threads, arrays),
                "first_result_seconds": first_result(str(path), work.threads, arrays),
            }

        return Opened(session, measure=measure)


class _Stamped(Session):
    """A session whose steps are timed."""

    def plan(self, inputs: Mapping[str, Array]) -> Any:
        plan = super().plan(inputs)
        self.stamps = stamps = np.zeros(1 + len(plan.steps), np.int64)
        run = partial(plan.run, stamps=stamps)
        return SimpleNamespace(inputs=plan.inputs, outputs=plan.outputs, run=run)


def outside_kernels(graph: Graph, threads: int, arrays: Arrays) -> float:
    """The share of a call's time in which no step of the network runs, the median of some calls.

    Steps are timed by the processor's clock, whose rate is found from calls that lie apart.
    """
    session = _Stamped(graph, threads=threads)
    session(*arrays)
    begins, calls, stamps = [], [], []
    for _ in range(_RUNS):
        begins.append(time.perf_counter())
        session(*arrays)
        calls.append(time.perf_counter() - begins[-1])
        stamps.append(session.stamps)
    rate = (stamps[-1][0] - stamps[0][0]) / (begins[-1] - begins[0])
    steps = np.array([one[-1] - one[0] for one in stamps]) / rate
    return float(np.median(1 - steps / np.array(calls)))


def first_result(path: str, threads: int, arrays: Arrays) -> float:
    """Seconds from the start of a new Python process's work to its first result: the median of some
    processes, which find compiled kernels in the cache, and modules compiled as pip installs them,
    whatever the environment says of that."""
    inputs = [(one.shape, one.dtype.name) for one in arrays]
    command = [sys.executable, "-c", _FIRST, json.dumps([path, threads, inputs])]
    taken = []
    with tempfile.TemporaryDirectory() as bytecode:
        where = {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
        for _ in range(_PROCESSES + 1):
            done = subprocess.run(
                command, env=os.environ | where, capture_output=True, text=True, check=True,
                timeout=_SECONDS,
            )  # fmt: skip
            taken.append(float(done.stdout))
    return float(np.median(taken[1:]))


engines.add("lowbit int8", Lowbit("lowbit int8", STATIC, "static"))
engines.add("lowbit int8 dynamic", Lowbit("lowbit int8 dynamic", DYNAMIC, "dynamic"))
engines.add("lowbit fp32", Lowbit("lowbit fp32", FLOAT))
