"""The interpreting backend: what may be touched, and what is told about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lowbit.isa import GENERIC
from lowbit.isa.generic import load_head, store_head
from lowbit.isa.types import Int, S32Pointer, U8Pointer, s32, u8, u32
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.jit.memory import Access, OutOfBoundsError

RunBoth = Callable[..., dict[str, np.ndarray]]


@kernel
def read(k: Builder, x: U8Pointer, at: Int, *, lanes: int) -> None:
    """Load once, `at` bytes from the start."""
    (x + at).load(lanes)


@kernel
def write(k: Builder, x: U8Pointer, at: Int, *, lanes: int) -> None:
    """Store zeros once, `at` bytes from the start."""
    (x + at).store(k.zeros(u8, lanes))


ACCESSES = pytest.mark.parametrize("access", [read, write], ids=lambda text: text.name)


def _allowed(array: np.ndarray, access: Any, lanes: int) -> set[int]:
    """Offsets from 40 bytes before the array's first element to 40 behind that may be touched."""
    good = set()
    for at in range(-40, 40):
        try:
            access.interpret(GENERIC, {"x": array, "at": at}, lanes=lanes)
        except OutOfBoundsError:
            continue
        good.add(at)
    return good


@ACCESSES
def test_bounds_of_a_contiguous_array(access: Any) -> None:
    around = np.zeros(100, np.uint8)
    assert _allowed(around[40:60], access, lanes=1) == set(range(20))
    assert _allowed(around[40:60], access, lanes=8) == set(range(13))
    assert _allowed(around[40:40], access, lanes=1) == set()


@ACCESSES
def test_gaps_between_the_rows_of_a_slice(access: Any) -> None:
    rows = np.zeros((5, 10), np.uint8)[1:4, 2:6]
    assert _allowed(rows, access, lanes=1) == {10 * r + c for r in range(3) for c in range(4)}
    assert _allowed(rows, access, lanes=3) == {10 * r + c for r in range(3) for c in range(2)}


@ACCESSES
def test_elements_that_lie_before_the_first(access: Any) -> None:
    reverse = np.zeros((4, 6), np.uint8)[::-1, ::-2]
    assert _allowed(reverse, access, lanes=1) == {
        -6 * r - 2 * c for r in range(4) for c in range(3)
    }


@ACCESSES
def test_bytes_of_wider_elements(access: Any) -> None:
    every_other = np.zeros(6, np.int32)[::2]
    bytes_of_three = {8 * i + b for i in range(3) for b in range(4)}
    assert _allowed(every_other, access, lanes=1) == bytes_of_three
    assert _allowed(every_other, access, lanes=4) == {0, 8, 16}


def test_a_broadcast_array_is_one_row() -> None:
    row = np.arange(6, dtype=np.uint8)
    assert _allowed(np.broadcast_to(row, (1000, 6)), read, lanes=1) == set(range(6))


def test_what_is_read_only_stays_as_it_is() -> None:
    array = np.arange(4, dtype=np.uint8)
    array.flags.writeable = False
    read.interpret(GENERIC, {"x": array, "at": 1}, lanes=2)
    with pytest.raises(OutOfBoundsError, match="store to x, which is only read"):
        write.interpret(GENERIC, {"x": array, "at": 1}, lanes=2)
    assert array.tolist() == [0, 1, 2, 3]


def test_a_refused_store_writes_nothing() -> None:
    around = np.full(30, 7, np.uint8)
    with pytest.raises(
        OutOfBoundsError, match=r"store of 4 bytes at byte 8 of x, .* \(10,\) uint8"
    ):
        write.interpret(GENERIC, {"x": around[10:20], "at": 8}, lanes=4)
    assert (around == 7).all()


def test_a_pointer_that_is_not_used_may_be_none() -> None:
    with pytest.raises(OutOfBoundsError, match="load of 1 bytes at byte 0 of x"):
        read.interpret(GENERIC, {"x": None, "at": 0}, lanes=0)


@kernel
def heads(k: Builder, x: S32Pointer, out: S32Pointer, count: Int) -> None:
    """The first `count` of eight lanes, loaded and stored."""
    store_head(load_head(x, count, 8) + 1, out, count)


@pytest.mark.parametrize("count", [0, 1, 5, 8])
def test_the_lanes_of_a_head_are_all_that_is_touched(run_both: RunBoth, count: int) -> None:
    """The array holds just the head: a lane more would be out of bounds."""
    x, trace = np.arange(1, count + 1, dtype=np.int32), []
    out = np.full(count, 9, np.int32)
    heads.interpret(GENERIC, {"x": x, "out": out, "count": count}, trace)
    np.testing.assert_array_equal(out, x + 1)
    loads = [Access("load", "x", 0, 4 * count), Access("store", "out", 0, 4 * count)]
    assert trace == (loads if count else [])
    wide = {"x": np.arange(8, dtype=np.int32), "out": np.full(8, 9, np.int32), "count": count}
    result = run_both(heads, wide, threads=(1,))
    np.testing.assert_array_equal(result["out"], [*range(1, count + 1), *[9] * (8 - count)])


@kernel
def uneven(k: Builder, x: U8Pointer, out: S32Pointer, n: Int) -> None:
    """Accesses of several kinds and sizes."""
    for i in k.range(0, n):
        for _ in k.when(i > 0):
            word = (x + i * 4).cast(u32).load()
            (out + i).cast(u32).store(word + 1)
    k.local(s32, 4).store(k.zeros(s32, 4))


def test_the_trace_tells_every_access_in_order() -> None:
    """Those of scratch memory are among them."""
    trace: list[Access] = []
    x = np.arange(24, dtype=np.uint8).reshape(2, 12)[:, ::-1]
    out = np.zeros(3, np.int32)
    machine = uneven.interpret(GENERIC, {"x": x[:, ::-1], "out": out, "n": 3}, trace)
    assert trace == [
        Access("load", "x", 4, 4),
        Access("store", "out", 4, 4),
        Access("load", "x", 8, 4),
        Access("store", "out", 8, 4),
        Access("store", "local", 0, 16),
    ]
    # i > 0 three times; i·4, the load, the sum and the store twice; and the store at the end.
    assert machine.executed == {"lt": 3, "mul": 2, "load": 2, "add": 2, "store": 3}
    assert out.tolist() == [0, 0x07060505, 0x0B0A0909]


def test_without_a_trace_nothing_is_kept() -> None:
    machine = read.interpret(GENERIC, {"x": np.zeros(8, np.uint8), "at": 0}, lanes=8)
    assert machine.trace is None
    assert machine.executed == {"load": 1}


@kernel
def reads_what_nobody_wrote(k: Builder, out: S32Pointer) -> None:
    """Scratch memory is undefined at first."""
    out.store(k.local(s32, 1).load())


def test_scratch_memory_is_poisoned() -> None:
    out = np.zeros(1, np.int32)
    reads_what_nobody_wrote.interpret(GENERIC, {"out": out})
    assert out.view(np.uint8).tolist() == [0xA5] * 4
