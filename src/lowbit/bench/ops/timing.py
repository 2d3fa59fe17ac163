"""Timing on a GPU: implementations in turn, by events, each behind a wait that hides its start."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowbit.bench.timing import Limits, median_noise

Call = Callable[[], Tensor]
Array = NDArray[np.float64]

# Python needs some 100 µs to start a kernel; meanwhile the GPU is kept busy with nothing.
_HIDING_CYCLES = 400_000
_MOST_ROUNDS = 400
_WARM_UPS = 3


class Flush:
    """Memory of twice the L2 cache, to be read before each timed call, so that none finds its
    operands there; read, since what is written would still have to leave the cache."""

    def __init__(self, device: torch.device) -> None:
        size = torch.cuda.get_device_properties(device).L2_cache_size
        self._memory = torch.zeros(2 * size // 4, device=device)

    def __call__(self) -> None:
        self._memory.sum()


def interleave(
    calls: Mapping[str, Call], limits: Limits, flush: Callable[[], None], seed: int
) -> dict[str, Array]:
    """Seconds of each call, in rounds of random order, until all medians are known to
    `limits.noise` or the time is up. Every call is made a few times before."""
    for call in calls.values():
        for _ in range(_WARM_UPS):
            call()
    torch.cuda.synchronize()
    order, taken = random.Random(seed), {name: list[float]() for name in calls}
    begun = time.perf_counter()
    for count in range(1, _MOST_ROUNDS + 1):
        events = {name: _timed(calls[name], flush) for name in order.sample([*calls], len(calls))}
        torch.cuda.synchronize()
        for name, (start, end) in events.items():
            taken[name].append(start.elapsed_time(end) / 1e3)
        known = all(median_noise(np.array(one)) <= limits.noise for one in taken.values())
        late = time.perf_counter() - begun > limits.seconds
        if count >= limits.least_rounds and (known or late):
            break
    return {name: np.array(one) for name, one in taken.items()}


def _timed(call: Call, flush: Callable[[], None]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush()
    torch.cuda._sleep(_HIDING_CYCLES)
    start.record()
    call()
    end.record()
    return start, end
