"""Timing several implementations of one thing against each other.

They take turns in random order, so that a change of clock or a busy neighbour meets all of them.
A turn starts with one call that is not timed, since the one before has had the caches. Turns go
on until the medians are known well enough, not for a fixed count.
"""

from __future__ import annotations

import gc
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowbit.jit import threads

Call = Callable[[], object]
Array = NDArray[Any]

_CONFIDENCE = 1.96  # standard normal quantile of a two-sided 95 % interval
_SAMPLE_SECONDS = 300e-6  # long beside the clock's 0.1 µs, short beside a scheduler's slice
_MOST_CALLS = 1000

# One that takes this share of a round would leave the others no time; it stops after a few turns.
_STRAGGLER_SHARE = 0.9
_STRAGGLER_ROUNDS = 3
# Even past the time limit, so that there is a spread.
_LEAST_ROUNDS = 3
# One that is this many times slower than the second fastest, and too slow for its part of the time
# limit, stops after its first turn.
_HOPELESS = 3.0

# A call as long as this has the caches to itself soon enough, and needs none before it.
_LONG_SECONDS = 20e-3
# Threads that wait for work spin on their cores first: libgomp's for some 10 ms, OpenBLAS's for
# 100 ms and more. They are asleep when none of them runs, or, where nobody tells, when this long a
# pause costs the process next to nothing (its clock may be brought up to date by ticks of 4 ms).
_PAUSE_SECONDS = 1e-3
_SPINNING = 0.3
_LONGEST_SPIN_SECONDS = 0.3


@dataclass(frozen=True)
class Limits:
    """When to stop: once every median is known to `noise` (half the 95 % interval, relative)
    after at least `least_rounds` turns, when `seconds` have passed, or after `most_rounds`.

    whole: nobody stops before the others, all have `least_rounds` even past the time limit, and
    that the medians are known stops nothing.
    """

    noise: float = 0.01
    seconds: float = 4.0
    least_rounds: int = 11
    most_rounds: int = 1 << 30
    whole: bool = False

    def __post_init__(self) -> None:
        for name in ("noise", "seconds", "least_rounds", "most_rounds"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name} is {value}; it must be above 0")


@dataclass(frozen=True)
class RemoteCall:
    """A call that another process makes, and tells the seconds that it took there. warm: it has
    been made there before, so nothing is called that is not timed."""

    seconds: Callable[[], float]
    warm: bool = False

    def __call__(self) -> None:
        if not self.warm:
            self.seconds()


@dataclass(frozen=True, eq=False)
class Samples:
    """Seconds per call of one implementation, one sample a round, and processor seconds."""

    name: str
    seconds: Array
    cpu_seconds: Array
    calls: int

    @property
    def median(self) -> float:
        """Median seconds per call."""
        return float(np.median(self.seconds))

    @property
    def noise(self) -> float:
        """Half the 95 % interval of the median, relative to it."""
        return median_noise(self.seconds)


def quantiles(values: Array) -> tuple[float, float, float]:
    """The 10th, 50th and 90th percentile."""
    low, middle, high = np.percentile(values, (10, 50, 90))
    return float(low), float(middle), float(high)


def median_noise(values: Array) -> float:
    """Half the width of the 95 % interval of the median, relative to the median.

    From order statistics (the ranks n/2 - 0.98 sqrt(n) and n/2 + 0.98 sqrt(n) + 1, rounded
    outwards), which suppose nothing about the distribution. Infinite below eight samples, which
    have no such ranks.
    """
    count = len(values)
    reach = _CONFIDENCE * math.sqrt(count) / 2
    low, high = math.floor(count / 2 - reach) - 1, math.ceil(count / 2 + reach)
    if low < 0 or high >= count:
        return math.inf
    ordered = np.sort(values)
    return float((ordered[high] - ordered[low]) / 2 / np.median(ordered))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def settle() -> float:
    """Wait until threads that this process has used are asleep; how long that took, in seconds."""
    start = time.perf_counter()
    while True:
        before = time.process_time()
        time.sleep(_PAUSE_SECONDS)
        waited = time.perf_counter() - start
        running, spent = threads.running(), time.process_time() - before
        asleep = running == 1 or (running is None and spent < _SPINNING * _PAUSE_SECONDS)
        if asleep or waited > _LONGEST_SPIN_SECONDS:
            return waited


def share_processor() -> None:
    """Keep all threads that this process has on one processor, the same for every process that asks
    for that: one whose core does other work besides would be slower than another."""
    if sys.platform == "linux":
        chosen = {max(os.sched_getaffinity(0))}
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # it may have ended meanwhile
                os.sched_setaffinity(int(thread), chosen)


def _calls_per_sample(calls: Sequence[Call]) -> int:
    """How often to call for one sample of a useful length; also the warm-up. 0: a single call is
    so long that it needs none before it."""
    start = time.perf_counter()
    for call in calls:
        call()
    if (time.perf_counter() - start) / len(calls) > _LONG_SECONDS:
        start = time.perf_counter()  # again: the first may have compiled
        calls[0]()
        if time.perf_counter() - start > _LONG_SECONDS:
            return 0
    # One by one: some of the first may compile, or lose their core.
    taken: list[float] = []
    start = end = time.perf_counter()
    while len(taken) < 5 or (end - start < 20 * _SAMPLE_SECONDS and len(taken) < _MOST_CALLS):
        before = time.perf_counter()
        calls[len(taken) % len(calls)]()
        end = time.perf_counter()
        taken.append(end - before)
    each = float(np.median(taken))
    return max(1, min(_MOST_CALLS, math.ceil(_SAMPLE_SECONDS / each)))


