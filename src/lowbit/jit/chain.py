"""The machine code that runs one step after another: a kernel whose steps are its arguments.

Its slots, as jit.emit has them, are: the number of steps; where to write the clock at the beginning
and after each, or 0; the thread that does so; for each step the kernel's address and where its own
slots begin, counted from the first of all; the clocks; and those slots. So a network enters machine
code as one product does (jit.entry), its threads go from step to step by themselves, and none
begins a step before all items of the one before are done, since kernels end so.

Each thread reads the clock behind a step, which has ended by then. A thread that lost its core does
so late, so the first that writes a clock is right, and clocks never decrease. It may come back when
the call has returned (jit.team), so clocks are kept in the slots, and the caller takes them out.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from threading import get_ident
from time import perf_counter, sleep
from typing import Any

import numpy as np

from lowbit.isa.types import Int
from lowbit.isa.value import Value
from lowbit.jit.builder import MAX_REGIONS
from lowbit.jit.compile import Loaded
from lowbit.jit.entry import bound
from lowbit.jit.function import Function, Words, compiled
from lowbit.jit.launch import Launch, Place, Word
from lowbit.jit.threads import Shared

_RATE_SECONDS, _RATE_ERROR, _READINGS = 10e-3, 1e-5, 100  # of the clock's rate


class _Head(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in ("steps", "stamps", "caller"))


def lowbit_steps(k: Function, slots: Words, shared: Words, number: Int, region: Int) -> None:
    """Run the steps."""
    head = k.view(_Head, slots)
    table = head.end
    clocks = table + head.steps * 2

    def note(place: Value | int) -> None:
        for _ in k.unless(head.stamps.equals(0)):
            k.replace(clocks.at(place), 0, k.call("llvm.readcyclecounter"), "monotonic")

    note(0)
    for i in k.range(0, head.steps):
        own, first = slots + table[i * 2 + 1], region + i * MAX_REGIONS
        k.call(table[i * 2], own, shared, number, first, returns=None)
        note(i + 1)
    for _ in k.unless(head.stamps.equals(0)):
        for _ in k.when(k.call("pthread_self").equals(head.caller)):
            k.copy(head.stamps, clocks, (head.steps + 1) * 8)


def chain(
    launches: Sequence[Launch], begins: Mapping[str, int], arguments: Sequence[str], threads: int,
    kept: Any,
) -> Callable[..., None]:  # fmt: skip
    """A function of `arguments`, addresses or arrays in this order, that runs all of the launches.

    Their places are in buffers that begin where `begins` says, or that are arguments. The last
    argument, beside those, is where clocks are written, int64 [1 + launches], or None. kept: lives
    as long as the function.
    """
    table: list[int] = []
    slots: list[Word] = []
    clocks = [0] * (1 + len(launches))
    begin = ctypes.sizeof(_Head) // 8 + 2 * len(launches) + len(clocks)
    for one in launches:
        table += one.program.address, begin + len(slots)
        slots += (one.words[name] for name in one.program.names)
    words: list[Word] = [len(launches), Place("stamps"), Place("caller"), *table, *clocks, *slots]
    # A word that a call fills has its own parameter; one argument may fill several.
    names, wanted = [str(number) for number in range(len(words))], [*arguments, "stamps", "caller"]
    filled, fixed = dict[str, tuple[int, int]](), dict[str, Any]({"": kept})
    for name, at in zip(names, words, strict=True):
        if isinstance(at, Place) and at.buffer in wanted:
            filled[name] = wanted.index(at.buffer), at.offset
        else:
            fixed[name] = begins[at.buffer] + at.offset if isinstance(at, Place) else at
    call = bound(_driver(), threads, names, filled, fixed)
    if threads > 1:
        call = Shared(call)
    return lambda *given: call(*given, get_ident())


@cache
def ticks_per_second() -> float:
    """The rate of the clock that `chain` writes."""
    clock = chain([], {}, [], 1, None)
    first = _reading(clock)
    sleep(_RATE_SECONDS)
    ticks, seconds = np.subtract(_reading(clock), first)
    return float(ticks / seconds)


def _reading(clock: Callable[..., None]) -> tuple[int, float]:
    """The clock in ticks and in seconds at one time, as close as they can be read."""
    stamps, nearest = np.zeros(1, np.int64), (float("inf"), 0, 0.0)
    for _ in range(_READINGS):
        begin = perf_counter()
        clock(stamps)
        end = perf_counter()
        nearest = min(nearest, (end - begin, int(stamps[0]), (begin + end) / 2))
        if nearest[0] < _RATE_ERROR:
            break
    return nearest[1:]


@cache
def _driver() -> Loaded:
    return compiled(lowbit_steps)
