"""Offsets of 32 bits in tensors that they cannot count, and products in TF32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from jaxtyping import Float32

from lowbit.spec import operation
from lowbit.spec.rounding import to_24_bits, to_tf32
from lowbit_lab import check
from lowbit_lab.backends.backend import Request, Variant
from lowbit_lab.backends.language import bound

# Triton's own annotations do not know what a kernel's pointers are.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false


def blocks(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["N"], meta["B"]),)


def rows(meta: dict[str, Any]) -> tuple[int]:
    return (meta["N"],)


def twice(x: Float32[np.ndarray, "N"]) -> Float32[np.ndarray, "N"]:
    return 2 * x


def twice_in_rows(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "N T"]:
    return 2 * x


@triton.jit
def by_blocks(x_ptr, z_ptr, N, WIDE: tl.constexpr, B: tl.constexpr):
    program = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)
    i = program * B + tl.arange(0, B)  # it wraps here
    tl.store(z_ptr + i, 2 * tl.load(x_ptr + i, mask=i < N), mask=i < N)


@triton.jit
def by_strides(x_ptr, z_ptr, N, T, stride_x0, stride_z0, WIDE: tl.constexpr, B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)
    for start in range(0, T, B):
        j = start + tl.arange(0, B)
        x = tl.load(x_ptr + row * stride_x0 + j, mask=j < T)  # it wraps here
        tl.store(z_ptr + row * stride_z0 + j, 2 * x, mask=j < T)


@triton.jit
def wraps_on_purpose(x_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    noise = (tl.program_id(0) * 1103515245 + 12345) * 1103515245
    x = tl.load(x_ptr + i, mask=i < N)
    tl.store(z_ptr + i, tl.where(noise == noise, 2 * x, 0.0), mask=i < N)


def refusals(kernel: Any, spec: Any, grid: Any, **given: Any) -> Any:
    subject = bound(Request(Variant(kernel, grid=grid, constants=given), spec))
    return subject.refusals(subject.cases()[0][0])


@pytest.mark.parametrize(
    ("kernel", "spec", "grid", "severity"),
    [(by_blocks, twice, blocks, "note"), (by_strides, twice_in_rows, rows, "warning")],
)
def test_offsets_that_wrap_are_named_with_the_line(
    kernel: Any, spec: Any, grid: Any, severity: str
) -> None:
    (finding,) = refusals(kernel, spec, grid, WIDE=False)
    assert (finding.kind, finding.severity) == ("offset-overflow", severity)
    assert "x has more than 2^31 elements" in finding.message
    text = Path(finding.place.file).read_text().splitlines()[finding.place.line - 1]
    assert "# it wraps here" in text
    assert not refusals(kernel, spec, grid, WIDE=True)


def test_they_are_an_error_where_the_specification_goes_so_far() -> None:
    large = operation(at_most={"N": 1 << 22, "T": 4096})(twice_in_rows)
    (finding,) = refusals(by_strides, large, rows, WIDE=False)
    assert finding.severity == "error"
    small = operation(at_most={"N": 1 << 16, "T": 4096})(twice_in_rows)
    assert not refusals(by_strides, small, rows, WIDE=False)


@triton.jit
def in_steps(x_ptr, z_ptr, N, T, GROUP: tl.constexpr, B: tl.constexpr):
    for start in range(0, T, B):
        j = start + tl.arange(0, B)
        x = tl.load(x_ptr + tl.program_id(0) * T + j, mask=j < T)
        tl.store(z_ptr + tl.program_id(0) * T + j, 2 * x, mask=j < T)


def test_loops_that_are_too_long_and_other_constants_hide_nothing() -> None:
    large = operation(at_most={"N": 4096, "T": 1 << 20})(twice_in_rows)
    for block in (32, 4096):
        (finding,) = refusals(in_steps, large, rows, GROUP=1 << 16, B=block)
        assert finding.severity == "error"


@triton.autotune([triton.Config({"B": 32}), triton.Config({"B": 128})], key=["T"])
@triton.jit
def wrong_when_tuned_otherwise(x_ptr, z_ptr, stride_x0, N, T, B: tl.constexpr):
    j = tl.program_id(1) * B + tl.arange(0, B)
    x = tl.load(x_ptr + tl.program_id(0) * stride_x0 + j, mask=j < T)
    if B == 128:
        x = x + 1
    tl.store(z_ptr + tl.program_id(0) * T + j, 2 * x, mask=j < T)


@pytest.mark.deep
def test_other_configurations_are_tried_although_offsets_may_wrap() -> None:
    grid = lambda meta: (meta["N"], triton.cdiv(meta["T"], meta["B"]))  # noqa: E731
    result = check(wrong_when_tuned_otherwise, twice_in_rows, grid=grid, device="cpu")
    assert {"offset-overflow", "block-sizes"} <= {one.kind for one in result.findings}


def test_what_wraps_and_is_no_offset_is_no_finding() -> None:
    assert not refusals(wraps_on_purpose, twice, blocks)


@pytest.mark.deep
def test_a_check_says_so_and_passes() -> None:
    result = check(by_blocks, twice, grid=blocks, WIDE=False, device="cpu")
    assert result.ok
    assert not result.findings
    assert any("offsets of 32 bits wrap when x has" in note for note in result.notes)


@operation(exercise={"M": 40, "K": 64, "N": 72}, blocks={"BM": 32, "BN": 32, "BK": 32})
def product(
    a: Float32[np.ndarray, "M K"], b: Float32[np.ndarray, "K N"]
) -> Float32[np.ndarray, "M N"]:
    return a @ b


exactly = operation(tf32=False, exercise=product.exercise, blocks=product.blocks)(product.reference)


@triton.jit
def multiply(
    a_ptr, b_ptr, z_ptr, M, K, N, HOW: tl.constexpr, LOST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    i, j = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    z = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K - LOST, BK):
        k = start + tl.arange(0, BK)
        inside_a = (i < M)[:, None] & (k < K - LOST)[None, :]
        inside_b = (k < K - LOST)[:, None] & (j < N)[None, :]
        a = tl.load(a_ptr + i[:, None] * K + k[None, :], mask=inside_a, other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + j[None, :], mask=inside_b, other=0.0)
        z = tl.dot(a, b, z, input_precision=HOW)
    inside = (i < M)[:, None] & (j < N)[None, :]
    tl.store(z_ptr + i[:, None] * N + j[None, :], z, mask=inside)


def tiles(meta: dict[str, Any]) -> tuple[int, int]:
    return triton.cdiv(meta["M"], meta["BM"]), triton.cdiv(meta["N"], meta["BN"])


def multiplied(spec: Any, how: str | None, lost: int = 0) -> Any:
    return check(multiply, spec, grid=tiles, HOW=how, LOST=lost, device="cpu", stop=True)


@pytest.mark.deep
@pytest.mark.parametrize("how", [None, "tf32", "ieee"])
def test_a_product_may_be_in_tf32(how: str | None) -> None:
    result = multiplied(product, how)
    assert result.ok, str(result)
    assert any("TF32" in note for note in result.notes) is (how != "ieee")


def test_a_product_in_tf32_is_held_to_float32_where_the_specification_says_so() -> None:
    assert multiplied(exactly, "tf32").kinds == ("wrong-values",)
    assert multiplied(product, "tf32", lost=1).kinds == ("wrong-values",)


def test_rounding_to_tf32_and_to_24_bits() -> None:
    step = 2.0**-10
    values = np.array([1 + step / 2, 1 + 0.49 * step, -1 - step / 2, np.inf, np.nan], np.float32)
    want = np.array([1 + step, 1, -1 - step, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(to_tf32(values), want)
    numbers = np.random.default_rng(0).standard_normal(1000)
    np.testing.assert_array_equal(to_24_bits(numbers), numbers.astype(np.float32))
    np.testing.assert_array_equal(to_24_bits(np.array([-1e300, np.nan]))[1:], [np.nan])
    assert abs(to_24_bits(np.array([-1e300]))[0] / -1e300 - 1) < 2.0**-23
