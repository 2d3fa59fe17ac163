"""Wrong kernels that most inputs do not show: long sizes, special values, other blocks, loops."""

# Triton's annotations make a tuple of what `tl.sum` may return.
# pyright: reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from lowbit.spec.exercises import (
    add_constant,
    add_constant_blocks,
    flash_attention,
    long_softmax,
    long_sum,
    outer_mul_relu,
)


def blocks(meta):
    return (triton.cdiv(meta["N0"], meta["B0"]),)


def blocks2(meta):
    return (triton.cdiv(meta["N0"], meta["B0"]), triton.cdiv(meta["N1"], meta["B1"]))


def whole_blocks(meta):
    return (meta["N0"] // meta["B0"],)


def rows(meta):
    return (meta["N0"],)


def one(meta):
    return 1


@triton.jit
def only_32_elements(x_ptr, z_ptr, N0):
    i = tl.arange(0, 32)
    tl.store(z_ptr + i, tl.load(x_ptr + i, mask=i < N0) + 10.0, mask=i < N0)


@triton.jit
def no_mask_but_a_power_of_two(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.arange(0, B0)
    tl.store(z_ptr + i, tl.load(x_ptr + i) + 10.0)


@triton.jit
def row_of_at_most_1024(x_ptr, z_ptr, N0, T):
    j = tl.arange(0, 1024)
    x = tl.load(x_ptr + tl.program_id(0) * T + j, mask=j < T, other=0.0)
    tl.store(z_ptr + tl.program_id(0), tl.sum(x, axis=0))


@triton.jit
def grid_is_rounded_down(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    tl.store(z_ptr + i, tl.load(x_ptr + i, mask=i < N0) + 10.0, mask=i < N0)


@triton.jit
def index_of_eight_bits(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    x = tl.load(x_ptr + i, mask=i < N0)
    tl.store(z_ptr + i.to(tl.int8), x + 10.0, mask=i < N0)


@triton.jit
def index_that_overflows(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    same = i * 20000000 // 20000000
    tl.store(z_ptr + i, tl.load(x_ptr + same, mask=i < N0) + 10.0, mask=i < N0)


@triton.jit
def loop_that_overflows(x_ptr, z_ptr, N0, T):
    total = 0.0
    for j in range(T):
        same = j * 20000000 // 20000000
        total += tl.load(x_ptr + tl.program_id(0) * T + same)
    tl.store(z_ptr + tl.program_id(0), total)


@triton.jit
def nan_becomes_zero(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    x = tl.load(x_ptr + i, mask=i < N0)
    tl.store(z_ptr + i, tl.where(x != x, 0.0, x) + 10.0, mask=i < N0)


@triton.jit
def infinity_is_clamped(x_ptr, y_ptr, z_ptr, N0, N1, B0: tl.constexpr, B1: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    j = tl.program_id(1) * B1 + tl.arange(0, B1)
    x = tl.load(x_ptr + i, mask=i < N0)
    y = tl.load(y_ptr + j, mask=j < N1)
    z = tl.minimum(tl.maximum(x[None, :] * y[:, None], 0.0), 3e38)
    inside = (j < N1)[:, None] & (i < N0)[None, :]
    tl.store(z_ptr + j[:, None] * N0 + i[None, :], z, mask=inside)


@triton.jit
def one_more_where_the_block_fits(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    tl.store(z_ptr + i, tl.load(x_ptr + i, mask=i < N0) + 10.0, mask=i < N0)
    if N0 % B0 == 0:
        tl.store(z_ptr + N0, 0.0)


@triton.jit
def one_row_is_left_out(x_ptr, z_ptr, N0, T, B1: tl.constexpr):
    total = tl.zeros((B1,), tl.float32)
    for start in range(0, T, B1):
        j = start + tl.arange(0, B1)
        total += tl.load(x_ptr + tl.program_id(0) * T + j, mask=j < T, other=0.0)
    if N0 > 1:
        tl.store(z_ptr + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def maximum_starts_at_zero(x_ptr, z_ptr, N0, T, B1: tl.constexpr):
    row = tl.program_id(0) * T
    largest = 0.0
    total = 0.0
    for start in range(0, T, B1):
        j = start + tl.arange(0, B1)
        x = tl.load(x_ptr + row + j, mask=j < T, other=-float("inf"))
        now = tl.maximum(largest, tl.max(x, axis=0))
        total = total * tl.exp(largest - now) + tl.sum(tl.exp(x - now), axis=0)
        largest = now
    for start in range(0, T, B1):
        j = start + tl.arange(0, B1)
        x = tl.load(x_ptr + row + j, mask=j < T, other=0.0)
        tl.store(z_ptr + row + j, tl.exp(x - largest) / total, mask=j < T)


@triton.jit
def padding_has_a_weight(q_ptr, k_ptr, v_ptr, z_ptr, N0, T, B: tl.constexpr):
    j = tl.arange(0, B)
    k = tl.load(k_ptr + j, mask=j < T, other=0.0)
    v = tl.load(v_ptr + j, mask=j < T, other=0.0)
    scores = tl.load(q_ptr + tl.program_id(0)) * k
    weight = tl.exp(scores - tl.max(scores, axis=0))
    tl.store(z_ptr + tl.program_id(0), tl.sum(weight * v, axis=0) / tl.sum(weight, axis=0))


@triton.jit
def adds_to_poison(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    tl.atomic_add(z_ptr + i, tl.load(x_ptr + i, mask=i < N0) + 10.0, mask=i < N0)


@triton.jit
def loop_without_end(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0
    while i < N0:
        tl.store(z_ptr + i, tl.load(x_ptr + i) + 10.0)


@triton.jit
def empty_loop_without_end(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0)
    while i < N0:
        i = i // 2


@triton.jit
def block_as_a_condition(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    if i < N0:
        tl.store(z_ptr + i, tl.load(x_ptr + i, mask=i < N0) + 10.0, mask=i < N0)


@triton.autotune([triton.Config({"B0": 32}), triton.Config({"B0": 64})], key=["N0"])
@triton.jit
def wrong_when_tuned_otherwise(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * 32 + tl.arange(0, B0)
    tl.store(z_ptr + i, tl.load(x_ptr + i, mask=i < N0) + 10.0, mask=i < N0)


ADD = {"spec": add_constant_blocks, "grid": blocks}
ONE = {"spec": add_constant, "grid": one}
SUM = {"spec": long_sum, "grid": rows}
RELU = {"spec": outer_mul_relu, "grid": blocks2}
ATTENTION = {
    "spec": flash_attention,
    "grid": rows,
    "B": lambda sizes: triton.next_power_of_2(sizes["T"]),
}
# The kernel, what it is checked with, the finding that names its fault, and a piece of the line.
WRONG = [
    (only_32_elements, ONE, "unwritten", None),
    (no_mask_but_a_power_of_two, ONE, "out-of-bounds-load", "tl.load(x_ptr + i)"),
    (row_of_at_most_1024, SUM, "wrong-values", None),
    (grid_is_rounded_down, {**ADD, "grid": whole_blocks}, "unwritten", None),
    (index_of_eight_bits, ADD, "out-of-bounds-store", "tl.int8"),
    (index_that_overflows, ADD, "out-of-bounds-load", "same"),
    (loop_that_overflows, SUM, "out-of-bounds-load", "same"),
    (nan_becomes_zero, ADD, "wrong-values", None),
    (infinity_is_clamped, RELU, "wrong-values", None),
    (one_more_where_the_block_fits, ADD, "out-of-bounds-store", "z_ptr + N0"),
    (one_row_is_left_out, SUM, "unwritten", None),
    (maximum_starts_at_zero, {"spec": long_softmax, "grid": rows}, "wrong-values", None),
    (padding_has_a_weight, ATTENTION, "wrong-values", None),
    (adds_to_poison, ADD, "unwritten-read", "atomic_add"),
    (loop_without_end, ADD, "endless", "z_ptr + i"),
    (empty_loop_without_end, ADD, "endless", "i"),
    (block_as_a_condition, ADD, "crash", "if i < N0"),
    (wrong_when_tuned_otherwise, ADD, "block-sizes", None),
]
