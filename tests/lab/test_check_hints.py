"""Hints to Triton's compiler are held against the values that they speak of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from jaxtyping import Float32, Int32

from lowbit.spec import Case, operation
from lowbit_lab import watch
from lowbit_lab.backends.backend import Request, Variant
from lowbit_lab.backends.language import bound
from lowbit_lab.run.findings import Finding
from lowbit_lab.run.outcome import Trial

# Triton's own annotations do not know what a kernel's pointers are.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportCallIssue=false


def blocks(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["N"], meta["B"]),)


@operation(ranges={"k": (0, "N")})
def twice(x: Float32[np.ndarray, "N"], k: Int32[np.ndarray, "N"]) -> Float32[np.ndarray, "N"]:
    return 2 * x


# Kernels that double x; most lines with a hint are what is tested.


@triton.jit
def of_a_range(x_ptr, k_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    i = tl.max_contiguous(tl.multiple_of(i, B), B)
    tl.store(z_ptr + i, 2 * tl.load(x_ptr + i, mask=i < N), mask=i < N)


@triton.jit
def the_other_way_round(x_ptr, k_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    i = tl.multiple_of(tl.max_contiguous(i, B), 4)
    tl.store(z_ptr + i, 2 * tl.load(x_ptr + i, mask=i < N), mask=i < N)


@triton.jit
def of_steps_of_two(x_ptr, k_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(z_ptr + i, 2 * tl.load(x_ptr + i, mask=i < N), mask=i < N)
    tl.multiple_of(i * 2, 2)
    tl.max_contiguous(i * 2, 1)


@triton.jit
def of_numbers(x_ptr, k_ptr, z_ptr, N, B: tl.constexpr):
    first = tl.multiple_of(tl.program_id(0) * B, B)
    i = first + tl.arange(0, B)
    for more in range(0, B, 8):
        tl.multiple_of(more, 8)
    tl.store(z_ptr + i, 2 * tl.load(x_ptr + i, mask=i < N), mask=i < N)


@triton.jit
def of_what_is_constant(x_ptr, k_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.max_constancy(i // 4, 4)
    tl.max_constancy(i < N, 1)
    tl.store(z_ptr + i, 2 * tl.load(x_ptr + i, mask=i < N), mask=i < N)


@triton.jit
def of_planes(x_ptr, k_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)[None, :] + tl.zeros((2, 1), tl.int32)
    i = tl.max_contiguous(tl.multiple_of(i, [1, B]), [1, B])
    i = tl.max_constancy(i, [2, 1])
    tl.store(z_ptr + i, 2 * tl.load(x_ptr + i, mask=i < N), mask=i < N)


@triton.jit
def of_pointers(x_ptr, k_ptr, z_ptr, N, B: tl.constexpr):
    x_ptr = tl.multiple_of(x_ptr, 16)
    i = tl.program_id(0) * B + tl.arange(0, B)
    x_ptrs = tl.max_contiguous(tl.multiple_of(x_ptr + i, 4 * B), B)
    tl.store(z_ptr + i, 2 * tl.load(x_ptrs, mask=i < N), mask=i < N)


@triton.jit
def of_undefined_lanes(x_ptr, k_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.multiple_of(2 * tl.load(k_ptr + i, mask=i < N), 2)
    tl.store(z_ptr + i, 2 * tl.load(x_ptr + i, mask=i < N), mask=i < N)


TRUE = [
    of_a_range, the_other_way_round, of_steps_of_two, of_numbers, of_what_is_constant, of_planes,
    of_pointers, of_undefined_lanes,
]  # fmt: skip


@triton.jit
def gathers_by_twos(x_ptr, k_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    j = tl.max_contiguous(tl.multiple_of(i * 2, 8), 8)  # false
    x = tl.load(x_ptr + j // 2, mask=i < N)
    tl.store(z_ptr + i, 2 * x, mask=i < N)


@triton.jit
def neighbours_that_are_none(x_ptr, k_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.max_contiguous(i * 2, 2)  # false
    tl.store(z_ptr + i, 2 * tl.load(x_ptr + i, mask=i < N), mask=i < N)


@triton.jit
def one_further(x_ptr, k_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.multiple_of(i + 1, 4)  # false
    tl.store(z_ptr + i, 2 * tl.load(x_ptr + i, mask=i < N), mask=i < N)


@triton.jit
def wraps_in_a_block(x_ptr, k_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    j = tl.max_contiguous(i % N, B)  # false
    tl.store(z_ptr + i, 2 * tl.load(x_ptr + j), mask=i < N)


@triton.jit
def a_size_that_need_not_be(x_ptr, k_ptr, z_ptr, N, B: tl.constexpr):
    n = tl.multiple_of(N, 16)  # false
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(z_ptr + i, 2 * tl.load(x_ptr + i, mask=i < n), mask=i < n)


@triton.jit
def in_a_loop(x_ptr, k_ptr, z_ptr, N, B: tl.constexpr):
    for start in range(tl.program_id(0) * B, min(N, tl.program_id(0) * B + B), 4):
        tl.multiple_of(start, 8)  # false
        i = start + tl.arange(0, 4)
        tl.store(z_ptr + i, 2 * tl.load(x_ptr + i, mask=i < N), mask=i < N)


@triton.jit
def by_a_loaded_index(x_ptr, k_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    k = tl.load(k_ptr + i, mask=i < N, other=0)
    tl.max_constancy(k, 4)  # false
    tl.store(z_ptr + i, 2 * tl.load(x_ptr + i, mask=i < N), mask=i < N)


@triton.jit
def along_the_other_axis(x_ptr, k_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)[None, :] + tl.zeros((2, 1), tl.int32)
    i = tl.max_contiguous(i, [2, 1])  # false
    tl.store(z_ptr + i, 2 * tl.load(x_ptr + i, mask=i < N), mask=i < N)


@triton.jit
def of_shifted_pointers(x_ptr, k_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.multiple_of(x_ptr + i + 1, 16)  # false
    tl.store(z_ptr + i, 2 * tl.load(x_ptr + i, mask=i < N), mask=i < N)


@triton.jit
def in_a_helper(x_ptr, k_ptr, z_ptr, N, B: tl.constexpr):
    i = hinted(tl.program_id(0) * B + tl.arange(0, B) + 1) - 1
    tl.store(z_ptr + i, 2 * tl.load(x_ptr + i, mask=i < N), mask=i < N)


@triton.jit
def hinted(i):
    return tl.multiple_of(i, 8)  # false


FALSE = [
    gathers_by_twos, neighbours_that_are_none, one_further, wraps_in_a_block,
    a_size_that_need_not_be, in_a_loop, by_a_loaded_index, along_the_other_axis,
    of_shifted_pointers, in_a_helper,
]  # fmt: skip


def findings(kernel: Any, size: int = 43) -> tuple[Finding, ...]:
    request = Request(Variant(kernel, grid=blocks, constants={"B": 32}), twice)
    subject = bound(request)
    run = subject.run(Trial.of(Case(subject.operation, {"N": size}), 0))
    assert run.crash is None
    assert not run.wrong.any()
    return run.memory.findings


@pytest.mark.parametrize("kernel", TRUE)
def test_a_hint_that_holds_is_no_finding(kernel: Any) -> None:
    # Planes write their two lines to the same elements.
    assert not findings(kernel)


@pytest.mark.parametrize("kernel", FALSE)
def test_a_false_hint_is_an_error_with_its_line(kernel: Any) -> None:
    (finding,) = findings(kernel)
    assert (finding.kind, finding.severity) == ("false-hint", "error")
    assert finding.place is not None
    line = Path(finding.place.file).read_text().splitlines()[finding.place.line - 1]
    assert "# false" in line


def test_the_message_says_which_lane_belies_it() -> None:
    (finding,) = findings(neighbours_that_are_none)
    assert "tl.max_contiguous(..., 2) does not hold in program [0, 0, 0]" in finding.message
    assert "lane [1] is 2, after 0" in finding.message
    (finding,) = findings(a_size_that_need_not_be)
    assert "tl.multiple_of(..., 16) does not hold in program [0, 0, 0]: it is 43" in finding.message
    assert not findings(a_size_that_need_not_be, 48)


def test_views_that_are_not_aligned_belie_a_hint_of_their_pointer() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("it would run on the GPU")
    x, k, z = torch.zeros(41), torch.zeros(40, dtype=torch.int32), torch.empty(40)
    with watch() as log:
        of_pointers[(2,)](x[:40], k, z, 40, B=32)
    assert not log.findings, str(log)
    with watch() as log:
        of_pointers[(2,)](x[1:], k, z, 40, B=32)
    assert log.kinds == ("false-hint",)
