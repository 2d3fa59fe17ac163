"""Right kernels that use the less used parts of the language."""

# Triton's own annotations do not know tensors as conditions.
# pyright: reportArgumentType=false, reportOptionalOperand=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from lowbit.spec.exercises import (
    add_constant_blocks,
    long_sum,
    mul_relu_backward,
    outer_add_blocks,
)


def blocks(meta):
    return (triton.cdiv(meta["N0"], meta["B0"]),)


def blocks2(meta):
    return (triton.cdiv(meta["N0"], meta["B0"]), triton.cdiv(meta["N1"], meta["B1"]))


def blocks_of_all(meta):
    return triton.cdiv(meta["N0"] * meta["N1"], meta["B"])


def rows(meta):
    return meta["N0"]


@triton.jit
def flat_index(x_ptr, y_ptr, z_ptr, N0, N1, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    inside = at < N0 * N1
    x = tl.load(x_ptr + at % N0, inside)
    tl.store(z_ptr + at, x + tl.load(y_ptr + at // N0, inside), inside)


@triton.jit
def last_lanes_repeat(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    at = tl.where(i < N0, i, N0 - 1)
    tl.store(z_ptr + at, tl.load(x_ptr + at) + 10.0)


@triton.jit
def from_the_end(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = N0 - 1 - (tl.program_id(0) * B0 + tl.arange(0, B0))
    tl.store(z_ptr + i, tl.load(x_ptr + i, mask=i >= 0) + 10.0, mask=i >= 0)


@triton.jit
def words_for_logic(x_ptr, y_ptr, z_ptr, N0, N1, B0: tl.constexpr, B1: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    j = tl.program_id(1) * B1 + tl.arange(0, B1)
    x = tl.load(x_ptr + i, mask=(i >= 0) and (i < N0))
    y = tl.load(y_ptr + j, mask=not ((j < 0) or (j >= N1)))
    if B0 > 1 and not (N0 == 0 or N1 == 0):
        inside = (j[:, None] < N1) and (i[None, :] < N0)
        tl.store(z_ptr + j[:, None] * N0 + i[None, :], x[None, :] + y[:, None], mask=inside)


@triton.jit
def _sum_and_difference(x, by: tl.constexpr = 10.0):
    return x + by, x - by


@triton.jit
def helper_returns_two(x_ptr, z_ptr, N0, B0: tl.constexpr):
    tl.static_assert(B0 >= 2)
    i = tl.max_contiguous(tl.program_id(0) * B0 + tl.arange(0, B0), B0)
    tl.device_assert(i >= 0, "negative")
    total, _ = _sum_and_difference(tl.load(x_ptr + i, i < N0, 0.0, volatile=True))
    tl.store(z_ptr + i, total, i < N0, eviction_policy="evict_first")


@triton.jit
def splits_and_joins(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    x = tl.load(x_ptr + i, mask=i < N0, other=0.0)
    even, odd = tl.split(tl.reshape(x, (B0 // 2, 2)))
    z = tl.reshape(tl.join(even + 10.0, odd + 10.0), (B0,))
    tl.store(z_ptr + i, z, mask=i < N0)


@triton.jit
def whole_blocks_then_single_elements(x_ptr, z_ptr, N0, B0: tl.constexpr):
    whole = N0 // B0
    if tl.program_id(0) < whole:
        i = tl.program_id(0) * B0 + tl.arange(0, B0)
        tl.store(z_ptr + i, tl.load(x_ptr + i) + 10.0)
    else:
        for one in range(whole * B0, N0):
            tl.store(z_ptr + one, tl.load(x_ptr + one) + 10.0)


@triton.jit
def _added(left, right):
    return left + right


@triton.jit
def downwards_and_compensated(x_ptr, z_ptr, N0, T, B1: tl.constexpr):
    total = tl.zeros((B1,), tl.float32)
    lost = tl.zeros((B1,), tl.float32)
    for block in range(tl.cdiv(T, B1) - 1, -1, -1):
        j = block * B1 + tl.arange(0, B1)
        x = tl.load(x_ptr + tl.program_id(0) * T + j, mask=j < T, other=0.0) - lost
        now = total + x
        lost = (now - total) - x
        total = now
    tl.atomic_xchg(z_ptr + tl.program_id(0), tl.reduce(total, 0, _added))


@triton.jit
def exchanges_until_it_fits(x_ptr, z_ptr, N0, B0: tl.constexpr):
    for i in range(tl.program_id(0) * B0, tl.minimum(N0, tl.program_id(0) * B0 + B0)):
        bits = (z_ptr + i).to(tl.pointer_type(tl.int32))
        z = (tl.load(x_ptr + i) + 10.0).to(tl.int32, bitcast=True)
        old = tl.atomic_cas(bits, 0, z)
        while old != 0:
            old = tl.atomic_cas(bits, old, 0)


@triton.jit
def mask_is_multiplied(x_ptr, y_ptr, dz_ptr, dx_ptr, N0, N1, B0: tl.constexpr, B1: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    j = tl.program_id(1) * B1 + tl.arange(0, B1)
    inside = (j < N1)[:, None] & (i < N0)[None, :]
    at = j[:, None] * N0 + i[None, :]
    x = tl.load(x_ptr + at, mask=inside)
    y = tl.load(y_ptr + j, mask=j < N1)[:, None]
    dz = tl.load(dz_ptr + at, mask=inside)
    tl.store(dx_ptr + at, (x * y > 0).to(tl.float32) * y * dz, mask=inside)


@triton.jit
def loops_count_in_tensors(x_ptr, z_ptr, N0, B0: tl.constexpr):
    for block in tl.range(tl.program_id(0), tl.cdiv(N0, B0), tl.num_programs(0), num_stages=2):
        i = block.to(tl.int64) * B0 + tl.arange(0, B0)
        x = tl.load(x_ptr + i, mask=i < N0)
        for step in range(2):
            x += tl.where(step == 1, 7.0, 3.0)
        for step in tl.static_range(2):
            x += step - 0.5
        tl.store(z_ptr + i, x, mask=i < N0)


@triton.jit
def blocks_of_32_only(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * 32 + tl.arange(0, B0)
    tl.store(z_ptr + i, tl.load(x_ptr + i, mask=i < N0) + 10.0, mask=i < N0)


ADD = {"spec": add_constant_blocks, "grid": blocks}
# The kernel, what it is checked with, and the warnings that are due.
UNUSUAL = [
    (flat_index, {"spec": outer_add_blocks, "grid": blocks_of_all, "B": 128}, ()),
    (last_lanes_repeat, ADD, ()),
    (from_the_end, ADD, ()),
    (words_for_logic, {"spec": outer_add_blocks, "grid": blocks2}, ()),
    (helper_returns_two, ADD, ()),
    (splits_and_joins, ADD, ()),
    (whole_blocks_then_single_elements, ADD, ()),
    (downwards_and_compensated, {"spec": long_sum, "grid": rows}, ("special-values",)),
    (exchanges_until_it_fits, {**ADD, "initial": 0.0}, ()),
    (loops_count_in_tensors, ADD, ()),
    (mask_is_multiplied, {"spec": mul_relu_backward, "grid": blocks2}, ("special-values",)),
    (blocks_of_32_only, ADD, ("block-sizes",)),
]
