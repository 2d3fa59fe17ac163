"""What this machine can do at most, measured in the same run as what is compared with it.

Rates are the best of several samples: a ceiling is what was reached, and a busy neighbour can only
lower it. Where one lowered all of them, the ceiling says so, and no share of it is told. Nothing
here is taken from a data sheet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lowbit import isa as instruction_sets
from lowbit.isa import InstructionSet, host
from lowbit.jit.workspace import aligned_empty
from lowbit.kernels.cpu.shared import peak as kernels
from lowbit_lab.bench.core.clock import settle

_SAMPLE_SECONDS = 2e-3
_BURSTS, _SAMPLES = 5, 3  # so many times so many samples in a row
# Between bursts, so that threads that spin go to sleep: a system that has a busy neighbour gives a
# core sooner to one that slept than to one that has just used up its time.
_REST_SECONDS = 20e-3
# A sample counts if its threads ran for this share of the time; there may be no such for so long.
_UNDISTURBED = 0.9
_PATIENCE_SECONDS = 1.0
# A rate beyond a limit by more than the clock wanders in a run shows that the limit is wrong.
_WANDER = 1.05
_ITEMS_PER_THREAD = 4
_MOST_BYTES = 1 << 30  # read from memory at once, where four times the last cache would be more


PRODUCTS = "products"
"""What of a ceiling's rates `gops` is, beside the levels of `read_gbs`."""


def share(part: float) -> float | None:
    """A share of a measured limit as it can be told: at most 1, and None where it is so far above
    that the limit cannot have been measured well."""
    return min(part, 1.0) if part <= _WANDER else None


def level(size: int, threads: int) -> str:
    """The nearest cache that holds `size` bytes: each thread has its own nearer ones."""
    caches = host.caches()
    for name in sorted(caches):
        if size <= caches[name] * (1 if name == max(caches) else threads):
            return name
    return "memory"


@dataclass(frozen=True)
class Ceiling:
    """The measured limits of one instruction set with some threads.

    way: what multiplied fastest, a name of `kernels.cpu.shared.peak.WAYS`. dtype: what it
    multiplied, "int8" or "float32". gops: billions of operations a second, two for each product;
    gops_median: the median of the samples. ways: the best of every way that was tried. read_gbs:
    10^9 bytes a second, by the cache level (or "memory") that they were read from. disturbed:
    `PRODUCTS` or levels of which no sample was taken without a thread waiting for a core; their
    rates are lower bounds. Of a GPU threads are 0, and ways are dtypes.
    """

    isa: str
    threads: int
    way: str
    gops: float
    gops_median: float
    ways: Mapping[str, float]
    read_gbs: Mapping[str, float] = field(default_factory=dict)
    disturbed: tuple[str, ...] = ()
    dtype: str = "int8"

    def share(self, gops: float, way: str = "") -> float | None:
        """Which part of the peak, or of one of the ways, `gops` is; None if the peak was not
        measured well."""
        peak = self.ways[way] if way else self.gops
        return None if PRODUCTS in self.disturbed else share(gops / peak)


def measure(isa: str, threads: int, *, reads: bool = True, dtype: str = "int8") -> Ceiling:
    """The ceiling of the set called `isa`, or of the one below it that has a way to multiply.

    dtype: what is multiplied, "int8" or "float32". ValueError if `threads` is below 1; RuntimeError
    if the machine cannot run the set.
    """
    if threads < 1:
        raise ValueError(f"threads is {threads}; it must be at least 1")
    one, names = _ways(instruction_sets.get(isa), dtype)
    settle()
    samples = {name: _product_rates(one, name, threads) for name in names}
    best = max(samples, key=lambda name: samples[name].rates.max())
    read = _read_rates(one, threads) if reads else {}
    rates = {PRODUCTS: samples[best], **read}
    return Ceiling(
        isa=one.name,
        threads=threads,
        way=best,
        gops=float(samples[best].rates.max()),
        gops_median=float(np.median(samples[best].rates)),
        ways={name: float(found.rates.max()) for name, found in samples.items()},
        read_gbs={level: float(found.rates.max()) for level, found in read.items()},
        disturbed=tuple(name for name, found in rates.items() if found.disturbed),
        dtype=dtype,
    )


