"""Parallel regions: every item once, regions in order, the same bytes for any number of threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from lowbit.isa import GENERIC
from lowbit.isa.types import Int, S32Pointer, s32
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel

RunBoth = Callable[..., dict[str, np.ndarray]]

THREADS = (1, 2, 3, 4, 5, 6, 7, 8)


@kernel
def prefix_and_mirror(
    k: Builder, x: S32Pointer, sums: S32Pointer, out: S32Pointer, n: Int, items: Int
) -> None:
    """Three regions, each of which reads what all items of the one before have written.

    sums[i] = x[i]²; x[i] = sums[i] + sums[n-1-i]; out[i] = Σ_{j ≤ i} x[j].
    """
    for i in k.parallel(n):
        value = (x + i).load()
        (sums + i).store(value * value)
    for i in k.parallel(n):
        (x + i).store((sums + i).load() + (sums + (n - 1 - i)).load())
    for i in k.parallel(items):
        total = k.register(k.constant(0, s32))
        for j in k.range(0, i + 1):
            total.value = total.value + (x + j).load()
        (out + i).store(total.value)


def _expected(x: np.ndarray) -> np.ndarray:
    squares = x * x
    return np.cumsum(squares + squares[::-1], dtype=np.int32)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 100])
def test_regions_run_in_order(run_both: RunBoth, n: int) -> None:
    x = np.random.default_rng(n).integers(-100, 100, n).astype(np.int32)
    arguments = {"x": x, "sums": np.zeros_like(x), "out": np.zeros_like(x), "n": n, "items": n}
    result = run_both(prefix_and_mirror, arguments, threads=THREADS)
    np.testing.assert_array_equal(result["out"], _expected(x))


@pytest.mark.parametrize(("n", "items"), [(0, 0), (5, 0), (0, 1)])
def test_a_region_without_items(run_both: RunBoth, n: int, items: int) -> None:
    x = np.arange(1, 6, dtype=np.int32)
    out = np.full(5, 77, np.int32)
    arguments = {"x": x, "sums": np.zeros_like(x), "out": out, "n": n, "items": items}
    result = run_both(prefix_and_mirror, arguments, threads=THREADS)
    expected = [1] + [77] * 4 if items else [77] * 5
    assert result["out"].tolist() == expected


@kernel
def count_items(k: Builder, out: S32Pointer, n: Int) -> None:
    """Add one to the place of each item, twice."""
    for _ in range(2):
        for i in k.parallel(n):
            (out + i).store((out + i).load() + 1)


@pytest.mark.parametrize("n", [0, 1, 3, 8, 1000])
def test_every_item_is_done_once(n: int) -> None:
    program = count_items.program(GENERIC)
    for threads in (*THREADS, 33):
        out = np.zeros(n + 1, np.int32)
        program(threads, out.ctypes.data, n)
        assert (out[:n] == 2).all(), threads
        assert out[n] == 0


@kernel
def note_threads(
    k: Builder, owner: S32Pointer, holds: S32Pointer, found: S32Pointer, n: Int
) -> None:
    """Write of each item which thread took it; and what the thread's place holds some time after it
    wrote the item there. In items only: a thread may come when the call has returned."""
    mine = k.thread()
    for i in k.parallel(n):
        (holds + mine).store(i.to(s32))
        mixed = k.register(i.to(s32))
        for _ in k.range(0, 300):  # long enough for others to come
            mixed.value = mixed.value * 1664525 + 1013904223
        (found + i).store(mixed.value)
        (found + i).store((holds + mine).load())
        (owner + i).store(mine.to(s32))


@pytest.mark.parametrize("threads", [1, 2, 3, 16, 17, 64, 65, 130])
def test_threads_have_numbers_of_their_own(threads: int) -> None:
    n = 20_000
    program = note_threads.program(GENERIC)
    for _ in range(5):
        owner, found = np.full(n, -1, np.int32), np.full(n, -1, np.int32)
        holds = np.zeros(threads, np.int32)
        program(threads, owner.ctypes.data, holds.ctypes.data, found.ctypes.data, n)
        assert owner.min() >= 0
        assert owner.max() < threads
        assert (found == np.arange(n)).all()


def test_the_same_bytes_always() -> None:
    """Many runs with changing numbers of threads, from several Python threads at once."""
    x = np.random.default_rng(9).integers(-1000, 1000, 64).astype(np.int32)
    program = prefix_and_mirror.program(GENERIC)

    def run(threads: int) -> bytes:
        a, sums, out = x.copy(), np.zeros_like(x), np.zeros_like(x)
        program(threads, a.ctypes.data, sums.ctypes.data, out.ctypes.data, len(x), len(x))
        return out.tobytes()

    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(run, [1 + i % 5 for i in range(300)]))
    assert found == {_expected(x).tobytes()}


@kernel
def regions_between_code(k: Builder, out: S32Pointer, n: Int, *, offset: int) -> None:
    """What stands between regions runs in every thread, and sees its own variables only."""
    base = k.register(k.constant(offset, s32))
    for i in k.parallel(n):
        (out + i).store(base.value + i.to(s32))
    base.value = base.value * 3
    for _ in k.range(0, n):
        base.value = base.value + 1
    for i in k.parallel(n):
        (out + (n + i)).store((out + i).load() + base.value)


@pytest.mark.parametrize("offset", [0, 5])
def test_variables_from_outside_are_read_in_regions(run_both: RunBoth, offset: int) -> None:
    arguments = {"out": np.zeros(40, np.int32), "n": 20}
    result = run_both(regions_between_code, arguments, threads=THREADS, offset=offset)
    first = offset + np.arange(20)
    np.testing.assert_array_equal(result["out"], [*first, *(first + 3 * offset + 20)])
