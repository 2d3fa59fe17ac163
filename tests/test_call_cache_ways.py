"""Which calls become known, and until when."""

from __future__ import annotations

import gc
import pickle
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from cached_calls import (
    BYTES,
    FLOATS,
    RNG,
    K,
    M,
    N,
    in_python,
    int8,
    prepared_twice,
    refused,
)

import lowbit
from lowbit import api
from lowbit.product import call_cache


def test_what_is_known_goes_with_the_operand() -> None:
    b, call = prepared_twice()
    held, known = weakref.ref(b), len(api._scaled._ways)
    del b, call
    gc.collect()
    assert held() is None
    assert len(api._scaled._ways) == known - 1


@pytest.mark.deep
def test_sizes_that_vary_all_become_known(monkeypatch: pytest.MonkeyPatch) -> None:
    b = int8()
    rows = [np.full((count, K), count, np.uint8) for count in range(1, 65)]
    sums = lowbit.matmul(np.ones((1, K), np.uint8), b).astype(np.int64)
    order = RNG.permutation(np.repeat(np.arange(64), 2))
    for i in order:
        lowbit.matmul(rows[i], b)
    assert len(api._exact.ways(b)) == 64
    calls = in_python(monkeypatch)
    for i in RNG.permutation(order):
        result = lowbit.matmul(rows[i], b)
        assert result.shape == (i + 1, N)
        assert (result == (i + 1) * sums).all()
    assert not calls


def test_two_sizes_that_take_turns_become_known(monkeypatch: pytest.MonkeyPatch) -> None:
    b, calls = int8(), in_python(monkeypatch)
    for _ in range(5):
        for x in (FLOATS, FLOATS[:3]):
            lowbit.linear_dynamic(x, b)
    assert len(calls) == 4
    left, right = np.ones((3, 41), np.float32), np.ones((41, 77), np.float32)
    for _ in range(5):
        for x in (left, left[:2]):
            lowbit.gemm(x, right)
    assert len(calls) == 8


def test_the_oldest_way_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "_WAYS", 8)
    b = int8()
    rows = [np.ones((count, K), np.uint8) for count in range(1, 30)]
    for x in rows:
        for _ in range(2):
            lowbit.matmul(x, b)
    assert len(api._exact.ways(b)) == 8
    calls = in_python(monkeypatch)
    for x in rows[-8:]:
        lowbit.matmul(x, b)
    assert not calls
    lowbit.matmul(rows[0], b)
    assert calls


def test_what_cannot_become_known_is_tried_less_and_less() -> None:
    ways = call_cache.Ways()
    assert [count for count in range(1, 70) if ways.is_hot("way")] == [2, 4, 8, 16, 32, 64]


OTHER_OBJECTS: dict[str, Callable[[], dict[str, Any]]] = {
    "a float": lambda: {"out_scale": float("0.1"), "out_dtype": "uint8"},
    "a float of NumPy": lambda: {"out_scale": np.float64(0.1), "out_dtype": "uint8"},
    "a zero point of 8 bits": lambda: {
        "out_scale": 0.1, "out_dtype": "int8", "out_zero_point": np.int16(45)
    },
    "a name": lambda: {"out_dtype": "".join(["bfloat", "16"])},
    "post-operations": lambda: {"post_ops": (lowbit.Clamp(0, 6), "".join(["re", "lu"]))},
    "a scale of NumPy": lambda: {"a_scale": np.float32(0.25)},
    "a wide scale of NumPy": lambda: {"a_scale": np.float64(0.25)},
    "a zero point of NumPy": lambda: {"a_zero_point": np.uint8(200)},
    "a set": lambda: {"isa": "".join(["gene", "ric"])},
    "threads": lambda: {"threads": int("1")},
    "the operand's dtype": lambda: {"a": pickle.loads(pickle.dumps(BYTES["uint8"], protocol=4))},
}  # fmt: skip


@pytest.mark.parametrize("what", OTHER_OBJECTS)
def test_equal_values_of_other_objects_are_one_way(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    b, make = int8(), OTHER_OBJECTS[what]
    call = partial(lowbit.matmul_scaled, b=b)
    usual: dict[str, Any] = {"a": BYTES["uint8"], "a_scale": 0.5}
    expected = lowbit.matmul_scaled(b=int8(), **usual | make())
    for _ in range(2):
        call(**usual | make())
    calls = in_python(monkeypatch)
    for _ in range(3):
        assert call(**usual | make()).tobytes() == expected.tobytes()
    assert not calls
    assert len(api._scaled.ways(b)) == 1


@pytest.mark.parametrize("columns", [1, 7, 16, 17, 33, 1000])
def test_a_bias_of_any_length_becomes_known(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    b = lowbit.pack(lowbit.quantize(RNG.standard_normal((K, columns), np.float32), axis=1))
    biases = RNG.standard_normal((3, columns)).astype(np.float32)
    expected = [lowbit.linear_dynamic(FLOATS, b, bias) for bias in biases]
    for bias in biases[:2]:
        lowbit.linear_dynamic(FLOATS, b, bias)
    calls = in_python(monkeypatch)
    for bias, right in zip(biases, expected, strict=True):
        assert lowbit.linear_dynamic(FLOATS, b, bias).tobytes() == right.tobytes()
    assert not calls
    memory = np.zeros((M, columns), np.float32)
    for _ in range(3):
        lowbit.linear_dynamic(FLOATS, b, biases[0], out=memory)
        refused(
            lambda: lowbit.linear_dynamic(FLOATS, b, memory[1], out=memory), ValueError, "shares"
        )


def test_numbers_of_numpy_are_read_anew() -> None:
    b = int8()
    for kind in (np.float32, np.float64, float):
        for zero in (int, np.int64, np.uint8):
            for scale, point in ((0.5, 3), (0.5, 3), (0.25, 200), (-1.5, 0)):
                options: Any = {"a_scale": kind(scale), "a_zero_point": zero(point)}
                result = lowbit.matmul_scaled(BYTES["uint8"], b, **options)
                other = lowbit.matmul_scaled(
                    BYTES["uint8"], int8(), a_scale=scale, a_zero_point=point
                )
                assert result.tobytes() == other.tobytes()
    assert len(api._scaled.ways(b)) == 9


def test_outputs_that_outgrow_caches_are_not_recognized() -> None:
    b = lowbit.pack(RNG.integers(-128, 128, (128, 4096), dtype=np.int8))
    a = RNG.integers(0, 256, (4096, 128), dtype=np.uint8)
    for _ in range(3):
        lowbit.matmul(a, b, threads=2)
    assert len(api._exact.ways(b)) == 0


def test_ways_are_given_up_by_several_threads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "_WAYS", 4)
    monkeypatch.setattr(call_cache, "_SEEN", 4)
    ways, switch = call_cache.Ways(), sys.getswitchinterval()

    def meet(first: int) -> None:
        for number in range(first, first + 5000):
            ways.is_hot(number % 50)
            ways.add(number % 50, number, ((number,),), str)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(meet, range(0, 20_000, 5000)))
    finally:
        sys.setswitchinterval(switch)
    assert 0 < len(ways) <= 4
    assert sum(map(len, ways.table())) == len(ways)
