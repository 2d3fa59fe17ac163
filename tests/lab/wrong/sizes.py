"""Wrong kernels that only sizes of several blocks, other layouts or other data show."""

# Triton's annotations make a tuple of what `tl.sum` may return.
# pyright: reportOperatorIssue=false, reportIndexIssue=false

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl
from jaxtyping import Float32, Int32

from lowbit.spec import operation
from lowbit.spec.exercises import add_constant_blocks, long_sum, outer_add_blocks


@operation(exercise={"N0": 4, "T": 200})
def first_of_the_largest(x: Float32[np.ndarray, "N0 T"]) -> Int32[np.ndarray, "N0"]:
    return np.argmax(x, axis=1)


@operation(exercise={"N0": 4, "T": 200}, summed=("T",))
def scaled_length(x: Float32[np.ndarray, "N0 T"]) -> Float32[np.ndarray, "N0"]:
    largest = np.maximum(np.abs(x).max(axis=1, keepdims=True), np.float32(1))
    return largest[:, 0] * np.sqrt(((x / largest) ** 2).sum(axis=1))


@operation(exercise={"N0": 4, "T": 200}, summed=("T",))
def variance(x: Float32[np.ndarray, "N0 T"]) -> Float32[np.ndarray, "N0"]:
    return x.var(axis=1)


@operation(exercise={"M": 8, "N": 12}, special=True)
def sum_of_two(
    x: Float32[np.ndarray, "M N"], y: Float32[np.ndarray, "M N"]
) -> Float32[np.ndarray, "M N"]:
    return x + y


def blocks(meta):
    return (triton.cdiv(meta["N0"], meta["B0"]),)


def rows(meta):
    return (meta["N0"],)


def tiles(meta):
    return (triton.cdiv(meta["N0"], meta["B0"]), triton.cdiv(meta["N1"], meta["B1"]))


def all_tiles(meta):
    return (triton.cdiv(meta["N0"], meta["B0"]) * triton.cdiv(meta["N1"], meta["B1"]),)


def matrix(meta):
    return (meta["M"], triton.cdiv(meta["N"], meta["BLOCK"]))


@triton.jit
def second_wide_block_is_left_out(x_ptr, z_ptr, N0, T, B1: tl.constexpr):
    j = tl.arange(0, B1)
    x = tl.load(x_ptr + tl.program_id(0) * T + j, mask=j < T, other=0.0)
    tl.store(z_ptr + tl.program_id(0), tl.sum(x, axis=0))


@triton.jit
def groups_of_tiles_must_be_whole(
    x_ptr, y_ptr, z_ptr, N0, N1, B0: tl.constexpr, B1: tl.constexpr, GROUP: tl.constexpr
):
    high, wide = tl.cdiv(N0, B0), tl.cdiv(N1, B1)
    group = tl.program_id(0) // (GROUP * high)
    within = tl.program_id(0) % (GROUP * high)
    i = within // GROUP * B0 + tl.arange(0, B0)
    j = (group * GROUP + within % GROUP) * B1 + tl.arange(0, B1)
    inside = (i[None, :] < N0) & (j[:, None] < N1) & (wide > 0)
    x, y = tl.load(x_ptr + i, mask=i < N0), tl.load(y_ptr + j, mask=j < N1)
    tl.store(z_ptr + j[:, None] * N0 + i[None, :], x[None, :] + y[:, None], mask=inside)


@triton.jit
def offsets_of_16_bits(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = (tl.program_id(0) * B0 + tl.arange(0, B0)).to(tl.uint16)
    tl.store(z_ptr + i, tl.load(x_ptr + i, mask=i < N0) + 10.0, mask=i < N0)


@triton.jit
def stride_of_another(x_ptr, y_ptr, z_ptr, N, stride_xm, stride_xn, stride_ym, stride_yn, stride_zm,
                      stride_zn, BLOCK: tl.constexpr):  # fmt: skip
    m, n = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + m * stride_xm + n * stride_xn, mask=n < N)
    y = tl.load(y_ptr + m * stride_xm + n * stride_yn, mask=n < N)
    tl.store(z_ptr + m * stride_zm + n * stride_zn, x + y, mask=n < N)


@triton.jit
def inner_stride_of_the_second_block(
    x_ptr, y_ptr, z_ptr, N, stride_xm, stride_xn, stride_ym, stride_yn, stride_zm, stride_zn,
    BLOCK: tl.constexpr,
):  # fmt: skip
    m, n = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inner = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK) * stride_xn
    x = tl.load(x_ptr + m * stride_xm + inner, mask=n < N)
    y = tl.load(y_ptr + m * stride_ym + n * stride_yn, mask=n < N)
    tl.store(z_ptr + m * stride_zm + n * stride_zn, x + y, mask=n < N)


