"""What a specification can state: sizes in the reference, size 0; and memory of a kernel's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from jaxtyping import Float32

from lowbit.spec import from_function, operation
from lowbit_lab import Scratch, check, view

# Triton's own annotations do not know what a kernel's pointers are.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false


def ramp(x: Float32[np.ndarray, "N"], M: int) -> Float32[np.ndarray, "N M"]:
    return x[:, None] + np.arange(M)


@triton.jit
def ramp_rows(x_ptr, z_ptr, N, M, FIRST: tl.constexpr, B: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0))
    for start in range(0, M, B):
        j = start + tl.arange(0, B)
        tl.store(z_ptr + tl.program_id(0) * M + j, x + (j + FIRST), mask=j < M)


def rows(meta: dict[str, Any]) -> tuple[int]:
    return (meta["N"],)


@pytest.mark.deep
def test_a_reference_is_given_sizes() -> None:
    assert check(ramp_rows, ramp, grid=rows, FIRST=0, device="cpu", stop=True)


def test_a_wrong_kernel_of_such_a_reference() -> None:
    result = check(ramp_rows, ramp, grid=rows, FIRST=1, device="cpu", stop=True)
    assert result.kinds == ("wrong-values",)


def test_a_size_that_there_is_not_is_refused() -> None:
    def of_nothing(x: Float32[np.ndarray, "N"], K: int) -> Float32[np.ndarray, "N"]:
        return x + K

    with pytest.raises(ValueError, match=r"K is annotated int.* N;"):
        from_function(of_nothing)


@operation(summed=("T",), at_least={"N": 0, "T": 0})
def totals(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "N"]:
    return x.sum(axis=1)


@triton.jit
def sum_of_rows(x_ptr, z_ptr, N, T, EARLY: tl.constexpr, B: tl.constexpr):
    if not EARLY or T > 0:
        total = tl.zeros((B,), tl.float32)
        for start in range(0, T, B):
            j = start + tl.arange(0, B)
            total += tl.load(x_ptr + tl.program_id(0) * T + j, mask=j < T, other=0.0)
        tl.store(z_ptr + tl.program_id(0), tl.sum(total, axis=0))


@pytest.mark.deep
def test_size_0_is_tried_where_a_specification_has_it() -> None:
    assert check(sum_of_rows, totals, grid=rows, EARLY=False, device="cpu", stop=True)
    result = check(sum_of_rows, totals, grid=rows, EARLY=True, device="cpu", stop=True)
    assert result.kinds == ("unwritten",)
    assert result.findings[0].sizes is not None
    assert result.findings[0].sizes["T"] == 0


def test_size_0_is_refused_where_it_has_not() -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        from_function(ramp).case({"N": 0, "M": 3})


def sums(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "N"]:
    return x.sum(axis=1)


@triton.jit
def last_one_adds(x_ptr, parts_ptr, count_ptr, z_ptr, N, T, B: tl.constexpr):
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    j = part * B + tl.arange(0, B)
    x = tl.load(x_ptr + row * T + j, mask=j < T, other=0.0)
    tl.store(parts_ptr + row * parts + part, tl.sum(x, axis=0))
    if tl.atomic_add(count_ptr + row, 1) == parts - 1:
        total = 0.0
        for one in range(parts):
            total += tl.load(parts_ptr + row * parts + one)
        tl.store(z_ptr + row, total)


def parts(meta: dict[str, Any]) -> tuple[int, int]:
    return meta["N"], triton.cdiv(meta["T"], meta["B"])


PARTS = Scratch("float32", "N (T+B-1)//B")


@pytest.mark.deep
def test_memory_of_a_kernels_own() -> None:
    given = {"parts_ptr": PARTS, "count_ptr": Scratch("int32", "N", initial=0)}
    result = check(last_one_adds, sums, grid=parts, device="cpu", stop=True, **given)
    assert result.ok, str(result)


def test_scratch_that_nobody_has_filled_or_that_is_too_small() -> None:
    given = {"parts_ptr": PARTS, "count_ptr": Scratch("int32", "N")}
    result = check(last_one_adds, sums, grid=parts, device="cpu", stop=True, **given)
    assert "unwritten-read" in result.kinds
    given = {"parts_ptr": Scratch("float32", "N"), "count_ptr": Scratch("int32", "N", initial=0)}
    result = check(last_one_adds, sums, grid=parts, device="cpu", stop=True, **given)
    assert "out-of-bounds-store" in result.kinds


def test_scratch_is_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match="no dtype 'f32'"):
        Scratch("f32", "N")
    with pytest.raises(ValueError, match="not understood"):
        Scratch("int32", "N.real")
    given = {"parts_ptr": Scratch("float32", "Q"), "count_ptr": Scratch("int32", "N", initial=0)}
    with pytest.raises(ValueError, match=r"shape of parts_ptr.*'Q'.* there are N"):
        check(last_one_adds, sums, grid=parts, device="cpu", **given)


def test_scratch_is_in_a_view() -> None:
    given = {"parts_ptr": PARTS, "count_ptr": Scratch("int32", "N", initial=0)}
    page = view(last_one_adds, sums, grid=parts, sizes={"N": 2, "T": 40}, **given)
    assert '"name":"parts_ptr"' in page.json()
