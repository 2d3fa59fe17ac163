"""Calls that are known: the same results, and never for another call."""

from __future__ import annotations

import gc
import pickle
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lowbit
from lowbit import api
from lowbit.isa import get
from lowbit.isa.types import Int, S32Pointer, s32
from lowbit.jit import cached_call, objects, threads
from lowbit.jit.builder import Builder
from lowbit.jit.cached_call import Array, Fresh, Same
from lowbit.jit.kernel import kernel
from lowbit.product import call_cache

RNG = np.random.default_rng(5)
M, K, N = 5, 70, 32
BYTES = {
    "uint8": RNG.integers(0, 256, (M, K), dtype=np.uint8),
    "int8": RNG.integers(-128, 128, (M, K), dtype=np.int8),
}
FLOATS = RNG.standard_normal((M, K)).astype(np.float32)
WEIGHT = RNG.standard_normal((K, N)).astype(np.float32)
BIAS = RNG.standard_normal(N).astype(np.float32)
RESIDUAL = RNG.standard_normal((M, N)).astype(np.float32)

Call = Callable[..., Any]


def learned(cache: api.CallCache, b: lowbit.PackedMatrix) -> int:
    return len(cache.ways(b))


def int8() -> lowbit.PackedMatrix:
    return lowbit.pack(lowbit.quantize(WEIGHT, "int8", axis=1))


def int4() -> lowbit.PackedMatrix:
    return lowbit.pack(lowbit.quantize(WEIGHT, "int4", axis=1, group_axis=0, group_size=32))


def refused(call: Call, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()


WAYS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "matmul": ("matmul", "uint8", {}),
    "matmul, signed": ("matmul", "int8", {"threads": 1}),
    "scaled": ("matmul_scaled", "uint8", {"a_scale": 0.3, "a_zero_point": 7}),
    "scaled, signed": ("matmul_scaled", "int8", {"a_scale": 0.3, "a_zero_point": -7}),
    "scaled, no zero point": ("matmul_scaled", "int8", {"a_scale": 0.3}),
    "scaled by rows": ("matmul_scaled", "uint8", {"a_scale": np.arange(M, dtype=np.float32)}),
    "scaled by rows, one zero point": (
        "matmul_scaled",
        "int8",
        {"a_scale": np.arange(M, dtype=np.float32), "a_zero_point": 21},
    ),
    "all operands": (
        "matmul_scaled",
        "uint8",
        {"a_scale": 0.3, "bias": BIAS, "residual": RESIDUAL, "post_ops": ("bias", "residual")},
    ),
    "quantized output": (
        "matmul_scaled",
        "uint8",
        {
            "a_scale": 0.3,
            "post_ops": (lowbit.Clamp(-1, 5),),
            "out_dtype": "uint8",
            "out_scale": 0.1,
            "out_zero_point": 3,
        },
    ),
    "bfloat16": ("matmul_scaled", "uint8", {"a_scale": 0.3, "out_dtype": "bfloat16"}),
    "dynamic": ("linear_dynamic", "float32", {"bias": BIAS}),
    "symmetric": ("linear_dynamic", "float32", {"symmetric": True}),
    "weight only": ("linear_weight_only", "float32", {"residual": RESIDUAL}),
}
TABLES = {
    "matmul": api._exact,
    "matmul_scaled": api._scaled,
    "linear_dynamic": api._dynamic,
    "linear_weight_only": api._weight_only,
}


@pytest.mark.parametrize("given", [False, True], ids=["new", "out"])
@pytest.mark.parametrize("way", WAYS)
def test_a_recognized_call_gives_the_same_bits(way: str, given: bool) -> None:
    name, dtype, options = WAYS[way]
    function: Call = getattr(lowbit, name)
    b, other = (int4() if name == "linear_weight_only" else int8() for _ in range(2))
    first = FLOATS if dtype == "float32" else BYTES[dtype]
    expected = [function(x, other, **options) for x in (first, first[::-1].copy())]
    table = TABLES[name]
    out = np.empty_like(expected[0]) if given else None
    for _ in range(3):
        function(first, b, out=out, **options)
    recognized = way != "scaled by rows, one zero point"  # which the kernel needs for each row
    assert learned(table, b) == recognized
    for x, right in zip((first, first[::-1].copy()), expected, strict=True):
        if out is not None:
            out[...] = 77
        result = function(x, b, out=out, **options)
        assert out is None or result is out
        assert result.dtype == right.dtype
        assert result.tobytes() == right.tobytes()
    assert learned(table, b) == recognized


