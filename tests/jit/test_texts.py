"""What a kernel text can say, compiled and interpreted: both backends must agree to the bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lowbit.isa import available
from lowbit.isa.generic import maximum, minimum, select
from lowbit.isa.types import (
    F32Pointer,
    Int,
    S32Pointer,
    U8Pointer,
    Vector,
    f32,
    s8,
    s32,
    s64,
    u8,
    u16,
    u32,
)
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel

RunBoth = Callable[..., dict[str, np.ndarray]]

POISON = 0x5A5A5A5A


@kernel
def nested_loops(
    k: Builder, out: S32Pointer, rows: Int, columns: Int, first: Int, step: Int
) -> None:
    """Two loops, the inner one's bounds made of the outer's index, and a variable through both."""
    count = k.register(k.constant(0, s32))
    for i in k.range(0, rows):
        for j in k.range(first + i, columns, step):
            (out + (i * columns + j)).store((i * 100 + j).to(s32) + count.value * 10_000)
            count.value = count.value + 1
    (out + rows * columns).store(count.value)


@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize(
    "sizes",
    [(3, 7, 0, 2), (1, 1, 0, 1), (0, 5, 0, 1), (4, 0, 0, 1), (2, 5, 5, 1), (3, 9, 2, 100)],
    ids=str,
)
def test_loops(run_both: RunBoth, isa: str, sizes: tuple[int, int, int, int]) -> None:
    rows, columns, first, step = sizes
    expected = np.full(rows * columns + 1, POISON, np.int32)
    count = 0
    for i in range(rows):
        for j in range(first + i, columns, step):
            expected[i * columns + j] = i * 100 + j + count * 10_000
            count += 1
    expected[-1] = count
    start = np.full(rows * columns + 1, POISON, np.int32)
    arguments = {"out": start, "rows": rows, "columns": columns, "first": first, "step": step}
    # Every thread runs what is outside of parallel regions, so one alone is asked.
    result = run_both(nested_loops, arguments, isa=isa, threads=(1,))
    np.testing.assert_array_equal(result["out"], expected)


@kernel
def loop_from_negative(k: Builder, out: S32Pointer, start: Int, stop: Int) -> None:
    """Visit start to stop, both of which may be negative, and add up the indices."""
    total = k.register(k.constant(0, s32))
    for i in k.range(start, stop, 3):
        total.value = total.value + i.to(s32)
    out.store(total.value)


@pytest.mark.parametrize(("start", "stop"), [(-7, 8), (-9, -2), (5, 5), (5, -5), (0, 1)])
def test_loop_bounds_are_signed(run_both: RunBoth, start: int, stop: int) -> None:
    arguments = {"out": np.full(1, POISON, np.int32), "start": start, "stop": stop}
    result = run_both(loop_from_negative, arguments, threads=(1,))
    assert result["out"][0] == sum(range(start, stop, 3))


@kernel
def sorted_pairs(k: Builder, out: S32Pointer, flags: S32Pointer, n: Int) -> None:
    """Swap neighbours that are out of order, one branch inside another."""
    swaps = k.register(k.constant(0, s32))
    for i in k.range(0, n):
        left, right = (out + i * 2).load(), (out + (i * 2 + 1)).load()
        for _ in k.when(left > right):
            (out + i * 2).store(right)
            (out + (i * 2 + 1)).store(left)
            swaps.value = swaps.value + 1
            for _ in k.when(right < 0):
                (flags + i).store(swaps.value)
    (flags + n).store(swaps.value)


def test_when(run_both: RunBoth) -> None:
    rng = np.random.default_rng(0)
    pairs = rng.integers(-50, 50, (20, 2)).astype(np.int32)
    result = run_both(
        sorted_pairs,
        {"out": pairs.copy(), "flags": np.full(21, POISON, np.int32), "n": 20},
        threads=(1,),
    )
    np.testing.assert_array_equal(result["out"], np.sort(pairs, axis=1))
    swapped = pairs[:, 0] > pairs[:, 1]
    flags = np.where(swapped & (pairs[:, 1] < 0), np.cumsum(swapped), POISON)
    np.testing.assert_array_equal(result["flags"], [*flags, swapped.sum()])


def _arithmetic(x: Value, y: Value) -> list[Value]:
    return [
        x + 3, 3 + x, x - 3, 3 - x, x * 5, 5 * x, x & 6, x | 6, x ^ 6, x << 2, x >> 2,
        x + y, x - y, x * y, x & y, x | y, x ^ y,
        select(x < 10, x, y), select(x > 10, x, y), select(x.equals(y), x, y),
        select(x < y, x, y), select(x > y, x, y), minimum(x, y), maximum(x, y),
    ]  # fmt: skip


def _expected(x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    return [
        x + 3, 3 + x, x - 3, 3 - x, x * 5, 5 * x, x & 6, x | 6, x ^ 6, x << 2, x >> 2,
        x + y, x - y, x * y, x & y, x | y, x ^ y,
        np.where(x < 10, x, y), np.where(x > 10, x, y), np.where(x == y, x, y),
        np.where(x < y, x, y), np.where(x > y, x, y), np.minimum(x, y), np.maximum(x, y),
    ]  # fmt: skip


@kernel
def integer_vectors(k: Builder, x: S32Pointer, y: S32Pointer, out: S32Pointer) -> None:
    """Every operator on eight lanes."""
    for number, value in enumerate(_arithmetic(x.load(8), y.load(8))):
        (out + number * 8).store(value)


@kernel
def integer_scalars(k: Builder, x: S32Pointer, y: S32Pointer, out: S32Pointer, n: Int) -> None:
    """Every operator on one number after another."""
    for i in k.range(0, n):
        for number, value in enumerate(_arithmetic((x + i).load(), (y + i).load())):
            (out + (i + number * 8)).store(value)


@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize("lanes", [8, 1])
def test_integers_and_constants_mix(run_both: RunBoth, isa: str, lanes: int) -> None:
    rng = np.random.default_rng(1)
    x = rng.integers(-(2**31), 2**31, 8).astype(np.int32)
    y = rng.integers(-(2**31), 2**31, 8).astype(np.int32)
    x[:4], y[:4] = [-(2**31), 2**31 - 1, 10, 0], [2**31 - 1, -(2**31), 10, -1]
    expected = _expected(x, y)
    arguments = {"x": x, "y": y, "out": np.full((len(expected), 8), POISON, np.int32)}
    if lanes == 8:
        result = run_both(integer_vectors, arguments, isa=isa, threads=(1,))
    else:
        result = run_both(integer_scalars, {**arguments, "n": 8}, isa=isa, threads=(1,))
    np.testing.assert_array_equal(result["out"], expected)


@kernel
def float_vectors(k: Builder, x: F32Pointer, y: F32Pointer, out: F32Pointer) -> None:
    """Float arithmetic with constants on either side."""
    a, b = x.load(4), y.load(4)
    values = [a + 0.1, 0.1 - a, a * 3, 1.0 / a, a / 3.0, a * b - 1.0, a / b, 2 * a - b]
    for number, value in enumerate(values):
        (out + number * 4).store(value)


@pytest.mark.parametrize("isa", available())
def test_floats_round_once_and_are_never_fused(run_both: RunBoth, isa: str) -> None:
    one, two, three, tenth = (np.float32(value) for value in (1, 2, 3, 0.1))
    x = np.array([1.0000004, -3.3333333, 16777216.0, 1e-30], np.float32)
    y = np.array([1.0000004, 7.7777777, 0.33333334, 1e-10], np.float32)
    result = run_both(
        float_vectors,
        {"x": x, "y": y, "out": np.full((8, 4), np.nan, np.float32)},
        isa=isa,
        threads=(1,),
    )
    expected = [
        x + tenth,
        tenth - x,
        x * three,
        one / x,
        x / three,
        x * y - one,
        x / y,
        two * x - y,
    ]
    np.testing.assert_array_equal(result["out"], expected)
    fused = (x.astype(np.float64) * y - 1).astype(np.float32)
    assert (fused != expected[5]).any(), "the data must tell a fused operation from two"


@kernel
def index_arithmetic(k: Builder, out: S32Pointer, a: Int, b: Int) -> None:
    """Quotients and remainders of sizes."""
    for number, value in enumerate([a // b, a % b, a // 7, a % 7, (a + b - 1) // b, a - b, 5 - a]):
        (out + number).store(value.to(s32))


@pytest.mark.parametrize(("a", "b"), [(0, 1), (17, 4), (16, 4), (3, 100), (10**6, 7)])
def test_sizes_divide(run_both: RunBoth, a: int, b: int) -> None:
    arguments = {"out": np.full(7, POISON, np.int32), "a": a, "b": b}
    result = run_both(index_arithmetic, arguments, threads=(1,))
    assert result["out"].tolist() == [a // b, a % b, a // 7, a % 7, -(-a // b), a - b, 5 - a]


@kernel
def cast_pointers(k: Builder, x: U8Pointer, out: U8Pointer, n: Int) -> None:
    """Reverse the words of x; steps count elements of whatever the pointer points to."""
    words, reverse = x.cast(u32), out.cast(u32)
    for i in k.range(0, n):
        (reverse + (n - 1 - i)).store((words + i).load())
    (out.cast(u16) + 2 * n).store((x.cast(u16) + 1).load())
    (out + (4 * n + 2)).cast(s32).store((x + 1).cast(s32).load())


def test_pointers_under_another_type(run_both: RunBoth) -> None:
    x = np.arange(1, 21, dtype=np.uint8)
    result = run_both(cast_pointers, {"x": x, "out": np.zeros(26, np.uint8), "n": 5}, threads=(1,))[
        "out"
    ]
    np.testing.assert_array_equal(result[:20].view(np.uint32), x.view(np.uint32)[::-1])
    np.testing.assert_array_equal(result[20:], [3, 4, 2, 3, 4, 5])


@kernel
def through_local_memory(k: Builder, x: S32Pointer, out: S32Pointer, n: Int) -> None:
    """Transpose 4x4 blocks through scratch memory, of which each thread has its own."""
    scratch = k.local(s32, 16)
    words = k.local(u8, 16)
    for item in k.parallel(n):
        for row in range(4):
            (scratch + row * 4).store((x + (item * 16 + row * 4)).load(4))
        for row in k.range(0, 4):
            for column in range(4):
                words.cast(s32).store((scratch + (row + column * 4)).load())
                (out + (item * 16 + row * 4 + column)).store(words.cast(s32).load())


def test_local_memory_belongs_to_a_thread(run_both: RunBoth) -> None:
    x = np.random.default_rng(2).integers(-(2**31), 2**31, (500, 4, 4)).astype(np.int32)
    arguments = {"x": x, "out": np.zeros_like(x), "n": len(x)}
    result = run_both(through_local_memory, arguments, threads=(1, 2, 4))
    np.testing.assert_array_equal(result["out"], x.transpose(0, 2, 1))


@kernel
def conversions(k: Builder, x: S32Pointer, out: S32Pointer, floats: F32Pointer) -> None:
    """Narrow, widen by either sign, reinterpret, and to float and back."""
    value = x.load(8)
    (out + 0).store(value.to(u8).to(s32))
    (out + 8).store(value.to(s8).to(s32))
    (out + 16).store(value.to(u16).to(s32))
    (out + 24).store(value.bits(Vector(u32, 8)).to(f32).bits(Vector(s32, 8)))
    (out + 32).store((value >> 8).to(f32).to(s32))
    floats.store(value.to(f32))
    (floats + 8).store(x.load().to(s64).to(f32).splat(8))


def test_conversions(run_both: RunBoth) -> None:
    x = np.array([-(2**31), 2**31 - 1, -1, 0, 255, 128, -129, 16777217], np.int32)
    out, floats = np.full((5, 8), POISON, np.int32), np.zeros((2, 8), np.float32)
    result = run_both(conversions, {"x": x, "out": out, "floats": floats}, threads=(1,))
    expected = [
        x.astype(np.uint8), x.astype(np.int8), x.astype(np.uint16),
        x.view(np.uint32).astype(np.float32).view(np.int32), x >> 8,
    ]  # fmt: skip
    np.testing.assert_array_equal(result["out"], [e.astype(np.int32) for e in expected])
    np.testing.assert_array_equal(result["floats"], [x.astype(np.float32), [-(2.0**31)] * 8])
