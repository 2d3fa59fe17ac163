"""Data and sizes that show what others do not: exact halves, widths that are written in the text,
and two large numbers that all but cancel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from jaxtyping import Float32, Int8

from lowbit.spec import Case, cases_of, from_function, operation
from lowbit_lab.backends.backend import Request, Subject, Variant
from lowbit_lab.backends.language import bound
from lowbit_lab.backends.widths import widths_of
from lowbit_lab.run.outcome import Run, Trial, judge

# Triton's own annotations do not know what a kernel's pointers are.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportCallIssue=false


def rows(meta: dict[str, Any]) -> tuple[int]:
    return (meta["N"],)


def whole(sizes: Any) -> int:
    return triton.next_power_of_2(sizes["T"])


def subject_of(kernel: Any, spec: Any, **constants: Any) -> Subject:
    return bound(Request(Variant(kernel, grid=rows, constants=constants), spec))


def ran(subject: Subject, fill: str, seed: int = 0, **sizes: int) -> Run:
    return subject.run(Trial.of(Case(subject.operation, sizes, fill), seed))


# Exact halves.


@triton.jit
def half_even(x):
    up = tl.floor(x + 0.5)
    odd = up - 2.0 * tl.floor(up / 2.0) == 1.0
    return tl.where((up - x == 0.5) & odd, up - 1.0, up)


@triton.jit
def rounds(x_ptr, z_ptr, N, T, EVEN: tl.constexpr, B: tl.constexpr):
    j = tl.arange(0, B)
    x = tl.load(x_ptr + tl.program_id(0) * T + j, mask=j < T, other=0.0)
    z = half_even(x) if EVEN else tl.floor(x + 0.5)
    tl.store(z_ptr + tl.program_id(0) * T + j, z, mask=j < T)


@triton.jit
def quantizes(x_ptr, z_ptr, N, T, EVEN: tl.constexpr, B: tl.constexpr):
    j = tl.arange(0, B)
    x = tl.load(x_ptr + tl.program_id(0) * T + j, mask=j < T, other=0.0)
    x = x * (127.0 / tl.maximum(tl.max(tl.abs(x), axis=0), 1e-30))
    z = half_even(x) if EVEN else tl.floor(x + 0.5)
    tl.store(z_ptr + tl.program_id(0) * T + j, z.to(tl.int8), mask=j < T)


@triton.jit
def quantizes_by_scales(x_ptr, s_ptr, z_ptr, N, T, EVEN: tl.constexpr, B: tl.constexpr):
    j = tl.arange(0, B)
    x = tl.load(x_ptr + tl.program_id(0) * T + j, mask=j < T, other=0.0)
    x = x * (1.0 / tl.load(s_ptr + tl.program_id(0)))
    z = half_even(x) if EVEN else tl.floor(x + 0.5)
    z = tl.minimum(tl.maximum(z, -128.0), 127.0)
    tl.store(z_ptr + tl.program_id(0) * T + j, z.to(tl.int8), mask=j < T)


def rounded(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "N T"]:
    return np.round(x)


def quantized(x: Float32[np.ndarray, "N T"]) -> Int8[np.ndarray, "N T"]:
    largest = np.maximum(np.abs(x).max(axis=1, keepdims=True), 1e-30)
    return np.round(x * (127 / largest)).astype(np.int64)


def quantized_by_scales(
    x: Float32[np.ndarray, "N T"], s: Float32[np.ndarray, "N"]
) -> Int8[np.ndarray, "N T"]:
    return np.clip(np.round(x / s[:, None]), -128, 127).astype(np.int64)


def test_halves_of_a_reference_of_torch() -> None:
    torch = pytest.importorskip("torch")

    def rounded_by_torch(x):
        return torch.round(x)

    kind = Float32[torch.Tensor, "N T"]
    rounded_by_torch.__annotations__ = {"x": kind, "return": kind}
    for even in (True, False):
        subject = subject_of(rounds, from_function(rounded_by_torch), EVEN=even, B=whole)
        assert bool(ran(subject, "halves", N=3, T=40).wrong.any()) is not even


@pytest.mark.parametrize(
    ("kernel", "spec"),
    [(rounds, rounded), (quantizes, quantized), (quantizes_by_scales, quantized_by_scales)],
)
def test_exact_halves_tell_how_they_are_rounded(kernel: Any, spec: Any) -> None:
    stated = from_function(spec)
    assert "halves" in {case.fill for case in cases_of(stated, (32,), False, long=False)}
    right = ran(subject_of(kernel, stated, EVEN=True, B=whole), "halves", N=3, T=40)
    assert not right.wrong.any()
    wrong = ran(subject_of(kernel, stated, EVEN=False, B=whole), "halves", N=3, T=40)
    assert wrong.wrong.any()


def test_where_halves_are_rounded_on_the_way_a_jump_is_allowed() -> None:
    def around_the_mean(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "N T"]:
        return np.round(x - x.mean(axis=1, keepdims=True) + x.mean(axis=1, keepdims=True))

    case = Case(from_function(around_the_mean), {"N": 20, "T": 37}, "halves")
    x = case.inputs()["x"]
    expected = case.expect({"x": x})
    assert (expected.budget > 0.9).any()
    up = np.floor(x.astype(np.float64) + 0.5)
    same = Case(from_function(rounded), {"N": 20, "T": 37}, "halves")
    assert same.expect({"x": x}).wrong(up).any()
    softmax = Case(from_function(exponentials), {"N": 20, "T": 37}, "halves")
    budget = softmax.expect({"x": x}).budget
    assert (budget > 2.0**-24 * np.exp(x.astype(np.float64) / 8)).all(), "what is smooth may be off"


def exponentials(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "N T"]:
    return np.exp(x / 8)


def test_halves_are_exact_and_each_row_has_the_same_largest() -> None:
    case = Case(from_function(quantized_by_scales), {"N": 5, "T": 30}, "halves")
    inputs = case.inputs()
    x, scales = inputs["x"], inputs["s"]
    assert (2 * x == np.round(2 * x)).all()
    assert (np.abs(x).max(axis=1) == 127).all()
    assert (x != np.round(x)).any(axis=1).all()
    assert (np.log2(scales) == np.round(np.log2(scales))).all()
    empty = operation(at_least={"T": 0})(rounded)
    assert Case(empty, {"N": 2, "T": 0}, "halves").inputs()["x"].shape == (2, 0)


# Widths in the text.

WIDE = tl.constexpr(4096)
HALF = 512


@triton.jit
def of_rows(x_ptr, z_ptr, N, T):
    j = tl.arange(0, 2048)
    x = tl.load(x_ptr + tl.program_id(0) * T + j, mask=j < T, other=0.0)
    tl.store(z_ptr + tl.program_id(0), tl.sum(x, axis=0))


@triton.jit
def of_names(x_ptr, z_ptr, N, T):
    j = tl.arange(0, WIDE)
    x = tl.load(x_ptr + tl.program_id(0) * T + j, mask=j < T, other=0.0)
    tl.store(z_ptr + tl.program_id(0), tl.sum(x, axis=0))


@triton.jit
def by_a_helper(x_ptr, z_ptr, N, T):
    tl.store(z_ptr + tl.program_id(0), first_sum(x_ptr + tl.program_id(0) * T, T))


@triton.jit
def first_sum(x_ptr, T):
    j = tl.arange(HALF - 512, 2 * HALF)
    return tl.sum(tl.load(x_ptr + j, mask=j < T, other=0.0), axis=0)


@triton.jit
def of_constants(x_ptr, z_ptr, N, T, B: tl.constexpr):
    j = tl.arange(0, B)
    k = tl.arange(0, 2 * B)
    tl.store(z_ptr + j, j + tl.sum(k, axis=0))


def totals(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "N"]:
    return x.sum(axis=1)


@pytest.mark.parametrize(
    ("kernel", "width"), [(of_rows, 2048), (of_names, 4096), (by_a_helper, 1024)]
)
def test_widths_in_the_text_name_sizes_to_try(kernel: Any, width: int) -> None:
    assert widths_of(kernel.fn) == (width,)
    subject = subject_of(kernel, totals)
    lengths = {case.sizes["T"] for case in subject.cases()[0]}
    assert {width, width - 1, width + 1, 2 * width} <= lengths
    assert not ran(subject, "normal", N=2, T=width).wrong.any()
    assert ran(subject, "normal", N=2, T=width + 1).wrong.any()


def test_what_is_a_parameter_is_no_width_of_the_text() -> None:
    assert widths_of(of_constants.fn) == ()


# Two large numbers that all but cancel.


@triton.jit
def normalizes(x_ptr, z_ptr, N, T, B: tl.constexpr):
    j = tl.arange(0, B)
    x = tl.load(x_ptr + tl.program_id(0) * T + j, mask=j < T, other=0.0)
    far = tl.where(j < T, x - tl.sum(x, axis=0) / T, 0.0)
    variance = tl.sum(far * far, axis=0) / T
    tl.store(z_ptr + tl.program_id(0) * T + j, far / tl.sqrt(variance + 1e-5), mask=j < T)


@operation(summed=("T",))
def normalized(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "N T"]:
    far = x - x.mean(axis=1, keepdims=True)
    return far / np.sqrt((far**2).mean(axis=1, keepdims=True) + 1e-5)


def close_pairs(count: int, length: int, apart: int) -> Any:
    """Rows of zeros with two large numbers that differ in their last bits."""
    rng = np.random.default_rng(0)
    x = np.zeros((count, length), np.float32)
    x[:, 0] = 200 * (1 + rng.random(count))
    x[:, apart] = x[:, 0] * (1 + 2.0**-21 * rng.integers(1, 9, count))
    return x


def test_two_large_numbers_that_all_but_cancel_are_allowed_their_roundings() -> None:
    case = Case(normalized, {"N": 3000, "T": 2})
    x = close_pairs(3000, 2, 1)
    expected = case.expect({"x": x})
    far = x - x.mean(axis=1, keepdims=True, dtype=np.float32)
    variance = np.mean(far * far, axis=1, keepdims=True, dtype=np.float32)
    kernels = far / np.sqrt(variance + np.float32(1e-5))
    assert not expected.wrong(kernels).any()
    assert expected.budget.min() > 2.0**-12, "each row may be off by what its roundings make"


@pytest.mark.parametrize("fill", ["large", "rising", "offset"])
def test_a_right_normalization_of_rows_of_two(fill: str) -> None:
    subject = subject_of(normalizes, normalized, B=2)
    findings = judge(ran(subject, fill, N=150, T=2))
    assert not [one for one in findings if one.severity == "error"], findings


def differences(
    x: Float32[np.ndarray, "N"], y: Float32[np.ndarray, "N"]
) -> Float32[np.ndarray, "N"]:
    return (x * 3 - y * 3) * 1000


def test_elements_of_two_inputs_that_cancel_move_against_each_other() -> None:
    rng = np.random.default_rng(0)
    x = (200 * (1 + rng.random(20_000))).astype(np.float32)
    y = x * np.float32(1 + 2.0**-20)
    case = Case(from_function(differences), {"N": len(x)})
    budget = case.expect({"x": x, "y": y}).budget
    assert (budget > 1000 * 2.0**-24 * 3 * x).all()