def prepared_twice(**options: Any) -> tuple[lowbit.PackedMatrix, Call]:
    """A packed matrix, and matmul_scaled with it, which recognizes calls with these options."""
    b = int8()

    def call(a: Any = BYTES["uint8"], **more: Any) -> Any:
        return lowbit.matmul_scaled(a, b, **{"a_scale": 0.5, **options, **more})

    for _ in range(2):
        call()
    assert learned(api._scaled, b) == 1
    return b, call


def test_numbers_are_read_anew() -> None:
    _, call = prepared_twice(a_zero_point=3)
    real = BYTES["uint8"].astype(np.float64)
    columns = lowbit.quantize(WEIGHT, "int8", axis=1).dequantize().astype(np.float64)
    for scale, zero in ((0.25, 0), (-2.0, 255), (1e-3, 128)):
        result = call(a_scale=scale, a_zero_point=zero)
        np.testing.assert_allclose(result, scale * ((real - zero) @ columns), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(
    ("more", "error", "match"),
    [
        ({"a_zero_point": 256}, ValueError, "between 0 and 255"),
        ({"a_zero_point": -1}, ValueError, "between 0 and 255"),
        ({"a_zero_point": 1 << 70}, (ValueError, OverflowError), "."),
        ({"a_zero_point": 1.5}, TypeError, "integers"),
        ({"a_scale": 1e39}, ValueError, "float32"),
        ({"a_scale": "1"}, TypeError, "real numbers"),
        ({"threads": 0}, ValueError, "threads"),
        ({"threads": True}, ValueError, "threads"),
        ({"out_dtype": "float16"}, ValueError, "float16"),
        ({"bias": BIAS[:3]}, ValueError, "bias"),
        ({"isa": "none"}, ValueError, "none"),
        ({"a": BYTES["uint8"][:, :-1]}, ValueError, "69"),
        ({"a": BYTES["uint8"].astype(np.int16)}, TypeError, "int16"),
        ({"a": BYTES["uint8"].ravel()}, ValueError, "two dimensions"),
    ],
)
def test_bad_arguments_are_refused_as_ever(
    more: dict[str, Any], error: type[Exception], match: str
) -> None:
    _, call = prepared_twice(a_zero_point=3)
    refused(lambda: call(**more), error, match)


def test_numbers_of_other_kinds_are_taken_as_ever() -> None:
    _, call = prepared_twice(a_zero_point=3)
    expected = call()
    for scale in (np.float32(0.5), np.float64(0.5), np.full(M, 0.5, np.float32)):
        for zero in (np.int64(3), np.full(M, 3)):
            assert call(a_scale=scale, a_zero_point=zero).tobytes() == expected.tobytes()
    assert np.isnan(call(a_scale=float("nan"))).all()
    assert call(a_scale=1).tobytes() == call(a_scale=1.0).tobytes()


def test_other_arrays_are_told_apart() -> None:
    _, call = prepared_twice()
    a = BYTES["uint8"]
    wide = np.zeros((M, 2 * K), np.uint8)
    wide[:, ::2] = a
    for view in (a[:3], wide[:, ::2], np.asfortranarray(a), a[::-1], a.astype(np.int8)):
        expected = lowbit.matmul_scaled(view, int8(), a_scale=0.5)
        for _ in range(4):
            assert call(view).tobytes() == expected.tobytes()


class Subclass(np.ndarray):
    """An array of another type."""


def test_subclasses_and_masked_arrays_are_not_recognized() -> None:
    _, call = prepared_twice()
    expected = call()
    assert type(call(BYTES["uint8"].view(Subclass))) is not Subclass
    assert call(BYTES["uint8"].view(Subclass)).tobytes() == expected.tobytes()
    refused(lambda: call(np.ma.masked_equal(BYTES["uint8"], 3)), TypeError, "NumPy array")


def test_outputs_are_checked_each_time() -> None:
    b = int8()
    memory = np.zeros(M * K + 4 * M * N + 64, np.uint8)
    start = -memory.ctypes.data % 64
    a = memory[start : start + M * K].reshape(M, K)
    a[...] = BYTES["uint8"]

    def out(offset: int) -> Any:
        part = memory[start + offset : start + offset + 4 * M * N]
        return part.view(np.float32).reshape(M, N)

    def call(target: Any) -> Any:
        return lowbit.matmul_scaled(a, b, a_scale=0.5, out=target)

    apart = np.empty((M, N), np.float32)
    expected = call(apart).copy()
    call(apart)
    assert learned(api._scaled, b) == 1
    for offset in (0, 4, M * K - 2):
        refused(lambda at=offset: call(out(at)), ValueError, "shares memory")
    assert call(out(-(-M * K // 4) * 4)).tobytes() == expected.tobytes()
    apart.flags.writeable = False
    refused(lambda: call(apart), ValueError, "read-only")
    for wrong in (np.empty((M, N + 1), np.float32), np.empty((M, N), np.float64)):
        refused(lambda at=wrong: call(at), ValueError, "out must be")
    rows = np.zeros((M, 2 * N), np.float32)
    for _ in range(3):
        call(rows[:, :N])
        call(rows[:, N:])
    assert rows[:, :N].tobytes() == rows[:, N:].tobytes() == expected.tobytes()


@pytest.mark.parametrize("columns", [1.0, 1e30, np.inf, np.nan])
def test_scales_beyond_what_a_product_is_prepared_for(columns: float) -> None:
    """Infinities and NaN are the same bits as where each row has a scale of its own."""
    b = int8()
    assert b.scale is not None
    with np.errstate(all="ignore"):
        b = replace(b, scale=b.scale * np.float32(columns))
    a = BYTES["uint8"].copy()
    a[0] = 7  # so that there are sums of 0
    for scale in (0.5, -0.5, 1e-30, 7e28, -8e28, 3e38, np.inf, -np.inf, np.nan, 0.0, 2):
        rows = np.full(M, scale, np.float32)
        with np.errstate(all="ignore"):
            expected = lowbit.matmul_scaled(a, b, a_scale=rows, a_zero_point=np.full(M, 7))
        for _ in range(3):
            made = lowbit.matmul_scaled(a, b, a_scale=scale, a_zero_point=7)
            assert made.tobytes() == expected.tobytes()


def test_lists_are_compared_by_what_is_in_them() -> None:
    b = int8()
    steps = ["relu"]
    for _ in range(4):
        lowbit.matmul_scaled(BYTES["uint8"], b, a_scale=0.5, post_ops=steps)
    assert learned(api._scaled, b) == 1
    steps.clear()
    assert lowbit.matmul_scaled(BYTES["uint8"], b, a_scale=0.5, post_ops=steps).min() < 0


def test_numbers_that_can_change_are_not_recognized() -> None:
    torch = pytest.importorskip("torch")
    ones = np.ones((2, 2), np.float32)
    b = lowbit.pack(lowbit.quantize(np.ones((2, 2), np.float32), axis=1))
    numbers: list[Any] = [np.array(2.0), torch.tensor(2.0)]
    product: Any = partial(
        lowbit.matmul_scaled, np.full((2, 2), 40, np.uint8), b, a_scale=1.0, out_dtype="uint8"
    )
    for number in numbers:
        for value in (2.0,) * 4 + (5.0,) * 2:
            number[...] = value
            assert lowbit.gemm(ones, ones, alpha=number)[0, 0] == 2 * value
            np.testing.assert_array_equal(product(out_scale=number), product(out_scale=value))
    with pytest.raises(TypeError, match="out_zero_point must be an integer"):
        product(out_scale=5.0, out_zero_point=0.0)


def test_a_bias_is_read_anew() -> None:
    bias = BIAS.copy()
    _, call = prepared_twice(bias=bias)
    before = call()
    bias += 1
    np.testing.assert_allclose(call(), before + 1, rtol=1e-4, atol=1e-4)


def test_a_zero_point_that_K_is_too_long_for_is_not_recognized() -> None:
    """Zeros are as good as none there; other numbers must be refused."""
    k = 100_000
    a, b = np.full((1, k), 100, np.int8), lowbit.pack(lowbit.quantize(np.ones((k, 1))))
    for _ in range(4):
        lowbit.matmul_scaled(a, b, a_scale=1.0, a_zero_point=0)
    refused(lambda: lowbit.matmul_scaled(a, b, a_scale=1.0, a_zero_point=9), ValueError, "overflow")


def test_what_is_known_goes_with_the_operand() -> None:
    b, call = prepared_twice()
    held, known = weakref.ref(b), len(api._scaled._ways)
    del b, call
    gc.collect()
    assert held() is None
    assert len(api._scaled._ways) == known - 1


def test_operands_of_another_class_are_not_recognized() -> None:
    class Other(lowbit.PackedMatrix):
        pass

    b = int8()
    other = Other(b.panels, b.column_sums, b.K, b.N, b.dtype, b.scale)
    for _ in range(4):
        made = lowbit.matmul(BYTES["uint8"], other)
        np.testing.assert_array_equal(made, lowbit.matmul(BYTES["uint8"], b))
    assert learned(api._exact, other) == 0


def in_python(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is put for each call that comes to Python's function."""
    calls: list[Any] = []
    checked = api.output
    monkeypatch.setattr(api, "output", lambda *args: calls.append(None) or checked(*args))
    return calls


def test_sizes_that_vary_all_become_known(monkeypatch: pytest.MonkeyPatch) -> None:
    b = int8()
    rows = [np.full((count, K), count, np.uint8) for count in range(1, 65)]
    sums = lowbit.matmul(np.ones((1, K), np.uint8), b).astype(np.int64)
    order = RNG.permutation(np.repeat(np.arange(64), 2))
    for i in order:
        lowbit.matmul(rows[i], b)
    assert learned(api._exact, b) == 64
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
    assert learned(api._exact, b) == 8
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
    assert learned(api._scaled, b) == 1


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
    assert learned(api._scaled, b) == 9


def test_outputs_that_outgrow_caches_are_not_recognized() -> None:
    b = lowbit.pack(RNG.integers(-128, 128, (128, 4096), dtype=np.int8))
    a = RNG.integers(0, 256, (4096, 128), dtype=np.uint8)
    for _ in range(3):
        lowbit.matmul(a, b, threads=2)
    assert learned(api._exact, b) == 0


@pytest.mark.parametrize("way", WAYS)
def test_several_threads(way: str) -> None:
    name, dtype, options = WAYS[way]
    options = {**options, "threads": 3}
    function: Call = getattr(lowbit, name)
    b, other = (int4() if name == "linear_weight_only" else int8() for _ in range(2))
    x = FLOATS if dtype == "float32" else BYTES[dtype]
    expected = function(x, other, **options)
    for _ in range(200):
        assert function(x, b, **options).tobytes() == expected.tobytes()
    assert learned(TABLES[name], b) == (way != "scaled by rows, one zero point")


@kernel
def fill(k: Builder, y: S32Pointer, value: Int) -> None:
    """y[0] = value."""
    y.store(value.to(s32))


def test_more_scratch_than_a_stack_has() -> None:
    """It is one memory for all, so a call that finds it taken is not recognized."""
    out = np.zeros(1, np.int32)
    call = fill.program(get("generic")).cached_call(
        {"value": 7}, {}, 1 << 17, [Array(out, "y", written=True)], None
    )
    assert call is not None
    cached_call._scratch.taken = 1
    try:
        assert call(out) is None
        assert not out[0]
    finally:
        cached_call._scratch.taken = 0
    assert call(3) is None
    assert not cached_call._scratch.taken
    assert call(out) is out
    assert out[0] == 7
    assert not cached_call._scratch.taken


def test_calls_at_the_same_time() -> None:
    a = RNG.integers(0, 256, (300, 3000), dtype=np.uint8)
    b = lowbit.pack(np.ones((3000, 64), np.int8))
    expected = np.repeat(a.sum(1, dtype=np.int32)[:, None], 64, 1)
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda _: lowbit.matmul(a, b, threads=8), range(200))
        assert all((result == expected).all() for result in results)
    assert learned(api._exact, b) == 1
    assert not cached_call._scratch.taken


@kernel
def count_slowly(k: Builder, y: S32Pointer, value: Int) -> None:
    """Some number of value steps, which take four cycles each."""
    for _ in k.parallel(k.index(1)):
        mixed = k.register(k.constant(1, s32))
        for _ in k.range(0, value):
            mixed.value = mixed.value * 1664525 + 1013904223
        y.store(mixed.value)


def test_what_starts_threads_is_chosen_in_python_after_a_stall() -> None:
    out = np.zeros(1, np.int32)
    program = count_slowly.program(get("generic"))
    quick, slow = (
        program.cached_call(
            {"value": steps}, {}, 0, [Array(out, "y", written=True)], None, thread_count=2
        )
        for steps in (10, 10_000_000)
    )
    assert quick is not None
    assert slow is not None
    serve = partial(threads._serve, threads.team.address())
    threads._starter.function = 0
    assert quick(out) is None
    for call in (quick, slow):
        serve(monotonic() - 1e-3)
        assert call(out) is None
        serve(monotonic() + 60)
        assert threads._starter.threads == threads.max_threads()
        assert call(out) is out
    assert not threads._starter.function
    assert quick(out) is None


def test_without_the_known_layout_nothing_is_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_call, "arrays_are_known", lambda: False)
    b = int8()
    expected = lowbit.matmul(BYTES["uint8"], b)
    for _ in range(3):
        assert lowbit.matmul(BYTES["uint8"], b).tobytes() == expected.tobytes()
    assert learned(api._exact, b) == 0


def test_the_layout_is_known_here() -> None:
    assert objects.layout_is_known()
    assert objects.arrays_are_known()


def test_bfloat16_rows() -> None:
    b = int4()
    x = FLOATS.astype(ml_dtypes.bfloat16)
    expected = lowbit.linear_weight_only(x, b)
    for _ in range(3):
        assert lowbit.linear_weight_only(x, b).tobytes() == expected.tobytes()
    assert learned(api._weight_only, b) == 1


def test_an_output_that_cannot_be_made() -> None:
    """The error of what makes it comes through."""

    def make(size: int) -> Any:
        if size > 1:
            raise MemoryError(f"{size} are too many")
        return np.empty(size, np.int32)

    program = fill.program(get("generic"))
    for size in (1, 2):
        call = program.cached_call({"value": 7}, {}, 0, [Same(None)], Fresh(make, (size,), "y"))
        assert call is not None
        assert call(3) is None
        if size == 1:
            assert call(None).tolist() == [7]
        else:
            refused(lambda call=call: call(None), MemoryError, "2 are too many")


def test_the_number_of_threads_is_asked_each_time() -> None:
    """Where more would serve, a call for as many as there are is recognized with PyTorch."""
    torch = pytest.importorskip("torch")
    a, b = np.ones((1, 4000), np.uint8), lowbit.pack(np.ones((4000, 1000), np.int8))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for _ in range(3):
            assert (lowbit.matmul(a, b) == 4000).all()
        assert learned(api._exact, b) == 1
        ((known,),) = b._calls["matmul"]
        assert known(a, None, None, None) is not None
        assert known(a, None, 1, None) is None
        torch.set_num_threads(2)
        assert known(a, None, None, None) is None
        assert (lowbit.matmul(a, b) == 4000).all()
    finally:
        torch.set_num_threads(before)


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
