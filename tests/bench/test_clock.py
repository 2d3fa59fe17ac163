"""The stopping rule, the order of turns, and the statistics; nothing here depends on speed."""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from lowbit_lab.bench.core import clock as timing
from lowbit_lab.bench.core.clock import (
    Limits,
    RemoteCall,
    Samples,
    interleave,
    median_noise,
    paired_ratio,
    quantiles,
)


class Clock:
    """A clock that moves only when something is called on it; `reading` is what looking takes."""

    reading = 0.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.slept = 0.0
        monkeypatch.setattr(timing.time, "perf_counter", self.look)
        monkeypatch.setattr(timing.time, "process_time", lambda: 2 * (self.now - self.slept))
        monkeypatch.setattr(timing.time, "sleep", self.sleep)

    def look(self) -> float:
        self.now += self.reading
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds

    def taking(self, *seconds: float, log: list[float] | None = None) -> Callable[[], None]:
        """A call that takes these times, one after another and again."""
        count = 0

        def call() -> None:
            nonlocal count
            self.now += seconds[count % len(seconds)]
            count += 1
            if log is not None:
                log.append(seconds[0])

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def samples(*seconds: float) -> Samples:
    return Samples("some", np.array(seconds), np.array(seconds), 1)


def test_steady_calls_stop_after_the_least_rounds(clock: Clock) -> None:
    calls = {"a": [clock.taking(0.001)], "b": [clock.taking(0.003)]}
    taken = interleave(calls, Limits(noise=0.01, seconds=100, least_rounds=11))
    assert len(taken["a"].seconds) == len(taken["b"].seconds) == 11
    assert taken["a"].median == pytest.approx(0.001)
    assert taken["b"].median == pytest.approx(0.003)
    assert taken["b"].cpu_seconds[0] == pytest.approx(0.006)


def test_noisy_calls_go_on(clock: Clock) -> None:
    noisy = np.random.default_rng(0).uniform(0.001, 0.002, 997)
    calls = {"a": [clock.taking(0.001)], "b": [clock.taking(*noisy)]}
    taken = interleave(calls, Limits(noise=0.02, seconds=1000, least_rounds=11))
    assert len(taken["a"].seconds) > 50
    assert taken["b"].noise <= 0.02


def test_time_limit_ends_it(clock: Clock) -> None:
    noisy = np.random.default_rng(0).uniform(0.001, 0.009, 997)
    shares: list[float] = []
    limits = Limits(noise=1e-6, seconds=0.5)
    taken = interleave({"a": [clock.taking(*noisy)]}, limits, on_round=shares.append)
    assert len(taken["a"].seconds) == len(shares)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert shares[-2] < 1.0


def test_short_calls_are_timed_many_at_once(clock: Clock) -> None:
    taken = interleave({"a": [clock.taking(1e-6)]}, Limits(seconds=100))
    assert taken["a"].calls == pytest.approx(300, abs=1)
    assert taken["a"].median == pytest.approx(1e-6)


def test_looking_at_the_clock_is_no_part_of_short_calls(clock: Clock) -> None:
    clock.reading = 0.2e-6
    calls = {str(t): [clock.taking(t)] for t in (0.2e-6, 1e-6, 50e-6)}
    taken = interleave(calls, Limits(seconds=100))
    for name, one in taken.items():
        assert one.median == pytest.approx(float(name), rel=0.005), name


def test_calls_are_written_out_whatever_holds_their_arguments() -> None:
    """A partial with keywords takes Python a tenth of a call of one microsecond."""
    seen: list[object] = []

    def function(*values: object, **named: object) -> None:
        seen.append((values, named))

    class Changed(partial):
        """One that cannot be called."""

        def __call__(self) -> None:
            raise AssertionError

    several = {
        "nothing": (function, ((), {})),
        "values": (Changed(function, 1, "two"), ((1, "two"), {})),
        "names": (Changed(function, three=3), ((), {"three": 3})),
        "both": (
            Changed(partial(function, 1), 2, start=4, clock=5),
            ((1, 2), {"start": 4, "clock": 5}),
        ),
    }
    for call, expected in several.values():
        seen.clear()
        assert timing._seconds(call, 3) > 0
        assert seen == [expected] * 3


def test_straggler_stops_and_the_others_go_on(clock: Clock) -> None:
    calls = {"fast": [clock.taking(0.001)], "slow": [clock.taking(0.5)]}
    taken = interleave(calls, Limits(noise=0.01, seconds=100, least_rounds=11))
    assert len(taken["slow"].seconds) == 3
    assert len(taken["fast"].seconds) == 11
    assert math.isinf(taken["slow"].noise)
    assert paired_ratio(taken["slow"], taken["fast"])[1] == pytest.approx(500)


def test_hopeless_one_stops_after_its_first_turn(clock: Clock) -> None:
    calls = {str(t): [clock.taking(t)] for t in (0.010, 0.012, 0.5)}
    taken = interleave(calls, Limits(noise=0.01, seconds=10, least_rounds=11))
    assert len(taken["0.5"].seconds) == 1
    assert len(taken["0.01"].seconds) == len(taken["0.012"].seconds) == 11


def test_one_that_is_much_slower_but_quick_goes_on(clock: Clock) -> None:
    calls = {str(t): [clock.taking(t)] for t in (0.001, 0.0012, 0.005)}
    taken = interleave(calls, Limits(noise=0.01, seconds=100, least_rounds=11))
    assert {len(one.seconds) for one in taken.values()} == {11}


def test_there_is_a_spread_even_past_the_time_limit(clock: Clock) -> None:
    taken = interleave({"a": [clock.taking(5.0)]}, Limits(seconds=1))
    assert len(taken["a"].seconds) == 3