@triton.jit
def last_of_the_largest(x_ptr, z_ptr, N0, T, B: tl.constexpr):
    largest, place = -float("inf"), 0
    for start in range(0, T, B):
        j = start + tl.arange(0, B)
        x = tl.load(x_ptr + tl.program_id(0) * T + j, mask=j < T, other=-float("inf"))
        found = tl.max(x, axis=0)
        if found >= largest:
            largest = found
            place = start + tl.argmax(x, axis=0)
    tl.store(z_ptr + tl.program_id(0), place)


@triton.jit
def squares_overflow(x_ptr, z_ptr, N0, T, B: tl.constexpr):
    total = 0.0
    for start in range(0, T, B):
        j = start + tl.arange(0, B)
        x = tl.load(x_ptr + tl.program_id(0) * T + j, mask=j < T, other=0.0)
        total += tl.sum(x * x, axis=0)
    tl.store(z_ptr + tl.program_id(0), tl.sqrt(total))


@triton.jit
def variance_in_one_pass(x_ptr, z_ptr, N0, T, B: tl.constexpr):
    total, squares = 0.0, 0.0
    for start in range(0, T, B):
        j = start + tl.arange(0, B)
        x = tl.load(x_ptr + tl.program_id(0) * T + j, mask=j < T, other=0.0)
        total += tl.sum(x, axis=0)
        squares += tl.sum(x * x, axis=0)
    tl.store(z_ptr + tl.program_id(0), squares / T - (total / T) * (total / T))


@triton.autotune([triton.Config({"B0": 32}), triton.Config({"B0": 256})], key=["N0"])
@triton.jit
def wrong_in_two_blocks_when_tuned_otherwise(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * min(B0, 128) + tl.arange(0, B0)
    tl.store(z_ptr + i, tl.load(x_ptr + i, mask=i < N0) + 10.0, mask=i < N0)


@triton.jit
def number_becomes_a_block(x_ptr, z_ptr, N0, T, B: tl.constexpr):
    total = 0
    for start in range(0, T, B):
        j = start + tl.arange(0, B)
        total += tl.load(x_ptr + tl.program_id(0) * T + j, mask=j < T, other=0.0)
    tl.store(z_ptr + tl.program_id(0), tl.sum(total, axis=0))


@triton.autotune([triton.Config({"B1": 32}), triton.Config({"B1": 64})], key=["T"])
@triton.jit
def adds_again_when_tuned(x_ptr, z_ptr, N0, T, B1: tl.constexpr):
    j = tl.arange(0, B1)
    for start in range(0, T, B1):
        x = tl.load(x_ptr + tl.program_id(0) * T + start + j, mask=start + j < T, other=0.0)
        tl.atomic_add(z_ptr + tl.program_id(0), tl.sum(x, axis=0))


@triton.autotune([triton.Config({"B0": 32}), triton.Config({"B0": 64})], key=["N0"])
@triton.jit
def changed_in_place_when_tuned(x_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < N0) + 10.0, mask=i < N0)


@triton.jit
def gap_behind_a_row_is_forgotten(x_ptr, z_ptr, stride_x0, T, B1: tl.constexpr):
    x = x_ptr + tl.program_id(0) * stride_x0
    total = 0.0
    for start in range(0, T, B1):
        j = start + tl.arange(0, B1)
        total += tl.sum(tl.load(x + j, mask=j < T, other=0.0), axis=0)
        x += stride_x0 - T
    tl.store(z_ptr + tl.program_id(0), total)


ADD = {"spec": add_constant_blocks, "grid": blocks}
OUTER = {"spec": outer_add_blocks, "grid": all_tiles, "B0": 16, "B1": 16, "GROUP": 4}
TWO = {"spec": sum_of_two, "grid": matrix}
# As in edges.py.
WRONG = [
    (second_wide_block_is_left_out, {"spec": long_sum, "grid": rows, "B1": 2048}, "wrong-values",
     None),
    (groups_of_tiles_must_be_whole, OUTER, "unwritten", None),
    (offsets_of_16_bits, ADD, "unwritten", None),
    (stride_of_another, TWO, "wrong-values", None),
    (inner_stride_of_the_second_block, TWO, "out-of-bounds-load", "inner"),
    (gap_behind_a_row_is_forgotten, {"spec": long_sum, "grid": rows}, "out-of-bounds-load", None),
    (last_of_the_largest, {"spec": first_of_the_largest, "grid": rows}, "wrong-values", None),
    (squares_overflow, {"spec": scaled_length, "grid": rows}, "wrong-values", None),
    (variance_in_one_pass, {"spec": variance, "grid": rows}, "wrong-values", None),
    (number_becomes_a_block, {"spec": long_sum, "grid": rows}, "not-compiled", "for start"),
    (adds_again_when_tuned, {"spec": long_sum, "grid": rows, "initial": 0.0}, "tuned-twice", None),
    (changed_in_place_when_tuned, {**ADD, "output": "x"}, "tuned-twice", None),
    (wrong_in_two_blocks_when_tuned_otherwise, ADD, "block-sizes", None),
]  # fmt: skip
