"""An engine in a process of its own, see `bench.core.remote`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator
from typing import Any

import numpy as np

from lowbit.models.model import Arrays
from lowbit_lab.bench.core.case import find
from lowbit_lab.bench.core.clock import settle, share_processor
from lowbit_lab.bench.networks.engine import INPUTS, MEASURE, OUTPUTS, SECONDS, Engine, Opened, Work

_TURN_SECONDS = 0.03  # a turn has as many calls as fit, and gives their median
_MOST_CALLS = 50


def serve(name: str, work: Work) -> Generator[Any, str, None]:
    """In the process: open an engine, say what it runs on, then answer."""
    engine = find("networks", name)
    assert isinstance(engine, Engine)
    opened = engine.open(work)
    inputs = work.arrays(INPUTS)
    batch = _rows(inputs, np.arange(work.batch) % len(inputs[0]))
    answers = {
        OUTPUTS: lambda: outputs(opened, inputs, work.batch),
        MEASURE: lambda: dict(opened.measure()),
        SECONDS: lambda: _seconds(opened, batch),
    }
    opened.call(*batch)
    settle()
    if work.threads == 1:
        share_processor()
    question = yield opened.detail
    while True:
        answer = answers[question]()
        settle()  # its threads should not take part in the turns of others
        question = yield answer


def _seconds(opened: Opened, batch: Arrays) -> float:
    opened.call(*batch)  # another process has had the caches
    taken: list[float] = []
    while not taken or (sum(taken) < _TURN_SECONDS and len(taken) < _MOST_CALLS):
        begin = time.perf_counter()
        opened.call(*batch)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def outputs(opened: Opened, inputs: Arrays, batch: int) -> Any:
    """Of all samples, `batch` of them at a time."""
    count = len(inputs[0])
    made = [
        opened.call(*_rows(inputs, np.arange(start, start + batch) % count))
        for start in range(0, count, batch)
    ]
    return np.concatenate(made)[:count]


def _rows(arrays: Arrays, indices: Any) -> Arrays:
    return tuple(np.ascontiguousarray(one[indices]) for one in arrays)