@lru_cache
def _loop(arguments: int, keywords: tuple[str, ...]) -> Callable[..., float]:
    """`seconds(clock, times, function, *values)`, with the call written out as a user writes it."""
    names = [f"value{index}" for index in range(arguments + len(keywords))]
    named = (f"{k}={name}" for k, name in zip(keywords, names[arguments:], strict=True))
    source = f"""def seconds(clock, times, function, {", ".join(names)}):
    start = clock()
    for _ in times:
        function({", ".join([*names[:arguments], *named])})
    return clock() - start"""
    made: dict[str, Any] = {}
    exec(source, made)
    return made["seconds"]


def _seconds(call: Call, count: int) -> float:
    """How long so many calls take. A partial with keywords is not called as it is: to put them
    together takes Python 0.1 µs, which a user's call does not."""
    parts = (call.func, call.args, call.keywords) if isinstance(call, partial) else (call, (), {})
    function, values, named = parts
    loop = _loop(len(values), tuple(named))
    return loop(time.perf_counter, repeat(None, count), function, *values, *named.values())


class Turn:
    """One implementation taking its turns, over one call or over a rotation of them."""

    def __init__(self, name: str, calls: Sequence[Call], pool: str) -> None:
        self.name = name
        self.pool = pool
        self.calls = calls
        # Over a rotation each copy must be cold again, so a sample is a single call, with none
        # before it.
        self.rotates = len(calls) > 1
        self.settling = 0.0
        warm = isinstance(calls[0], RemoteCall) and calls[0].warm
        wanted = 1 if self.rotates else 0 if warm else _calls_per_sample(calls)
        self.per_sample, self.warms = max(1, wanted), wanted > 0 and not self.rotates
        self.next = 0
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []

    def take(self) -> None:
        call = self.calls[self.next]
        self.next = (self.next + 1) % len(self.calls)
        if self.warms:
            call()
        if isinstance(call, RemoteCall):
            self.seconds.append(call.seconds())
            self.cpu_seconds.append(self.seconds[-1])
            return
        cpu_start = time.process_time()
        seconds = _seconds(call, self.per_sample)
        cpu_end = time.process_time()
        self.seconds.append(seconds / self.per_sample)
        self.cpu_seconds.append((cpu_end - cpu_start) / self.per_sample)

    @property
    def samples(self) -> Samples:
        seconds, cpu_seconds = np.array(self.seconds), np.array(self.cpu_seconds)
        return Samples(self.name, seconds, cpu_seconds, self.per_sample)

    @property
    def cost(self) -> float:
        """Seconds that a sample takes, with those until the threads that it used are asleep."""
        return self.samples.median * self.per_sample + self.settling


def interleave(
    calls: Mapping[str, Sequence[Call]],
    limits: Limits,
    *,
    seed: int = 0,
    on_round: Callable[[float], None] | None = None,
    pools: Mapping[str, str] | None = None,
) -> dict[str, Samples]:
    """Time every implementation, by name, in rounds of random order.

    Each has one call, or several that do the same on other memory: those take turns, and none is
    run just before it is timed, so that what they read comes from memory. One that takes nearly
    all the time stops after three rounds, one that is far slower than two others and would use up
    the time limit after one. `on_round` is told after every round how much of the time limit is
    used, 0 to 1. `pools` names the threads that each implementation runs on, where it is several:
    when they change, those of the one before are given time to go to sleep.
    """
    if not calls:
        raise ValueError("there is nothing to time; give at least one implementation")
    with _no_garbage_collection():
        turns = []
        for name, each in calls.items():
            settle()
            turns.append(Turn(name, each, (pools or {}).get(name, "")))
        going, last = list(turns), turns[-1]
        order = random.Random(seed)
        start = time.perf_counter()
        rounds, used = 0, 0.0
        least = limits.least_rounds if limits.whole else _LEAST_ROUNDS
        while rounds < limits.most_rounds and (used < 1 or rounds < least):
            for turn in order.sample(going, len(going)):
                if turn.pool != last.pool:
                    last.settling = settle()
                turn.take()
                last = turn
            rounds += 1
            used = (time.perf_counter() - start) / limits.seconds
            if on_round is not None:
                on_round(min(used, 1.0))
            if limits.whole:
                continue
            noise = max(turn.samples.noise for turn in going)
            if rounds >= limits.least_rounds and noise <= limits.noise:
                break
            if rounds == 1:
                going = _hopeful(turns, limits)
            if rounds == _STRAGGLER_ROUNDS:
                total = sum(turn.cost for turn in turns)
                going = [t for t in going if t.cost <= _STRAGGLER_SHARE * total] or going
        return {turn.name: turn.samples for turn in turns}


def _hopeful(turns: Sequence[Turn], limits: Limits) -> list[Turn]:
    """Those that can be among the fastest two, or are quick enough to be timed all the same."""
    second = sorted(turn.samples.median for turn in turns)[min(1, len(turns) - 1)]
    part = limits.seconds / (len(turns) * limits.least_rounds)
    return [t for t in turns if t.samples.median <= _HOPELESS * second or t.cost <= part]


def paired_ratio(slower: Samples, faster: Samples) -> tuple[float, float, float]:
    """10th, 50th and 90th percentile of slower / faster, each round by itself.

    What changes from round to round slows both alike and falls out of the ratio. Rounds that
    only one of them took part in, the other having stopped, are left out.
    """
    rounds = min(len(slower.seconds), len(faster.seconds))
    return quantiles(slower.seconds[:rounds] / faster.seconds[:rounds])
