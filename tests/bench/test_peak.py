"""The measured limits: that what is timed does what is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lowbit import isa
from lowbit.isa import named
from lowbit.kernels.cpu.shared import peak as kernels
from lowbit_lab.bench.core import peak
from lowbit_lab.bench.core.table import limits_line

OWN = [name for name, way in kernels.WAYS.items() if not named(way.isa).missing()]
ROUNDS, ITEMS = 3, 2


def arguments(seed: int = 0) -> dict[str, Any]:
    values = np.random.default_rng(seed).integers(0, 256, kernels.OPERAND_BYTES, dtype=np.uint8)
    out = np.full(ITEMS * kernels.OUT_BYTES // 4, 7, np.int32)
    return {"values": values, "out": out, "rounds": ROUNDS, "items": ITEMS}


@pytest.mark.parametrize("way", OWN)
def test_compiled_and_interpreted_agree(way: str) -> None:
    one = named(kernels.WAYS[way].isa)
    meant, made = arguments(), arguments()
    kernels.multiply.interpret(one, meant, way=way)
    addresses = [made[name].ctypes.data for name in ("values", "out")]
    kernels.multiply.program(one, way=way)(1, *addresses, ROUNDS, ITEMS)
    np.testing.assert_array_equal(made["out"], meant["out"])


@pytest.mark.parametrize("way", ["vpdpbusd zmm", "vpdpbusd ymm", "tdpbusd", "sdot"])
def test_products_are_as_many_as_counted(way: str) -> None:
    """With ones on both sides, every product adds one to one of the sums."""
    given = arguments()
    given["values"][:] = 1
    kernels.multiply.interpret(named(kernels.WAYS[way].isa), given, way=way)
    sums = given["out"].reshape(ITEMS, -1)
    stored = sums[0][sums[0] != 7].sum(dtype=np.int64)
    # Tiles are not added up in the end: one of them is stored.
    all_sums = stored * (kernels.WAYS[way].accumulators if way == "tdpbusd" else 1)
    assert all_sums == ROUNDS * kernels.products_of(way)


def test_every_instruction_set_has_a_way_or_falls_back_to_one() -> None:
    for one in isa.SETS.values():
        served, ways = peak._ways(one)
        assert served in isa.chain(one)
        assert ways
        assert all(kernels.WAYS[way].isa == served.name for way in ways)


@pytest.mark.parametrize("name", isa.available())
def test_read_reads_every_byte_and_no_other(name: str) -> None:
    """A bit that is set anywhere shows up in the or of its chunk; beside it memory is guarded."""
    chunk, chunks = 2 * kernels.READ_STEP, 3
    width = named(name).vector_bytes
    for position in np.random.default_rng(1).integers(0, chunk * chunks, 20):
        source = np.zeros(chunk * chunks, np.uint8)
        source[position] = 0x40
        out = np.full(64 * chunks, 7, np.uint8)
        given = {"source": source, "out": out, "chunk": chunk, "chunks": chunks, "repeats": 2}
        kernels.read.interpret(named(name), given)
        seen = out.reshape(chunks, 64)[:, :width]
        assert [bool(row.any()) for row in seen] == [i == position // chunk for i in range(chunks)]
        assert seen.max() == 0x40


@pytest.mark.deep("2")
@pytest.mark.parametrize("threads", [1, 2])
def test_measured_limits(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = {"L1d": 1 << 12, "L2": 1 << 13, "L3": 1 << 14}
    monkeypatch.setattr(peak.host, "caches", lambda: caches)
    monkeypatch.setattr(peak, "_PATIENCE_SECONDS", 0.0)  # whoever else uses the cores
    ceiling = peak.measure("generic", threads)
    assert ceiling.isa == "generic"
    assert ceiling.threads == threads
    assert ceiling.gops == max(ceiling.ways.values()) == ceiling.ways[ceiling.way]
    assert 0 < ceiling.gops_median <= ceiling.gops
    assert list(ceiling.read_gbs) == ["L1d", "L2", "L3", "memory"]
    assert all(rate > 0 for rate in ceiling.read_gbs.values())
    assert not peak.measure("generic", threads, reads=False).read_gbs


class Busy:
    """A machine whose cores others use too: every call of a kernel that runs for `round_seconds` a
    round and thread waits for `waiting` seconds on one of its threads, while the others spin."""

    def __init__(self, round_seconds: float, waiting: Callable[[int], float]) -> None:
        self.round_seconds, self.waiting = round_seconds, waiting
        self.passed = self.ran = 0.0
        self.calls: list[tuple[int, int]] = []

    def sampled(self, threads: int) -> peak._Rates:
        """Measured by its own clock, 3000 operations a round."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(peak.time, "perf_counter", lambda: self.passed)
            patch.setattr(peak.time, "process_time", lambda: self.ran)
            patch.setattr(peak.time, "sleep", self.sleep)
            return peak._sampled(self, 3000, threads)

    def sleep(self, seconds: float) -> None:
        self.passed += seconds

    def __call__(self, threads: int, rounds: int) -> None:
        working = rounds * self.round_seconds / threads
        waiting = self.waiting(len(self.calls))
        self.calls.append((threads, rounds))
        self.passed += working + waiting
        self.ran += threads * working + (threads - 1) * waiting


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_waiting_for_a_core_does_not_count(threads: int) -> None:
    """What is measured while every second call waits 10,000 times longer than a round takes is
    what a quiet machine gives, and the samples are as long as those on a quiet machine."""
    quiet, busy = Busy(1e-6, lambda _: 0.0), Busy(1e-6, lambda call: 10e-3 * (call % 2))
    meant, made = (one.sampled(threads) for one in (quiet, busy))
    assert not made.disturbed
    assert made.rates.max() == pytest.approx(3000 * threads / 1e-6 / 1e9)
    assert meant.rates.max() == pytest.approx(made.rates.max())
    assert busy.calls[-1] == quiet.calls[-1]
    assert busy.calls[-1][1] * 1e-6 / threads >= 2e-3


