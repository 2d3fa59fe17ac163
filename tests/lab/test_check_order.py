"""In which order programs stand: what atomic operations order, and what they don't."""

# Triton's own annotations do not know what launches a kernel, and with what.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from jaxtyping import Float32

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from lowbit.spec import operation  # noqa: E402
from lowbit_lab import check  # noqa: E402


@operation(exercise={"N": 3, "T": 70}, at_most={"N": 17})
def sums(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "N"]:
    return x.sum(axis=1)


@operation(exercise={"N": 70}, special=True)
def doubled(x: Float32[np.ndarray, "N"]) -> Float32[np.ndarray, "N"]:
    return 2 * x


@triton.jit
def last_adds_kernel(
    x_ptr, part_ptr, met_ptr, z_ptr, T, SEM: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr
):
    """The last program of a row adds what all have stored."""
    row, at, count = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    j = at * BLOCK + tl.arange(0, BLOCK)
    part = tl.sum(tl.load(x_ptr + row * T + j, mask=j < T, other=0.0), axis=0)
    if EARLY:
        met = tl.atomic_add(met_ptr + row, 1, sem=SEM)
        tl.store(part_ptr + row * count + at, part)
    else:
        tl.store(part_ptr + row * count + at, part)
        met = tl.atomic_add(met_ptr + row, 1, sem=SEM)
    if met == count - 1:
        total = 0.0
        for i in range(count):
            total += tl.load(part_ptr + row * count + i)
        tl.store(z_ptr + row, total)


@triton.jit
def ticket_kernel(x_ptr, part_ptr, met_ptr, z_ptr, T, BLOCK: tl.constexpr):
    """The ticket is drawn first, and whoever has the last adds what others may not have stored."""
    row, count = tl.program_id(0), tl.num_programs(1)
    met = tl.atomic_add(met_ptr + row, 1)
    j = met * BLOCK + tl.arange(0, BLOCK)
    part = tl.sum(tl.load(x_ptr + row * T + j, mask=j < T, other=0.0), axis=0)
    tl.store(part_ptr + row * count + met, part)
    if met == count - 1:
        total = 0.0
        for i in range(count):
            total += tl.load(part_ptr + row * count + i)
        tl.store(z_ptr + row, total)


@triton.jit
def locked_kernel(
    x_ptr, lock_ptr, z_ptr, T, EARLY: tl.constexpr, PLAIN: tl.constexpr, BLOCK: tl.constexpr
):
    """Each program adds to the sum while it holds the lock."""
    row = tl.program_id(0)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    part = tl.sum(tl.load(x_ptr + row * T + j, mask=j < T, other=0.0), axis=0)
    while tl.atomic_cas(lock_ptr + row, 0, 1) == 1:
        pass
    total = tl.load(z_ptr + row) + part
    if EARLY:
        tl.atomic_xchg(lock_ptr + row, 0)
    tl.store(z_ptr + row, total)
    if PLAIN:
        tl.store(lock_ptr + row, 0)
    elif not EARLY:
        tl.atomic_xchg(lock_ptr + row, 0)


