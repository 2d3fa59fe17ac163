"""An engine in a process of its own, see `bench.core.apart`.

Run as `python -m lowbit.bench.networks.serve NAME WORK`. It answers first what it runs on, then
each question: how long a call took, what else is measured, or that outputs are written.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from lowbit.bench.core.apart import answering
from lowbit.bench.core.clock import settle, share_processor
from lowbit.bench.models.model import Arrays
from lowbit.bench.networks.engine import INPUTS, Opened, Work, engines

_TURN_SECONDS = 0.03  # a turn has as many calls as fit, and gives their median
_MOST_CALLS = 50


def main(arguments: Sequence[str]) -> None:
    """Open, then answer until there are no more questions."""
    name, work = arguments[0], Work(**json.loads(arguments[1]))
    with answering() as (answer, questions):
        opened = engines.get(name).open(work)
        inputs = work.arrays(INPUTS)
        batch = _rows(inputs, np.arange(work.batch) % len(inputs[0]))
        opened.call(*batch)
        settle()
        if work.threads == 1:
            share_processor()
        answer({"detail": opened.detail})
        for question in questions:
            told = _answer(question, opened, inputs, batch)
            settle()  # its threads should not take part in the turns of others
            answer(told)


def _answer(question: dict[str, Any], opened: Opened, inputs: Arrays, batch: Arrays) -> Any:
    if "outputs" in question:
        np.save(question["outputs"], outputs(opened, inputs, len(batch[0])))
        return {}
    if "measure" in question:
        return dict(opened.measure())
    opened.call(*batch)  # another process has had the caches
    taken: list[float] = []
    while not taken or (sum(taken) < _TURN_SECONDS and len(taken) < _MOST_CALLS):
        begin = time.perf_counter()
        opened.call(*batch)
        taken.append(time.perf_counter() - begin)
    return {"seconds": statistics.median(taken)}


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


if __name__ == "__main__":
    main(sys.argv[1:])