def test_long_calls_need_none_before_them(clock: Clock) -> None:
    log: list[float] = []
    calls = {"a": [clock.taking(0.1, log=log)]}
    taken = interleave(calls, Limits(noise=0.01, seconds=100, least_rounds=11))
    assert len(log) == 2 + len(taken["a"].seconds)  # to warm up, and to see that that was not why


def test_other_threads_are_given_time_to_sleep(clock: Clock) -> None:
    calls = {name: [clock.taking(0.001)] for name in ("a", "b")}
    limits = Limits(noise=0.01, seconds=100, least_rounds=11)
    interleave(calls, limits, pools={"a": "one", "b": "one"})
    together = clock.slept
    interleave(calls, limits, pools={"a": "one", "b": "other"})
    assert clock.slept - together > together


@pytest.mark.parametrize("told", [True, False])
def test_settling_waits_until_the_process_is_idle(
    monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    now, busy_until = 0.0, 0.05

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(timing.time, "sleep", sleep)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    # Where states of threads are told, they decide, and a clock that stands still does not.
    running = (lambda: 1 + (now < busy_until)) if told else lambda: None
    monkeypatch.setattr(timing.threads, "running", running)
    used = (lambda: 0.0) if told else lambda: min(now, busy_until)
    monkeypatch.setattr(timing.time, "process_time", used)
    assert timing.settle() == pytest.approx(0.05, abs=0.002)
    busy_until = 1e9
    assert timing.settle() < 1


def test_order_is_random_but_repeatable(clock: Clock) -> None:
    def order(seed: int) -> list[float]:
        log: list[float] = []
        calls = {str(t): [clock.taking(t, log=log)] for t in (0.001, 0.002, 0.004)}
        interleave(calls, Limits(seconds=1000), seed=seed)
        return log

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_rotation_gives_every_copy_its_turn(clock: Clock) -> None:
    log: list[float] = []
    copies = [clock.taking(t, log=log) for t in (0.0010, 0.0011, 0.0012, 0.0013)]
    taken = interleave({"a": copies}, Limits(noise=0.5, seconds=100, least_rounds=12))
    # One call a sample, none before it: the copies come round evenly.
    assert taken["a"].calls == 1
    assert set(Counter(log).values()) == {3}
    assert log[:5] == [0.0010, 0.0011, 0.0012, 0.0013, 0.0010]


def test_garbage_collection_is_off_and_comes_back(clock: Clock) -> None:
    seen: set[bool] = set()
    tick = clock.taking(0.001)

    def call() -> None:
        seen.add(gc.isenabled())
        tick()

    assert gc.isenabled()
    interleave({"a": [call]}, Limits())
    assert seen == {False}
    assert gc.isenabled()


def test_failure_in_a_call_is_not_hidden() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interleave({"a": [fail]}, Limits())
    assert gc.isenabled()


def test_median_noise_covers_the_median() -> None:
    """The interval is a 95 % one: it misses the true median in about a twentieth of the runs."""
    rng = np.random.default_rng(1)
    missed = 0
    for _ in range(400):
        values = rng.lognormal(0, 0.3, 40)
        half = median_noise(values) * np.median(values)
        missed += abs(np.median(values) - 1.0) > half
        assert median_noise(values * 7) == pytest.approx(median_noise(values))
    assert 0.01 < missed / 400 < 0.09


def test_median_noise_needs_eight_samples() -> None:
    assert math.isinf(median_noise(np.arange(1.0, 8.0)))
    assert math.isfinite(median_noise(np.arange(1.0, 9.0)))


def test_paired_ratio_drops_what_both_share() -> None:
    drift = np.array([1.0, 5.0, 2.0, 9.0, 3.0])
    assert paired_ratio(samples(*(3 * drift)), samples(*drift)) == pytest.approx((3, 3, 3))
    assert quantiles(np.arange(11.0)) == (1.0, 5.0, 9.0)


def test_bad_limits_are_told() -> None:
    for name in ("noise", "seconds", "least_rounds", "most_rounds"):
        with pytest.raises(ValueError, match=f"{name} is 0; it must be above 0"):
            Limits(**{name: 0})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nothing to time"):
        interleave({}, Limits())


def test_whole_rounds_go_on_past_the_time_limit_and_no_further_than_asked(clock: Clock) -> None:
    calls = {"slow": [clock.taking(5.0)] * 2, "fast": [clock.taking(0.001)] * 2}
    limits = Limits(noise=1e-9, seconds=1, least_rounds=7, most_rounds=40, whole=True)
    taken = interleave(calls, limits)
    assert {name: len(one.seconds) for name, one in taken.items()} == {"slow": 7, "fast": 7}
    calls = {"a": [clock.taking(0.001)] * 2}
    taken = interleave(calls, replace(limits, seconds=100))
    assert len(taken["a"].seconds) == 40


def test_another_process_tells_its_own_seconds(clock: Clock) -> None:
    asked: list[int] = []

    def remote_call(index: int) -> RemoteCall:
        def seconds() -> float:
            asked.append(index)
            clock.now += 9.0
            return 0.25

        return RemoteCall(seconds)

    limits = Limits(noise=1e-9, seconds=1, least_rounds=4, whole=True)
    taken = interleave({"there": [remote_call(0), remote_call(1)]}, limits)
    assert list(taken["there"].seconds) == [0.25] * 4
    assert asked == [0, 1, 0, 1]


def test_a_first_call_that_compiles_does_not_shorten_the_samples(clock: Clock) -> None:
    """Nor does the second: both may take milliseconds, where later ones take microseconds."""
    called = 0

    def call() -> None:
        nonlocal called
        called += 1
        clock.now += {1: 25e-3, 2: 8e-3}.get(called, 1e-6)

    assert timing._calls_per_sample([call]) > 50
