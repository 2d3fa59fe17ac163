"""What this machine can do at most, measured in the same run as what is compared with it.

Rates are the best of several samples: a ceiling is what was reached, and a busy neighbour can only
lower it. Nothing here is taken from a data sheet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from lowbit import isa as instruction_sets
from lowbit.bench.timing import settle
from lowbit.isa import InstructionSet, host
from lowbit.jit.workspace import aligned_empty
from lowbit.kernels.cpu.shared import peak as kernels

_SAMPLE_SECONDS = 2e-3
_BURSTS, _SAMPLES = 5, 3  # so many times so many samples in a row
# Between bursts, so that threads that spin go to sleep: a system that has a busy neighbour gives a
# core sooner to one that slept than to one that has just used up its time.
_REST_SECONDS = 20e-3
# A sample counts if its threads ran for this share of the time; there may be no such for so long.
_UNDISTURBED = 0.9
_PATIENCE_SECONDS = 1.0
_ITEMS_PER_THREAD = 4
_MOST_BYTES = 1 << 30  # read from memory at once, where four times the last cache would be more


@dataclass(frozen=True)
class Ceiling:
    """The measured limits of one instruction set with some threads.

    way: what multiplied fastest, a name of `kernels.cpu.shared.peak.WAYS`. gops: billions of int8
    operations a second, two for each product; gops_median: the median of the samples. ways: the
    best of every way that was tried. read_gbs: 10^9 bytes a second, by the cache level (or
    "memory") that they were read from.
    """

    isa: str
    threads: int
    way: str
    gops: float
    gops_median: float
    ways: Mapping[str, float]
    read_gbs: Mapping[str, float] = field(default_factory=dict)


def measure(isa: str, threads: int, *, reads: bool = True) -> Ceiling:
    """The ceiling of the set called `isa`, or of the one below it that has a way to multiply.

    ValueError if `threads` is below 1; RuntimeError if the machine cannot run the set.
    """
    if threads < 1:
        raise ValueError(f"threads is {threads}; it must be at least 1")
    one, names = _ways(instruction_sets.get(isa))
    settle()
    samples = {name: _product_rates(one, name, threads) for name in names}
    best = max(samples, key=lambda name: samples[name].max())
    return Ceiling(
        isa=one.name,
        threads=threads,
        way=best,
        gops=float(samples[best].max()),
        gops_median=float(np.median(samples[best])),
        ways={name: float(rates.max()) for name, rates in samples.items()},
        read_gbs=_read_rates(one, threads) if reads else {},
    )


def _ways(isa: InstructionSet) -> tuple[InstructionSet, list[str]]:
    """The first set from `isa` down the chain that has ways to multiply, and these."""
    for one in instruction_sets.chain(isa):
        names = [name for name, way in kernels.WAYS.items() if way.isa == one.name]
        if names:
            return one, names
    raise RuntimeError(f"no way to measure the peak of {isa.name} or what it falls back to")


def _product_rates(isa: InstructionSet, way: str, threads: int) -> np.ndarray:
    """Samples of 10^9 operations a second."""
    program = kernels.multiply.program(isa, way=way)
    items = 1 if threads == 1 else _ITEMS_PER_THREAD * threads
    values = aligned_empty((kernels.OPERAND_BYTES,), np.uint8)
    # Zeros would be multiplied at less power, perhaps at a higher clock.
    values[:] = np.random.default_rng(0).integers(0, 256, values.size)
    out = aligned_empty((items * kernels.OUT_BYTES,), np.uint8)
    place = values.ctypes.data, out.ctypes.data
    seconds, rounds = _sampled(lambda count: program(threads, *place, count, items), threads)
    return 2 * kernels.products_of(way) * rounds * items / seconds / 1e9


def _sampled(call: Callable[[int], None], threads: int) -> tuple[np.ndarray, int]:
    """Seconds of several calls that are given as many rounds as a sample of use needs; these.

    Where others use the cores too, waiting for one can take a thousand times longer than the
    rounds themselves: samples in which threads waited are left out, if there are any others.
    """
    rounds, start = 1, time.perf_counter()
    while True:
        seconds, running = _bursts(call, rounds)
        undisturbed = seconds[running >= _UNDISTURBED * threads]
        chosen = undisturbed if undisturbed.size else seconds
        if chosen.min() < _SAMPLE_SECONDS:
            rounds = max(2 * rounds, int(1.5 * rounds * _SAMPLE_SECONDS / chosen.min()))
        elif undisturbed.size or time.perf_counter() - start > _PATIENCE_SECONDS:
            return chosen, rounds


def _bursts(call: Callable[[int], None], rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of every sample, of `rounds` rounds each, and how many threads ran at a time."""
    samples = []
    for _ in range(_BURSTS):
        time.sleep(_REST_SECONDS)
        for _ in range(_SAMPLES):
            processor, wall = time.process_time(), time.perf_counter()
            call(rounds)
            samples.append((time.perf_counter() - wall, time.process_time() - processor))
    seconds, processor_seconds = np.array(samples).T
    return seconds, processor_seconds / seconds


class Reader:
    """A plain read of memory, by several threads: `reader()` loads every byte once.

    `nbytes` are rounded up to whole steps of the kernel, at least one for each thread.
    """

    def __init__(self, isa: InstructionSet, nbytes: int, threads: int, chunks: int = 0) -> None:
        chunks = chunks or (1 if threads == 1 else _ITEMS_PER_THREAD * threads)
        steps = -(-nbytes // (chunks * kernels.READ_STEP))
        self._chunk, self._chunks = max(1, steps) * kernels.READ_STEP, chunks
        self.nbytes = self._chunk * chunks
        self.threads = threads
        self._program = kernels.read.program(isa)
        self._memory = aligned_empty((self.nbytes,), np.uint8)
        self._memory[:] = 1  # a page that was never written would be read from the page of zeros
        self._out = aligned_empty((chunks * 64,), np.uint8)
        self._addresses = self._memory.ctypes.data, self._out.ctypes.data

    def __call__(self, repeats: int = 1) -> None:
        self._program(self.threads, *self._addresses, self._chunk, self._chunks, repeats)


def _read_rates(isa: InstructionSet, threads: int) -> dict[str, float]:
    """Best rate of each level, nearest first; a level is read from half of its size."""
    caches = host.caches()
    rates: dict[str, float] = {}
    for level in sorted(caches):
        # The last cache is shared by the threads, the others are each core's own.
        shared = level == max(caches)
        each = caches[level] // 2 // (threads if shared else 1)
        rates[level] = _rate(Reader(isa, each * threads, threads, chunks=threads))
    far = min(_MOST_BYTES, 4 * max(caches.values()))
    rates["memory"] = _rate(Reader(isa, far, threads))
    return rates


def _rate(reader: Reader) -> float:
    """10^9 bytes a second."""
    seconds, repeats = _sampled(reader, reader.threads)
    return reader.nbytes * repeats / float(seconds.min()) / 1e9
