"""The pool of threads, and when it takes the place of PyTorch's."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from lowbit.isa import active
from lowbit.isa.types import Int, S32Pointer, s32
from lowbit.jit import team, threads
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import Program, kernel


@kernel
def squares(k: Builder, x: S32Pointer, out: S32Pointer, rounds: Int, n: Int) -> None:
    for i in k.parallel(n):
        value = k.register((x + i).load())
        for _ in k.range(0, rounds):
            value.value = value.value * value.value
        (out + i).store(value.value)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    """Of `squares`, run by the pool whether PyTorch is loaded or not."""
    monkeypatch.setattr(threads, "_of_torch", None)
    monkeypatch.setattr(threads, "_searched", True)
    assert threads.runtime() == threads.OWN
    return squares.program(active())


def _check(program: Program, count: int, size: int) -> None:
    x = np.random.default_rng(size).integers(-9, 10, size).astype(np.int32)
    out = np.full_like(x, 77)
    program(count, x, out, 1, size)
    np.testing.assert_array_equal(out, x * x)


@pytest.mark.parametrize("count", [2, 3, 8, 33])
def test_every_item_is_done_when_a_call_returns(program: Program, count: int) -> None:
    for size in (0, 1, 2, 7, 1000):
        for _ in range(20):
            _check(program, count, size)


@pytest.mark.deep
def test_more_callers_than_tasks(program: Program) -> None:
    callers = 3 * team.TASKS
    with ThreadPoolExecutor(callers) as pool:
        done = [pool.submit(_check, program, 1 + i % 5, 100 * i) for i in range(20 * callers)]
        for one in done:
            one.result()


def test_a_call_after_the_workers_fell_asleep(program: Program) -> None:
    for _ in range(5):
        _check(program, 4, 50)
        time.sleep(0.02)


@kernel
def meet(k: Builder, flags: S32Pointer, misses: S32Pointer, n: Int) -> None:
    """Each of two items waits until the other one has begun, or has looked for it in vain."""
    for i in k.parallel(n):
        (flags + i).store(k.constant(1, s32))
        for _ in k.range(0, 1 << 26):
            for _ in k.when((flags + (1 - i)).load().equals(0)):
                (misses + i).store((misses + i).load() + 1)


def test_items_are_shared_out(program: Program) -> None:
    flags, misses = np.zeros(2, np.int32), np.zeros(2, np.int32)
    meet.program(active())(2, flags, misses, 2)
    assert flags.all()
    assert (misses < 1 << 26).all(), "one thread did both"


class _Runtimes:
    """Stands for a call and for the clock: notes who was to start its threads, and takes as long
    as they do."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds = seconds
        self.seen: list[int] = []
        self.now = 1.0

    def __call__(self, runner: int, *arguments: object) -> None:
        self.seen.append(runner)
        self.now += self.seconds[runner]


_TORCH = 1  # no address of a function


def _forget(monkeypatch: pytest.MonkeyPatch, awake: bool = True) -> None:
    """What other calls found out; PyTorch's threads are awake or not."""
    monkeypatch.setattr(threads, "_until", 0.0)
    monkeypatch.setattr(threads, "_pause", threads._SOON)
    monkeypatch.setattr(threads, "_starter", threads.Starter())
    monkeypatch.setattr(threads, "_awake", lambda: awake)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], list[int]]:
    """What a process with PyTorch's threads does in ten calls, which take so long with those and
    with the pool's."""
    monkeypatch.setattr(threads, "_of_torch", ("libgomp", _TORCH))
    monkeypatch.setattr(threads, "_searched", True)
    _forget(monkeypatch)

    def run(theirs: float, own: float) -> list[int]:
        call = _Runtimes({_TORCH: theirs, team.address(): own})
        monkeypatch.setattr(threads, "monotonic", lambda: call.now)
        one = threads.Shared(call)
        for _ in range(10):
            one()
        return call.seen

    return run


def test_threads_of_torch_serve(shared: Callable[[float, float], list[int]]) -> None:
    assert shared(1e-5, 1e-5) == [_TORCH] * 10
    assert threads._starter.function == _TORCH  # recognized calls start them too


def test_a_region_that_waits_for_a_lost_core_is_noticed(
    shared: Callable[[float, float], list[int]],
) -> None:
    assert shared(8e-3, 1e-4) == [_TORCH] * 3 + [team.address()] * 7
    assert threads._starter.function == team.address()


def test_a_long_region_is_no_lost_core(shared: Callable[[float, float], list[int]]) -> None:
    assert shared(8e-3, 8e-3) == [_TORCH] * 3 + [team.address()] + [_TORCH] * 6


def test_one_long_region_is_an_accident(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_of_torch", ("libgomp", _TORCH))
    monkeypatch.setattr(threads, "_searched", True)
    _forget(monkeypatch)
    call = _Runtimes({_TORCH: 1e-5, team.address(): 1e-5})
    monkeypatch.setattr(threads, "monotonic", lambda: call.now)
    one = threads.Shared(call)
    for number in range(20):
        call.seconds[_TORCH] = 1e-5 if number % 3 else 8e-3
        one()
    assert call.seen == [_TORCH] * 20


def test_threads_of_torch_that_sleep_are_left_asleep(
    shared: Callable[[float, float], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _forget(monkeypatch, awake=False)
    assert shared(1e-5, 1e-5) == [team.address()] * 10
    assert threads._starter.function == team.address()


def test_who_is_awake_is_looked_up_again_soon(
    shared: Callable[[float, float], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = iter([False, False, True])
    _forget(monkeypatch)
    monkeypatch.setattr(threads, "_awake", lambda: next(states))
    own = team.address()
    assert shared(1e-3, 3e-3) == [own] * (2 + 4) + [_TORCH] * 4  # after 5 and 10 ms


def test_threads_that_run_are_seen(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others' count, those of the pool do not, and who sleeps does not."""
    _check(program, 4, 50)  # now some of the pool spin
    monkeypatch.setattr(threads, "max_threads", lambda: 2)
    assert not threads._awake()
    done = False

    def spin() -> None:
        while not done:
            pass

    with ThreadPoolExecutor(1) as pool:
        pool.submit(spin)
        try:
            assert any(threads._awake() for _ in range(1000))
        finally:
            done = True
