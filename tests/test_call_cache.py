"""Calls that are known: the same results, and never for another call."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cached_calls import (
    BYTES,
    FLOATS,
    RNG,
    WEIGHT,
    Call,
    K,
    M,
    N,
    int4,
    int8,
    prepared_twice,
    refused,
)

import lowbit
from lowbit import api
from lowbit.isa import get
from lowbit.isa.types import Int, S32Pointer, s32
from lowbit.jit import cached_call, objects, threads
from lowbit.jit.builder import Builder
from lowbit.jit.cached_call import Array, Fresh, Same
from lowbit.jit.kernel import kernel

BIAS = RNG.standard_normal(N).astype(np.float32)
RESIDUAL = RNG.standard_normal((M, N)).astype(np.float32)
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
    assert len(table.ways(b)) == recognized
    for x, right in zip((first, first[::-1].copy()), expected, strict=True):
        if out is not None:
            out[...] = 77
        result = function(x, b, out=out, **options)
        assert out is None or result is out
        assert result.dtype == right.dtype
        assert result.tobytes() == right.tobytes()
    assert len(table.ways(b)) == recognized


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
    assert len(api._scaled.ways(b)) == 1
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
    assert len(api._scaled.ways(b)) == 1
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


def test_operands_of_another_class_are_not_recognized() -> None:
    class Other(lowbit.PackedMatrix):
        pass

    b = int8()
    other = Other(b.panels, b.column_sums, b.K, b.N, b.dtype, b.scale)
    for _ in range(4):
        made = lowbit.matmul(BYTES["uint8"], other)
        np.testing.assert_array_equal(made, lowbit.matmul(BYTES["uint8"], b))
    assert len(api._exact.ways(other)) == 0


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
    assert len(TABLES[name].ways(b)) == (way != "scaled by rows, one zero point")


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
    assert len(api._exact.ways(b)) == 1
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
    assert len(api._exact.ways(b)) == 0


def test_the_layout_is_known_here() -> None:
    assert objects.layout_is_known()
    assert objects.arrays_are_known()


def test_bfloat16_rows() -> None:
    b = int4()
    x = FLOATS.astype(ml_dtypes.bfloat16)
    expected = lowbit.linear_weight_only(x, b)
    for _ in range(3):
        assert lowbit.linear_weight_only(x, b).tobytes() == expected.tobytes()
    assert len(api._weight_only.ways(b)) == 1


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
        assert len(api._exact.ways(b)) == 1
        ((known,),) = b._calls["matmul"]
        assert known(a, None, None, None) is not None
        assert known(a, None, 1, None) is None
        torch.set_num_threads(2)
        assert known(a, None, None, None) is None
        assert (lowbit.matmul(a, b) == 4000).all()
    finally:
        torch.set_num_threads(before)
