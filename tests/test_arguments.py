"""What the public functions refuse: outputs that overlap, numbers and sizes that nothing holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lowbit
from lowbit import Clamp
from lowbit.kernels.cpu.integer.product import product
from lowbit.product.arguments import row_stride

M, N, K = 16, 16, 16
_rng = np.random.default_rng(0)
_weight = _rng.standard_normal((K, N)).astype(np.float32)
PLAIN = lowbit.pack(_rng.integers(-9, 9, (K, N), np.int8))
SCALED = lowbit.pack(lowbit.quantize(_weight, axis=1))
GROUPED = lowbit.pack(lowbit.quantize(_weight, "int4", axis=1, group_size=8, group_axis=0))
A = _rng.integers(-128, 128, (M, K), np.int8)
X = _rng.standard_normal((M, K)).astype(np.float32)
OPERANDS = {
    lowbit.matmul: {"a": A, "b": PLAIN},
    lowbit.matmul_scaled: {"a": A, "b": SCALED, "a_scale": 0.5},
    lowbit.linear_dynamic: {"x": X, "b": SCALED},
    lowbit.linear_weight_only: {"x": X, "b": GROUPED},
    lowbit.gemm: {"a": X, "b": _weight},
}
FUNCTIONS = pytest.mark.parametrize("function", OPERANDS, ids=lambda f: f.__name__)


def _out_dtype(function: Any) -> Any:
    return np.int32 if function is lowbit.matmul else np.float32


@FUNCTIONS
@pytest.mark.parametrize("strides", [(0, 4), (4, 0), (4, 4), (60, 4), (-60, 4), (4, 60)], ids=str)
def test_an_output_that_overlaps_itself(function: Any, strides: tuple[int, int]) -> None:
    memory = np.full(4 * M * N, 7, _out_dtype(function))
    out = np.lib.stride_tricks.as_strided(memory[2 * M * N :], (M, N), strides)
    with pytest.raises(ValueError, match="out shares memory with itself"):
        function(**OPERANDS[function], out=out)
    assert (memory == 7).all()


@FUNCTIONS
def test_outputs_of_any_strides_that_do_not(function: Any) -> None:
    expected = function(**OPERANDS[function])
    memory = np.zeros((4 * M, 4 * N), expected.dtype)
    for out in (memory[::-4, ::3][:M, :N], memory.T[:M, :N], memory[3::2, ::-1][:M, :N]):
        function(**OPERANDS[function], out=out)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@FUNCTIONS
def test_rows_of_an_output_that_are_apart_are_written_there(function: Any, kind: str) -> None:
    expected = function(**OPERANDS[function])
    memory = np.full((M, 2 * N), 7, expected.dtype)
    out = memory[:, :N]
    if kind == "torch":
        out = pytest.importorskip("torch").from_numpy(out)
    assert row_stride(out) == 2 * N
    function(**OPERANDS[function], out=out)
    np.testing.assert_array_equal(memory, np.hstack([expected, np.full_like(expected, 7)]))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@FUNCTIONS
def test_an_output_beside_its_operand_in_one_buffer(function: Any, kind: str) -> None:
    """Blocks of columns: each begins before the other ends, and they share no byte."""
    operands = dict(OPERANDS[function])
    name = "x" if "x" in operands else "a"
    operand = operands[name]
    expected = function(**operands)
    item = expected.itemsize // operand.itemsize
    memory = np.full((M, 3 * N), 7, expected.dtype)
    inside = memory.view(operand.dtype)[:, : item * N : item]  # the first N columns
    inside[...] = operand
    out = memory[:, N : 2 * N]
    operands[name] = inside
    if kind == "torch":
        torch = pytest.importorskip("torch")
        operands[name] = torch.from_numpy(inside)
        out = torch.from_numpy(out)
    for _ in range(3):  # the third may be a known call
        function(**operands, out=out)
    np.testing.assert_array_equal(memory[:, N : 2 * N], expected)
    np.testing.assert_array_equal(inside, operand)
    assert (memory[:, 2 * N :] == 7).all()


def test_stacks_that_overlap_themselves() -> None:
    a, b = np.stack([A, A]), np.stack([A.T, A.T])
    out = np.broadcast_to(np.zeros((M, M), np.int32), (2, M, M))
    out.flags.writeable = True
    for right in (b, PLAIN, PLAIN.unpack()):
        with pytest.raises(ValueError, match="out shares memory with itself"):
            lowbit.matmul(a, right, out=out)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("function", "name", "dtype"),
    [
        (lowbit.matmul, "a", np.int8),
        (lowbit.matmul_scaled, "a", np.int8),
        (lowbit.matmul_scaled, "a_scale", np.float32),
        (lowbit.matmul_scaled, "a_zero_point", np.int32),
        (lowbit.matmul_scaled, "bias", np.float32),
        (lowbit.matmul_scaled, "residual", np.float32),
        (lowbit.linear_dynamic, "x", np.float32),
        (lowbit.linear_dynamic, "bias", np.float32),
        (lowbit.linear_dynamic, "residual", np.float32),
        (lowbit.linear_weight_only, "x", np.float32),
        (lowbit.linear_weight_only, "bias", np.float32),
        (lowbit.linear_weight_only, "residual", np.float32),
    ],
)
def test_an_output_that_overlaps_an_operand(
    function: Any, name: str, dtype: Any, kind: str
) -> None:
    operands = dict(OPERANDS[function])
    shape = {"bias": (N,), "a_scale": (M,), "a_zero_point": (M,)}.get(name, (M, N))
    out = np.zeros((M, N), _out_dtype(function))
    operand = out.view(dtype).reshape(-1)[-int(np.prod(shape)) :].reshape(shape)
    if kind == "torch":
        torch = pytest.importorskip("torch")
        out, operand = torch.from_numpy(out), torch.from_numpy(operand)
    with pytest.raises(ValueError, match="out shares memory with an operand"):
        function(**{**operands, name: operand}, out=out)
    apart = operand + 0
    function(**{**operands, name: apart}, out=out)


def _scaled(**more: Any) -> Any:
    return lowbit.matmul_scaled(**{**OPERANDS[lowbit.matmul_scaled], **more})


MASKED = np.ma.masked_array(np.zeros(N), mask=True)
BEYOND = r"must be within float32, ±3.4e38, got"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Clamp("a", "b"), TypeError, "low of Clamp must be a number, got 'a'"),  # type: ignore[arg-type]
        (lambda: Clamp(0, None), TypeError, "high of Clamp must be a number, got None"),  # type: ignore[arg-type]
        (lambda: Clamp(0, 10**400), ValueError, f"high of Clamp {BEYOND} more"),
        (lambda: Clamp(-1e39, 0), ValueError, rf"low of Clamp {BEYOND} -1e\+39"),
        (lambda: Clamp(float("nan"), 0), ValueError, "wrong order, or NaN"),
        (lambda: _scaled(post_ops=5), TypeError, r"must be a sequence, \(5,\), got 5"),
        (lambda: _scaled(post_ops=Clamp(0, 1)), TypeError, "must be a sequence"),
        (lambda: _scaled(post_ops=([],)), TypeError, r"is a name or a Clamp, got \[\]"),
        (lambda: _scaled(a_scale=10**400), ValueError, f"a_scale {BEYOND} more"),
        (lambda: _scaled(a_scale=1e39), ValueError, rf"a_scale {BEYOND} 1e\+39"),
        (lambda: _scaled(a_scale=np.full(M, -1e39)), ValueError, rf"a_scale {BEYOND} -1e\+39"),
        (lambda: _scaled(a_scale="1"), TypeError, "a_scale must be of real numbers"),
        (lambda: _scaled(a_scale=MASKED), TypeError, "a_scale must be of real .*MaskedArray"),
        (lambda: _scaled(bias=np.full(N, 1e39)), ValueError, rf"bias {BEYOND} 1e\+39"),
        (lambda: _scaled(bias=MASKED), TypeError, "bias must be of real .*MaskedArray"),
        (lambda: _scaled(out_dtype="int8", out_scale=10**400), ValueError, f"out_scale {BEYOND}"),
        (lambda: _scaled(out_dtype="int8", out_scale="a"), TypeError, "out_scale must be a num"),
        (lambda: lowbit.gemm(X, X, alpha=10**400), ValueError, f"alpha {BEYOND} more"),
        (lambda: lowbit.gemm(X, X, alpha="1"), TypeError, "alpha must be a number, got '1'"),  # type: ignore[arg-type]
        (lambda: lowbit.quantize(np.ma.masked_array(X, X > 0)), TypeError, "got MaskedArray"),
    ],
)  # fmt: skip
def test_unsuitable_numbers(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_scales_may_be_infinite_or_nan() -> None:
    """Rows without a scale give rows without numbers, as quantize_rows says; others are theirs."""
    scale = np.ones(M)
    scale[3] = np.nan
    result = _scaled(a_scale=scale)
    assert np.isnan(result[3]).all()
    assert np.isfinite(np.delete(result, 3, axis=0)).all()
    assert not np.isfinite(_scaled(a_scale=float("inf"))).any()


def _rows(like: np.ndarray, rows: int) -> np.ndarray:
    """A view of so many rows that are all the first."""
    return np.lib.stride_tricks.as_strided(like, (rows, 1), (0, like.itemsize))


@pytest.mark.parametrize("rows", [2**58, 2**60])
@pytest.mark.parametrize("function", ["matmul", "unpacked", "matmul_scaled", "linear_dynamic",
                                      "linear_weight_only", "gemm", "stack"])  # fmt: skip
def test_results_larger_than_any_memory(function: str, rows: int) -> None:
    ones, weight = np.ones((1, N), np.int8), np.ones((1, N), np.float32)
    scaled = lowbit.pack(lowbit.quantize(weight, axis=1))
    a, x = _rows(A, rows), _rows(X, rows)
    call: Any = {
        "matmul": lambda: lowbit.matmul(a, lowbit.pack(ones)),
        "unpacked": lambda: lowbit.matmul(a, ones),
        "matmul_scaled": lambda: lowbit.matmul_scaled(a, scaled, a_scale=0.5),
        "linear_dynamic": lambda: lowbit.linear_dynamic(x, scaled),
        "linear_weight_only": lambda: lowbit.linear_weight_only(
            x, lowbit.pack(lowbit.quantize(weight, "int4", axis=1))
        ),
        "gemm": lambda: lowbit.gemm(x, weight),
        "stack": lambda: lowbit.matmul(a[:, None], lowbit.pack(ones)),
    }[function]
    with pytest.raises(MemoryError, match=rf"an array \({rows}, .* takes \d+ bytes, which no"):
        call()


def test_bounds_are_numbers_of_a_call_and_compile_nothing() -> None:
    real = _scaled()
    first = _scaled(post_ops=(Clamp(-1.0, 1.0),))
    programs = len(product._programs)
    np.testing.assert_array_equal(first, real.clip(-1, 1))
    for bound in range(60):
        low, high = -bound / 8, bound / 4
        bounded = _scaled(post_ops=(Clamp(low, high),))
        np.testing.assert_array_equal(bounded, real.clip(low, high))
    assert len(product._programs) == programs


def test_each_step_has_its_own_numbers() -> None:
    real = _scaled()
    steps = (Clamp(-3.0, 5.0), "relu", Clamp(1.0, 4.0))
    expected = np.maximum(real.clip(-3, 5), 0).clip(1, 4)
    np.testing.assert_array_equal(_scaled(post_ops=steps), expected)
    quantized = _scaled(post_ops=steps, out_dtype="uint8", out_scale=0.25, out_zero_point=3)
    np.testing.assert_array_equal(quantized, np.rint(expected * 4) + 3)