def _ways(isa: InstructionSet, dtype: str = "int8") -> tuple[InstructionSet, list[str]]:
    """The first set from `isa` down the chain that has ways to multiply, and these."""
    for one in instruction_sets.chain(isa):
        ways = kernels.WAYS.items()
        names = [n for n, way in ways if (way.isa, way.dtype) == (one.name, dtype)]
        if names:
            return one, names
    raise RuntimeError(f"no way to measure the peak of {isa.name} or what it falls back to")


class _Rates(NamedTuple):
    """10^9 a second, of several samples; whether a thread waited for a core in each of them."""

    rates: np.ndarray
    disturbed: bool


def _product_rates(isa: InstructionSet, way: str, threads: int) -> _Rates:
    """Of operations."""
    program = kernels.multiply.program(isa, way=way)
    items = 1 if threads == 1 else _ITEMS_PER_THREAD * threads
    values = aligned_empty((kernels.OPERAND_BYTES,), np.uint8)
    # Zeros would be multiplied at less power, perhaps at a higher clock.
    values[:] = np.random.default_rng(0).integers(0, 256, values.size)
    out = aligned_empty((items * kernels.OUT_BYTES,), np.uint8)
    place = values.ctypes.data, out.ctypes.data

    def call(own: int, rounds: int) -> None:
        program(own, *place, rounds, items)

    return _sampled(call, 2 * kernels.products_of(way) * items, threads)


def _sampled(call: Callable[[int, int], None], work: float, threads: int) -> _Rates:
    """Rates of several calls, each with as many rounds of `work` as a sample of use needs.

    `call` takes threads and rounds. Where others use the cores too, waiting for one can take a
    thousand times longer than the rounds themselves, so the time that passes says nothing of their
    number: it is found on one thread, in the time that this runs. With one thread that time is all
    that counts in the samples too. With several, threads that are done spin until the last one is,
    which counts as running: there the time that passes is taken, of samples in which all ran.
    """
    rounds = 1
    # The lesser of two: a first call on a busy machine may be charged for what is not its own.
    while (ran := min(_ran(call, 1, rounds)[1] for _ in "12")) < threads * _SAMPLE_SECONDS:
        wanted = 1.5 * rounds * threads * _SAMPLE_SECONDS / max(ran, 1e-9)
        rounds = max(2 * rounds, min(int(wanted), 1000 * rounds))
    start, samples = time.perf_counter(), list[tuple[float, float]]()
    while True:
        samples += _burst(call, threads, rounds)
        passed, ran = np.array(samples).T
        if threads == 1:
            return _Rates(rounds * work / ran / 1e9, False)
        undisturbed = ran >= _UNDISTURBED * threads * passed
        if undisturbed.any():
            return _Rates(rounds * work / passed[undisturbed] / 1e9, False)
        if time.perf_counter() - start > _PATIENCE_SECONDS:
            return _Rates(rounds * work / passed / 1e9, True)


def _burst(
    call: Callable[[int, int], None], threads: int, rounds: int
) -> list[tuple[float, float]]:
    """Several groups of samples of `rounds` rounds, each after a rest."""
    samples = []
    for _ in range(_BURSTS):
        time.sleep(_REST_SECONDS)
        samples += [_ran(call, threads, rounds) for _ in range(_SAMPLES)]
    return samples


def _ran(call: Callable[[int, int], None], threads: int, rounds: int) -> tuple[float, float]:
    """Seconds that passed in a call, and that all threads together ran."""
    ran, passed = time.process_time(), time.perf_counter()
    call(threads, rounds)
    return time.perf_counter() - passed, time.process_time() - ran


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
        self.read(self.threads, repeats)

    def read(self, threads: int, repeats: int) -> None:
        """The same so many times, by so many threads."""
        self._program(threads, *self._addresses, self._chunk, self._chunks, repeats)


def _read_rates(isa: InstructionSet, threads: int) -> dict[str, _Rates]:
    """Of bytes from each level, nearest first; a level is read from half of its size."""
    caches = host.caches()
    readers: dict[str, Reader] = {}
    for level in sorted(caches):
        # The last cache is shared by the threads, the others are each core's own.
        shared = level == max(caches)
        each = caches[level] // 2 // (threads if shared else 1)
        readers[level] = Reader(isa, each * threads, threads, chunks=threads)
    readers["memory"] = Reader(isa, min(_MOST_BYTES, 4 * max(caches.values())), threads)
    return {
        level: _sampled(reader.read, reader.nbytes, threads) for level, reader in readers.items()
    }