@triton.jit
def counts_and_shares_kernel(x_ptr, count_ptr, y_ptr, z_ptr, N, BLOCK: tl.constexpr):
    """What a program reads was written by the one before, and a counter says nothing of it."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, 2 * tl.load(x_ptr + i, mask=i < N), mask=i < N)
    tl.atomic_add(count_ptr, 1, sem="relaxed")
    before = i - BLOCK
    own = tl.load(y_ptr + i, mask=i < N)
    other = tl.load(y_ptr + before, mask=(before >= 0) & (before < N), other=0.0)
    tl.store(z_ptr + i, own + 0 * other, mask=i < N)


@triton.jit
def reads_what_is_added_kernel(x_ptr, z_ptr, T, BLOCK: tl.constexpr):
    """The sum is looked at while others still add to it."""
    row = tl.program_id(0)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    part = tl.sum(tl.load(x_ptr + row * T + j, mask=j < T, other=0.0), axis=0)
    tl.atomic_add(z_ptr + row, part, sem="relaxed")
    if tl.load(z_ptr + row) == 0.0:
        tl.atomic_add(z_ptr + row, 0.0, sem="relaxed")


def last_adds(x: Tensor, sem: str = "acq_rel", early: bool = False) -> Tensor:
    x, count = x.contiguous(), triton.cdiv(x.shape[1], 32)
    z, part = torch.empty(len(x)), torch.empty(len(x), count)
    met = torch.zeros(len(x), dtype=torch.int32)
    last_adds_kernel[(len(x), count)](x, part, met, z, x.shape[1], sem, early, 32)
    return z


def draws_a_ticket_first(x: Tensor) -> Tensor:
    x, count = x.contiguous(), triton.cdiv(x.shape[1], 32)
    z, part = torch.empty(len(x)), torch.empty(len(x), count)
    met = torch.zeros(len(x), dtype=torch.int32)
    ticket_kernel[(len(x), count)](x, part, met, z, x.shape[1], 32)
    return z


def last_adds_relaxed(x: Tensor) -> Tensor:
    return last_adds(x, "relaxed")


def last_adds_what_only_acquires(x: Tensor) -> Tensor:
    return last_adds(x, "acquire")


def last_adds_stores_late(x: Tensor) -> Tensor:
    return last_adds(x, early=True)


def locked(x: Tensor, early: bool = False, plain: bool = False) -> Tensor:
    x, z, lock = x.contiguous(), torch.zeros(len(x)), torch.zeros(len(x), dtype=torch.int32)
    grid = len(x), triton.cdiv(x.shape[1], 32)
    locked_kernel[grid](x, lock, z, x.shape[1], early, plain, 32)
    return z


def released_early(x: Tensor) -> Tensor:
    return locked(x, early=True)


def released_by_a_plain_store(x: Tensor) -> Tensor:
    return locked(x, plain=True)


def counts_and_shares(x: Tensor) -> Tensor:
    x, y, z = x.contiguous(), torch.zeros(len(x)), torch.empty(len(x))
    count = torch.zeros(1, dtype=torch.int32)
    counts_and_shares_kernel[(triton.cdiv(len(x), 32),)](x, count, y, z, len(x), 32)
    return z


def reads_what_is_added(x: Tensor) -> Tensor:
    x, z = x.contiguous(), torch.zeros(len(x))
    grid = len(x), triton.cdiv(x.shape[1], 32)
    reads_what_is_added_kernel[grid](x, z, x.shape[1], 32)
    return z


@triton.jit
def counts_for_itself_kernel(x_ptr, count_ptr, z_ptr, N):
    program = tl.program_id(0)
    first = tl.load(z_ptr)
    tl.atomic_add(count_ptr + program, 1)
    if program == N - 1:
        tl.store(z_ptr, tl.load(x_ptr + program) * 2 + first * 0)
    else:
        tl.store(z_ptr + program + 1, tl.load(x_ptr + program) * 2 + first * 0)


def counts_for_itself(x: Tensor) -> Tensor:
    x, count = x.contiguous(), torch.zeros(len(x), dtype=torch.int32)
    z = torch.zeros(len(x))
    counts_for_itself_kernel[(len(x),)](x, count, z, len(x))
    return z.roll(-1)


@pytest.mark.parametrize(
    ("function", "spec", "kind"),
    [
        (counts_for_itself, doubled, "read-of-other"),
        (draws_a_ticket_first, sums, "read-of-other"),
        (last_adds_relaxed, sums, "read-of-other"),
        (last_adds_what_only_acquires, sums, "read-of-other"),
        (last_adds_stores_late, sums, "read-of-other"),
        (released_early, sums, "write-conflict"),
        (released_by_a_plain_store, sums, "write-conflict"),
        (counts_and_shares, doubled, "read-of-other"),
        (reads_what_is_added, sums, "read-of-other"),
    ],
)
def test_races_behind_atomic_operations(function: Any, spec: Any, kind: str) -> None:
    result = check(function, spec, stop=True)
    assert not result
    assert kind in {finding.kind for finding in result.findings}


@pytest.mark.deep
@pytest.mark.parametrize("function", [last_adds, locked])
def test_what_atomic_operations_order_is_right(function: Any) -> None:
    result = check(function, sums)
    assert result, result
