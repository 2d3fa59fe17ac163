"""The memory of a call that its threads share, and how a thread enters a kernel with it.

It is of 64-bit words: a cache line that says what the call is, a line for each run of items, a byte
for each thread, and the kernel's slots. A run's line has two numbers: how many of its items are
taken, and how many are done, in the low half, and in the high half of which region. Regions of a
call are numbered, and numbers only grow, so that lines serve one region after another without being
cleared, and a thread that comes late, with a region that has ended, sees that nothing is left of
it. A line is written by the thread whose run it is, and by others only where they help.

A thread has a number: that of the last thread on its processor, if that is free, whose runs are in
the processor's caches.
"""

from __future__ import annotations

import ctypes
from functools import cache

from lowbit.isa.types import Int, s32, s64, u8
from lowbit.jit.builder import RUNS
from lowbit.jit.compile import immortal
from lowbit.jit.function import Function, Words

LINE = 8  # words
KERNEL, THREADS, LAST_NUMBERS, SLOTS, CLAIMS = range(5)  # the first line; where others begin
TAKEN, DONE = range(2)  # words of a run's line
FIRST_REGION = 1
_PROCESSORS = 256  # that are told apart, a power of two


def area(kernel: int, threads: int) -> list[int]:
    """What stands before the slots of a call of a kernel that so many threads may enter."""
    claims = LINE * (1 + min(threads, RUNS))
    slots = claims + -(-threads // 8)
    head = [kernel, threads, ctypes.addressof(_last_numbers(threads)), slots, claims]
    return [*head, *[0] * (slots - len(head))]


@cache
def _last_numbers(threads: int) -> ctypes.Array[ctypes.c_uint8]:
    """Of each processor, the number that the thread on it had in the last call of so many threads.
    They begin apart as far as they can, and stay so, since who finds a number taken notes the one
    that was free."""
    first = (i % threads % _PROCESSORS for i in range(_PROCESSORS))
    return immortal((ctypes.c_uint8 * _PROCESSORS)(*first))


def entered(k: Function, shared: Words) -> None:
    """What each thread of a call does."""
    number = k.register(k.index(0))
    for _ in k.when(shared[THREADS] > 1):
        number.value = k.call(_number, shared)
    slots = shared + shared[SLOTS]
    k.call(shared[KERNEL], slots, shared, number.value, FIRST_REGION, returns=None)


def _number(k: Function, shared: Words) -> Int:
    """A number for this thread: the last on its processor, or the next that is free."""
    processor = k.call("sched_getcpu", returns=s32).to(s64) & (_PROCESSORS - 1)
    last = k.view(Words, shared[LAST_NUMBERS]).pointer.cast(u8) + processor
    claims = (shared + shared[CLAIMS]).pointer.cast(u8)
    wanted = k.load_atomic(last, "monotonic").to(s64)
    number = k.register(wanted)
    for _ in k.loop():
        for _ in k.when(k.replace(claims + number.value, 0, 1, "monotonic")):
            for _ in k.unless(number.value.equals(wanted)):
                k.store_atomic(last, number.value.to(u8), "monotonic")
            k.returns(number.value)
        number.value = number.value + 1
        for _ in k.when(number.value.equals(shared[THREADS])):
            number.value = k.index(0)
    return number.value
