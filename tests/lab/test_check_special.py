"""The checker and special values: NaN, infinities, zeros, subnormal and the largest numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from jaxtyping import BFloat16, Bool, Float16, Float32, Float64

from lowbit.spec import DTYPES, Case, Expected, Operation, cases_of, exercises, operation
from lowbit.spec.operations.rows import row_sum
from lowbit_lab import check
from lowbit_lab.run.special import forgiven
from lowbit_lab.run.tensor import widened

# Triton's own annotations do not know what a kernel's pointers are.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false


def blocks(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["N"], meta["B"]),)


def rows(meta: dict[str, Any]) -> tuple[int]:
    return (meta["N"],)


def copied(dtype: Any, dims: str) -> Operation:
    def same(x):
        return x

    same.__annotations__ = {"x": dtype[np.ndarray, dims], "return": dtype[np.ndarray, dims]}
    return operation()(same)


def relu(x: Float32[np.ndarray, "N"]) -> Float32[np.ndarray, "N"]:
    return np.maximum(x, 0)


def relu_and_add(
    x: Float32[np.ndarray, "N"], y: Float32[np.ndarray, "N"]
) -> Float32[np.ndarray, "N"]:
    return np.maximum(x, 0) + y


def largest_of_row(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "N"]:
    return x.max(axis=1)


def inverse(x: Float32[np.ndarray, "N"]) -> Float32[np.ndarray, "N"]:
    return 1 / x


def weighted(x: Float32[np.ndarray, "N"], w: Float32[np.ndarray, "N"]) -> Float32[np.ndarray, "N"]:
    return x * np.where(w > 0, 1.0, 0.0)


def positive(x: Float32[np.ndarray, "N"]) -> Bool[np.ndarray, "N"]:
    return x > 0


def chosen(x: Float32[np.ndarray, "N"], m: Bool[np.ndarray, "N"]) -> Float32[np.ndarray, "N"]:
    return np.where(m, x, 0)


def normalised(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "N T"]:
    return x / np.sqrt((x * x).sum(axis=1, keepdims=True) + 1)


KINDS: dict[str, Callable[[Any, str], Any]] = {
    "NaN": lambda x, _: np.isnan(x),
    "infinity": lambda x, _: x == np.inf,
    "negative infinity": lambda x, _: x == -np.inf,
    "zero": lambda x, _: (x == 0) & ~np.signbit(x),
    "negative zero": lambda x, _: (x == 0) & np.signbit(x),
    "subnormal": lambda x, dtype: (x != 0) & (np.abs(x) < SMALLEST_NORMAL[dtype]),
    "largest": lambda x, dtype: x == DTYPES[dtype].largest,
    "lowest": lambda x, dtype: x == -DTYPES[dtype].largest,
}
SMALLEST_NORMAL = {
    "float16": 2.0**-14,
    "bfloat16": 2.0**-126,
    "float32": 2.0**-126,
    "float64": 2.0**-1022,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "spec",
    [
        *(copied(dtype, "N") for dtype in (Float16, BFloat16, Float32, Float64)),
        copied(Float32, "N T"),
        operation()(weighted),
        operation()(chosen),
        operation()(positive),
        exercises.add_constant,
        exercises.mul_relu_backward,
    ],
    ids=lambda spec: f"{spec.name}-{spec.inputs[0].dtype}-{len(spec.inputs[0].dims)}",
)
def test_every_kind_of_special_value_is_in_a_case(spec: Operation, kind: str) -> None:
    for tensor in (one for one in spec.inputs if one.is_float):
        held = (
            widened(case.inputs(seed)[tensor.name], tensor.dtype)
            for case in cases_of(spec, [32], strided=False, long=False)
            for seed in (0,)
        )
        assert any(KINDS[kind](values, tensor.dtype).any() for values in held)


@pytest.mark.parametrize("kind", ["NaN", "infinity", "negative infinity", "negative zero"])
def test_sums_meet_special_values_too(kind: str) -> None:
    spec = exercises.long_sum
    cases = cases_of(spec, [32], strided=False, long=False)
    assert any(KINDS[kind](case.inputs(0)["x"], "float32").any() for case in cases)


@triton.jit
def relu_without_nan(x_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(x_ptr + i, mask=i < N)
    tl.store(z_ptr + i, tl.maximum(x, 0.0), mask=i < N)


@triton.jit
def clamp_without_nan(x_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(x_ptr + i, mask=i < N)
    tl.store(z_ptr + i, tl.clamp(x, 0.0, float("inf")), mask=i < N)


@triton.jit
def clamp_with_nan(x_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(x_ptr + i, mask=i < N)
    z = tl.clamp(x, 0.0, float("inf"), propagate_nan=tl.PropagateNan.ALL)
    tl.store(z_ptr + i, z, mask=i < N)


@triton.jit
def relu_of_one_and_a_number_for_nan(x_ptr, y_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x, y = tl.load(x_ptr + i, mask=i < N), tl.load(y_ptr + i, mask=i < N)
    relu = tl.where(x < 0, 0.0, x)
    tl.store(z_ptr + i, relu + tl.where(y == y, y, 7.0), mask=i < N)


@triton.jit
def relu_with_nan(x_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(x_ptr + i, mask=i < N)
    tl.store(z_ptr + i, tl.where(x < 0.0, 0.0, x), mask=i < N)


@triton.jit
def relu_by_comparison(x_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(x_ptr + i, mask=i < N)
    tl.store(z_ptr + i, tl.where(x > 0.0, x, 0.0), mask=i < N)


@triton.jit
def maximum_without_nan(x_ptr, z_ptr, N, T, B: tl.constexpr):
    row = tl.program_id(0)
    best = tl.full((B,), -float("inf"), tl.float32)
    for start in range(0, T, B):
        j = start + tl.arange(0, B)
        x = tl.load(x_ptr + row * T + j, mask=j < T, other=-float("inf"))
        best = tl.maximum(best, x)
    tl.store(z_ptr + row, tl.max(best, axis=0))


@triton.jit
def maximum_from_a_large_number(x_ptr, z_ptr, N, T, B: tl.constexpr):
    row = tl.program_id(0)
    best = tl.full((B,), -1e30, tl.float32)
    for start in range(0, T, B):
        j = start + tl.arange(0, B)
        x = tl.load(x_ptr + row * T + j, mask=j < T, other=-1e30)
        best = tl.maximum(best, x, propagate_nan=tl.PropagateNan.ALL)
    nan = tl.sum((best != best).to(tl.int32), axis=0) > 0
    tl.store(z_ptr + row, tl.where(nan, float("nan"), tl.max(best, axis=0)))


@triton.jit
def inverse_without_the_sign(x_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(x_ptr + i, mask=i < N)
    tl.store(z_ptr + i, 1.0 / (x + 0.0), mask=i < N)


@triton.jit
def not_above_zero(x_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(x_ptr + i, mask=i < N)
    tl.store(z_ptr + i, (x <= 0.0) == 0, mask=i < N)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("kernel", "spec", "grid", "fill"),
    [
        (relu_without_nan, relu, blocks, "nan"),
        (relu_of_one_and_a_number_for_nan, relu_and_add, blocks, "nan"),
        (relu_by_comparison, relu, blocks, "nan"),
        (clamp_without_nan, relu, blocks, "nan"),
        (maximum_from_a_large_number, largest_of_row, rows, "neg_inf"),
        (inverse_without_the_sign, inverse, blocks, "zeros"),
        (not_above_zero, positive, blocks, "nan"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_lost_special_value_is_an_error(kernel: Any, spec: Any, grid: Any, fill: str) -> None:
    result = check(kernel, spec, grid=grid, device="cpu")
    assert result.kinds == ("wrong-values",), str(result)
    assert result.findings[0].fill == fill


@pytest.mark.deep
def test_a_maximum_may_drop_a_nan_and_says_so() -> None:
    result = check(maximum_without_nan, largest_of_row, grid=rows, device="cpu")
    assert result.ok, str(result)
    assert "nan-chosen" in {f.kind for f in result.findings}
    silent = operation(excludes=("nan",))(largest_of_row)
    other = check(maximum_without_nan, silent, grid=rows, device="cpu")
    assert "nan-chosen" not in {f.kind for f in other.findings}


@triton.jit
def leaves_out_what_has_no_weight(x_ptr, w_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(x_ptr + i, mask=i < N)
    w = tl.load(w_ptr + i, mask=i < N)
    tl.store(z_ptr + i, tl.where(w > 0, x, 0.0), mask=i < N)


@triton.jit
def norm_in_one_pass(x_ptr, z_ptr, N, T, B: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros((B,), tl.float32)
    for start in range(0, T, B):
        j = start + tl.arange(0, B)
        x = tl.load(x_ptr + row * T + j, mask=j < T, other=0.0)
        total += x * x
    factor = 1.0 / tl.sqrt(tl.sum(total, axis=0) + 1.0)
    for start in range(0, T, B):
        j = start + tl.arange(0, B)
        x = tl.load(x_ptr + row * T + j, mask=j < T)
        tl.store(z_ptr + row * T + j, x * factor, mask=j < T)


@triton.jit
def relu_of_product(x_ptr, y_ptr, z_ptr, N0, N1, B0: tl.constexpr, B1: tl.constexpr):
    i, j = tl.arange(0, B0) + tl.program_id(0) * B0, tl.arange(0, B1) + tl.program_id(1) * B1
    x = tl.load(x_ptr + i, mask=i < N0)[None, :]
    y = tl.load(y_ptr + j, mask=j < N1)[:, None]
    inside = (j < N1)[:, None] & (i < N0)[None, :]
    z = tl.where(x * y > 0, x * y, 0.0)
    tl.store(z_ptr + j[:, None] * N0 + i[None, :], z, mask=inside)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("kernel", "spec", "grid"),
    [
        (relu_with_nan, relu, blocks),
        (clamp_with_nan, relu, blocks),
        (leaves_out_what_has_no_weight, weighted, blocks),
        pytest.param(norm_in_one_pass, normalised, rows),
        (
            relu_of_product,
            exercises.outer_mul_relu,
            lambda m: (triton.cdiv(m["N0"], m["B0"]), triton.cdiv(m["N1"], m["B1"])),
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_right_kernel_may_treat_special_values_its_own_way(
    kernel: Any, spec: Any, grid: Any
) -> None:
    result = check(kernel, spec, grid=grid, device="cpu")
    assert result.ok, str(result)


@pytest.mark.parametrize(("budget", "free"), [(1e30, False), (1e39, True)])
def test_nothing_is_judged_where_rounding_may_lead_beyond_float32(
    budget: float, free: bool
) -> None:
    """A sum of numbers that cancel may overflow in one order, and in another not."""
    case = Case(row_sum, {"N": 2, "T": 3}, "huge")
    inputs = {"x": np.ones((2, 3), np.float32)}
    expected = Expected(np.full(2, 3.0), np.full(2, budget), DTYPES["float32"])
    found = forgiven(case, inputs, expected)
    assert found is not None
    assert found.free.tolist() == [free] * 2
