"""Wrong kernels for the elementwise operations: masks, grids, races."""

from __future__ import annotations

import triton
import triton.language as tl

from lowbit.spec.exercises import add_constant_blocks, mul_relu_backward, outer_add_blocks


def blocks(meta):
    return (triton.cdiv(meta["N0"], meta["B0"]),)


def blocks2(meta):
    return (triton.cdiv(meta["N0"], meta["B0"]), triton.cdiv(meta["N1"], meta["B1"]))


@triton.jit
def load_without_mask(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    tl.store(z_ptr + i, tl.load(x_ptr + i) + 10.0, mask=i < N0)


@triton.jit
def store_without_mask(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    x = tl.load(x_ptr + i, mask=i < N0)
    tl.store(z_ptr + i, x + 10.0)


@triton.jit
def load_one_too_many(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    x = tl.load(x_ptr + i, mask=i <= N0)
    tl.store(z_ptr + i, x + 10.0, mask=i < N0)


@triton.jit
def store_one_too_many(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    x = tl.load(x_ptr + i, mask=i < N0)
    tl.store(z_ptr + i, x + 10.0, mask=i <= N0)


@triton.jit
def load_before_the_first(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    left = tl.load(x_ptr + i - 1, mask=i < N0)
    x = tl.load(x_ptr + i, mask=i < N0)
    tl.store(z_ptr + i, tl.where(i < 0, left, x) + 10.0, mask=i < N0)


@triton.jit
def last_block_left_out(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    x = tl.load(x_ptr + i, mask=i < N0)
    tl.store(z_ptr + i, x + 10.0, mask=i < N0)


@triton.jit
def spills_into_the_next_block(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    x = tl.load(x_ptr + i, mask=i < N0)
    tl.store(z_ptr + i + 1, x, mask=i + 1 < N0)
    tl.store(z_ptr + i, x + 10.0, mask=i < N0)


@triton.jit
def writes_its_input(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    x = tl.load(x_ptr + i, mask=i < N0) + 10.0
    tl.store(x_ptr + i, x, mask=i < N0)
    tl.store(z_ptr + i, x, mask=i < N0)


@triton.jit
def adds_to_what_was_never_written(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    x = tl.load(x_ptr + i, mask=i < N0)
    z = tl.load(z_ptr + i, mask=i < N0)
    tl.store(z_ptr + i, z * 0.0 + x + 10.0, mask=i < N0)


@triton.jit
def lanes_collide(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    x = tl.load(x_ptr + i, mask=i < N0)
    tl.store(z_ptr + i // 2, x, mask=i < N0)
    tl.store(z_ptr + i, x + 10.0, mask=i < N0)


@triton.jit
def rounds_to_bfloat16(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    x = tl.load(x_ptr + i, mask=i < N0).to(tl.bfloat16).to(tl.float32)
    tl.store(z_ptr + i, x + 10.0, mask=i < N0)


@triton.jit
def block_of_no_power_of_two(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * 24 + tl.arange(0, 24)
    x = tl.load(x_ptr + i, mask=i < N0)
    tl.store(z_ptr + i, x + 10.0, mask=i < N0)


@triton.jit
def reads_what_others_replace(x_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    x = tl.load(x_ptr + N0 - 1 - i, mask=i < N0)
    mine = tl.load(x_ptr + i, mask=i < N0)
    tl.store(x_ptr + i, tl.where(x < -1e30, x, mine) + 10.0, mask=i < N0)


@triton.jit
def mask_is_always_true(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    x = tl.load(x_ptr + i, mask=i <= tl.max(i, axis=0))
    tl.store(z_ptr + i, x + 10.0, mask=i < N0)


@triton.jit
def axes_of_the_grid_swapped(x_ptr, y_ptr, z_ptr, N0, N1, B0: tl.constexpr, B1: tl.constexpr):
    i = tl.program_id(1) * B0 + tl.arange(0, B0)
    j = tl.program_id(0) * B1 + tl.arange(0, B1)
    x = tl.load(x_ptr + i, mask=i < N0)
    y = tl.load(y_ptr + j, mask=j < N1)
    inside = (j < N1)[:, None] & (i < N0)[None, :]
    tl.store(z_ptr + j[:, None] * N0 + i[None, :], x[None, :] + y[:, None], mask=inside)


@triton.jit
def stride_of_the_other_axis(x_ptr, y_ptr, z_ptr, N0, N1, B0: tl.constexpr, B1: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    j = tl.program_id(1) * B1 + tl.arange(0, B1)
    x = tl.load(x_ptr + i, mask=i < N0)
    y = tl.load(y_ptr + j, mask=j < N1)
    inside = (j < N1)[:, None] & (i < N0)[None, :]
    tl.store(z_ptr + j[:, None] + i[None, :] * N1, x[None, :] + y[:, None], mask=inside)


@triton.jit
def mask_of_one_axis(x_ptr, y_ptr, z_ptr, N0, N1, B0: tl.constexpr, B1: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    j = tl.program_id(1) * B1 + tl.arange(0, B1)
    x = tl.load(x_ptr + i, mask=i < N0)
    y = tl.load(y_ptr + j, mask=j < N1)
    z = x[None, :] + y[:, None]
    tl.store(z_ptr + j[:, None] * N0 + i[None, :], z, mask=(i < N0)[None, :])


@triton.jit
def assumes_dense_rows(
    x_ptr, y_ptr, z_ptr, N0, N1, stride_z0, stride_z1, B0: tl.constexpr, B1: tl.constexpr
):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    j = tl.program_id(1) * B1 + tl.arange(0, B1)
    x = tl.load(x_ptr + i, mask=i < N0)
    y = tl.load(y_ptr + j, mask=j < N1)
    inside = (j < N1)[:, None] & (i < N0)[None, :]
    tl.store(z_ptr + j[:, None] * N0 + i[None, :], x[None, :] + y[:, None], mask=inside)


@triton.jit
def derivative_of_relu_at_zero_is_one(
    x_ptr, y_ptr, dz_ptr, dx_ptr, N0, N1, B0: tl.constexpr, B1: tl.constexpr
):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    j = tl.program_id(1) * B1 + tl.arange(0, B1)
    inside = (j < N1)[:, None] & (i < N0)[None, :]
    at = j[:, None] * N0 + i[None, :]
    x = tl.load(x_ptr + at, mask=inside)
    y = tl.load(y_ptr + j, mask=j < N1)[:, None]
    dz = tl.load(dz_ptr + at, mask=inside)
    tl.store(dx_ptr + at, tl.where(x * y >= 0, dz * y, 0.0), mask=inside)


def too_few(meta):
    return (max(1, meta["N0"] // meta["B0"]),)


ADD = {"spec": add_constant_blocks, "grid": blocks}
OUTER = {"spec": outer_add_blocks, "grid": blocks2}
# The kernel, what it is checked with, the finding that names its fault, and a piece of the line.
WRONG = [
    (load_without_mask, ADD, "out-of-bounds-load", "tl.load(x_ptr + i)"),
    (store_without_mask, ADD, "out-of-bounds-store", "tl.store"),
    (load_one_too_many, ADD, "out-of-bounds-load", "i <= N0"),
    (store_one_too_many, ADD, "out-of-bounds-store", "i <= N0"),
    (load_before_the_first, ADD, "out-of-bounds-load", "i - 1"),
    (mask_is_always_true, ADD, "out-of-bounds-load", "tl.max(i"),
    (last_block_left_out, {**ADD, "grid": too_few}, "unwritten", None),
    (spills_into_the_next_block, ADD, "write-conflict", "tl.store"),
    (writes_its_input, ADD, "input-written", "tl.store(x_ptr"),
    (adds_to_what_was_never_written, ADD, "unwritten-read", "tl.load(z_ptr"),
    (lanes_collide, ADD, "lane-conflict", "i // 2"),
    (rounds_to_bfloat16, ADD, "wrong-values", None),
    (block_of_no_power_of_two, ADD, "crash", "24"),
    (reads_what_others_replace, {**ADD, "output": "x"}, "read-of-other", None),
    (axes_of_the_grid_swapped, OUTER, "unwritten", None),
    (stride_of_the_other_axis, OUTER, "wrong-values", None),
    (mask_of_one_axis, OUTER, "out-of-bounds-store", "tl.store"),
    (assumes_dense_rows, OUTER, "out-of-bounds-store", "tl.store"),
    (
        derivative_of_relu_at_zero_is_one,
        {"spec": mul_relu_backward, "grid": blocks2},
        "wrong-values",
        None,
    ),
]
