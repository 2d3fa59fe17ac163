"""Chains of kernels: their clocks, with threads that are late, and thousands of steps."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lowbit.isa import get
from lowbit.isa.types import Int, S32Pointer, s32
from lowbit.jit.builder import Builder
from lowbit.jit.chain import chain, ticks_per_second
from lowbit.jit.kernel import kernel
from lowbit.jit.launch import Launch, Place

_LATE = 1.0  # seconds
_STEPS = 4


@pytest.mark.parametrize("late_step", range(_STEPS - 1))
def test_a_late_thread_does_not_move_the_clock_of_a_step(late_step: int) -> None:
    """The clock is read when a step has ended, not when a thread that lost its core comes back."""
    meeting, begun = threading.Barrier(2, timeout=10), Counter[int]()

    def step(_: int) -> None:
        thread = threading.get_native_id()
        begun[thread] += 1
        if begun[thread] == 1 + late_step and meeting.wait() == 0:
            time.sleep(_LATE)

    kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(step)
    address = ctypes.cast(kernel, ctypes.c_void_p).value
    assert address is not None
    program: Any = SimpleNamespace(address=address, names=())
    run = chain([Launch(program, {})] * _STEPS, {}, (), 2, kernel)
    stamps = np.zeros(1 + _STEPS, np.int64)
    run(stamps)
    taken = np.diff(stamps) / ticks_per_second()
    assert (taken >= 0).all()
    assert taken.sum() < _LATE / 2
    # What returned belongs to the caller again, though the thread has steps to go through.
    stamps[:] = 0
    end = time.monotonic() + 10
    while sum(begun.values()) < 2 * _STEPS and time.monotonic() < end:
        time.sleep(0.01)
    assert sorted(begun.values()) == [_STEPS, _STEPS]
    time.sleep(0.05)
    assert not stamps.any()


def test_the_clock_has_a_rate() -> None:
    assert 1e6 < ticks_per_second() < 1e11
    run, stamps = chain([], {}, (), 1, None), np.zeros((2, 1), np.int64)
    begin = time.perf_counter()
    run(stamps[0])
    time.sleep(0.05)
    run(stamps[1])
    passed = time.perf_counter() - begin
    assert 0.04 < float(stamps[1, 0] - stamps[0, 0]) / ticks_per_second() < 1.02 * passed


@kernel
def count(k: Builder, out: S32Pointer, by: Int) -> None:
    """out[0] += by."""
    for _ in k.parallel(k.index(1)):
        out.store(out.load() + by.to(s32))


@pytest.mark.parametrize("threads", [1, 2])
def test_more_steps_than_a_stack_has_room_for(threads: int) -> None:
    steps = 2000  # a megabyte of slots
    program = count.program(get("generic"))
    launch = Launch(program, {"out": Place("out"), "by": 1})
    run = chain([launch] * steps, {}, ("out",), threads, program)
    out = np.zeros(1, np.int32)
    before = threading.stack_size(1 << 18)
    try:
        thread = threading.Thread(target=lambda: [run(out, None) for _ in range(3)])
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    assert out[0] == 3 * steps
    with pytest.raises(TypeError):
        run("no address", None)


@kernel
def turn_and_double(k: Builder, a: S32Pointer, b: S32Pointer, n: Int) -> None:
    """b[i] = a[i + 1] + 1, around, and a = 2 · b backwards: two regions."""
    for i in k.parallel(n):
        (b + i).store((a + (i + 1) % n).load() + 1)
    for i in k.parallel(n):
        (a + i).store((b + (n - 1 - i)).load() * 2)


@pytest.mark.parametrize("threads", [1, 2, 3, 16, 17, 70])
def test_each_region_sees_all_of_the_one_before(threads: int) -> None:
    """Lines serve one region after another: of fewer items than runs, as many, more, none."""
    sizes, program = (1, 5, 16, 0, 33, 100), turn_and_double.program(get("generic"))
    rng = np.random.default_rng(threads)
    a = rng.integers(-9, 9, max(sizes)).astype(np.int32)
    want, made, b = a.copy(), a.copy(), np.zeros_like(a)
    launches = [Launch(program, {"a": Place("a"), "b": Place("b"), "n": n}) for n in sizes * 4]
    run = chain(launches, {}, ("a", "b"), threads, program)
    for _ in range(20):
        run(made, b, None)
        for n in sizes * 4:
            want[:n] = (np.roll(want[:n], -1) + np.int32(1))[::-1] * np.int32(2)
        assert (made == want).all()