def test_one_thread_that_always_waits_is_measured_all_the_same() -> None:
    busy = Busy(1e-6, lambda _: 4e-3)
    found = busy.sampled(1)
    assert not found.disturbed
    assert found.rates == pytest.approx(3000 / 1e-6 / 1e9)


def test_several_threads_of_which_one_always_waits_say_so() -> None:
    """Their rate is a lower bound of a useful size, not one of a single round."""
    busy = Busy(1e-6, lambda _: 4e-3)
    found = busy.sampled(2)
    assert found.disturbed
    assert 0.3 * 6 < found.rates.max() < 6
    assert busy.passed < 5


def test_no_share_of_a_peak_that_was_not_measured_well(monkeypatch: pytest.MonkeyPatch) -> None:
    def rates(isa: object, way: str, threads: int) -> peak._Rates:
        return peak._Rates(np.array([3.0, 4.0]), threads == 2)

    monkeypatch.setattr(peak, "_product_rates", rates)
    one, two = (peak.measure("generic", threads, reads=False) for threads in (1, 2))
    assert (one.gops, one.disturbed, one.share(3)) == (4.0, (), 0.75)
    assert (two.gops, two.disturbed, two.share(3)) == (4.0, (peak.PRODUCTS,), None)
    assert "not measured well" not in str(limits_line(one))
    assert "4.00 GOP/s" in str(limits_line(two))
    assert "at least that much of int8: not measured well" in str(limits_line(two))


def test_no_share_is_above_one() -> None:
    ceiling = peak.Ceiling("generic", 1, "madd16", 100.0, 99.0, {})
    assert [ceiling.share(gops) for gops in (50, 104, 106, 238768)] == [0.5, 1.0, None, None]


def test_reader_rounds_up() -> None:
    one = isa.get("generic")
    assert peak.Reader(one, 1, 1).nbytes == kernels.READ_STEP
    assert peak.Reader(one, 10_000_000, 2).nbytes >= 10_000_000


def test_bad_arguments_are_told() -> None:
    with pytest.raises(ValueError, match="threads is 0"):
        peak.measure("generic", 0)
    with pytest.raises(ValueError, match="known: amx"):
        peak.measure("mmx", 1)
