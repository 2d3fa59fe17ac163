"""Wrong kernels for sums, softmax, attention, convolution and products."""

from __future__ import annotations

import triton
import triton.language as tl

from lowbit.spec.exercises import (
    batched_matmul,
    conv2d,
    flash_attention,
    long_softmax,
    long_sum,
    quantized_matmul,
)


def rows(meta):
    return (meta["N0"],)


def rows_and_blocks(meta):
    return (meta["N0"], triton.cdiv(meta["T"], meta["B1"]))


@triton.jit
def accumulates_in_half(x_ptr, z_ptr, N0, T, B1: tl.constexpr):
    i = tl.program_id(0)
    total = tl.zeros((B1,), tl.float16)
    for start in range(0, T, B1):
        j = start + tl.arange(0, B1)
        total += tl.load(x_ptr + i * T + j, mask=j < T, other=0.0).to(tl.float16)
    tl.store(z_ptr + i, tl.sum(total.to(tl.float32), axis=0))


@triton.jit
def tail_reads_the_next_row(x_ptr, z_ptr, N0, T, B1: tl.constexpr):
    i = tl.program_id(0)
    total = tl.zeros((B1,), tl.float32)
    for start in range(0, T, B1):
        at = i * T + start + tl.arange(0, B1)
        total += tl.load(x_ptr + at, mask=at < N0 * T, other=0.0)
    tl.store(z_ptr + i, tl.sum(total, axis=0))


@triton.jit
def programs_race_for_the_sum(x_ptr, z_ptr, N0, T, B1: tl.constexpr):
    i = tl.program_id(0)
    j = tl.program_id(1) * B1 + tl.arange(0, B1)
    x = tl.load(x_ptr + i * T + j, mask=j < T, other=0.0)
    tl.store(z_ptr + i, tl.load(z_ptr + i) + tl.sum(x, axis=0))


@triton.jit
def last_program_wins(x_ptr, z_ptr, N0, T, B1: tl.constexpr):
    i = tl.program_id(0)
    j = tl.program_id(1) * B1 + tl.arange(0, B1)
    x = tl.load(x_ptr + i * T + j, mask=j < T, other=0.0)
    tl.store(z_ptr + i, tl.sum(x, axis=0))


@triton.jit
def forgets_all_but_the_last_block(x_ptr, z_ptr, N0, T, B1: tl.constexpr):
    i = tl.program_id(0)
    total = 0.0
    for start in range(0, T, B1):
        j = start + tl.arange(0, B1)
        total = tl.sum(tl.load(x_ptr + i * T + j, mask=j < T, other=0.0), axis=0)
    tl.store(z_ptr + i, total)


@triton.jit
def softmax_without_the_maximum(x_ptr, z_ptr, N0, T, B1: tl.constexpr):
    i = tl.program_id(0)
    total = tl.zeros((1,), tl.float32)
    for start in range(0, T, B1):
        j = start + tl.arange(0, B1)
        x = tl.load(x_ptr + i * T + j, mask=j < T, other=-float("inf"))
        total += tl.sum(tl.exp(x), axis=0)
    for start in range(0, T, B1):
        j = start + tl.arange(0, B1)
        x = tl.load(x_ptr + i * T + j, mask=j < T, other=0.0)
        tl.store(z_ptr + i * T + j, tl.exp(x) / total, mask=j < T)


@triton.jit
def softmax_without_rescaling(x_ptr, z_ptr, N0, T, B1: tl.constexpr):
    i = tl.program_id(0)
    total = tl.zeros((1,), tl.float32)
    largest = -float("inf")
    for start in range(0, T, B1):
        j = start + tl.arange(0, B1)
        x = tl.load(x_ptr + i * T + j, mask=j < T, other=-float("inf"))
        largest = tl.maximum(largest, tl.max(x, axis=0))
        total += tl.sum(tl.exp(x - largest), axis=0)
    for start in range(0, T, B1):
        j = start + tl.arange(0, B1)
        x = tl.load(x_ptr + i * T + j, mask=j < T, other=0.0)
        tl.store(z_ptr + i * T + j, tl.exp(x - largest) / total, mask=j < T)


@triton.jit
def softmax_counts_the_padding(x_ptr, z_ptr, N0, T, B1: tl.constexpr):
    i = tl.program_id(0)
    total = tl.zeros((1,), tl.float32)
    largest = -float("inf")
    for start in range(0, T, B1):
        j = start + tl.arange(0, B1)
        x = tl.load(x_ptr + i * T + j, mask=j < T, other=0.0)
        now = tl.maximum(largest, tl.max(x, axis=0))
        total = total * tl.exp(largest - now) + tl.sum(tl.exp(x - now), axis=0)
        largest = now
    for start in range(0, T, B1):
        j = start + tl.arange(0, B1)
        x = tl.load(x_ptr + i * T + j, mask=j < T, other=0.0)
        tl.store(z_ptr + i * T + j, tl.exp(x - largest) / total, mask=j < T)


@triton.jit
def attention_pads_keys_with_infinity(q_ptr, k_ptr, v_ptr, z_ptr, N0, T, B1: tl.constexpr):
    i = tl.program_id(0)
    q = tl.load(q_ptr + i)
    largest = -float("inf")
    weights = 0.0
    weighted = 0.0
    for start in range(0, T, B1):
        j = start + tl.arange(0, B1)
        k = tl.load(k_ptr + j, mask=j < T, other=-float("inf"))
        v = tl.load(v_ptr + j, mask=j < T, other=0.0)
        now = tl.maximum(largest, tl.max(q * k, axis=0))
        weight = tl.exp(q * k - now)
        rescale = tl.exp(largest - now)
        weights = weights * rescale + tl.sum(weight, axis=0)
        weighted = weighted * rescale + tl.sum(weight * v, axis=0)
        largest = now
    tl.store(z_ptr + i, weighted / weights)


@triton.jit
def flips_the_kernel(x_ptr, k_ptr, z_ptr, H, W, KH, KW, B1: tl.constexpr):
    b, i = tl.program_id(0), tl.program_id(1)
    j = tl.program_id(2) * B1 + tl.arange(0, B1)
    total = tl.zeros((B1,), tl.float32)
    for u in range(KH):
        for v in range(KW):
            inside = (i + u < H) & (j + v < W)
            x = tl.load(x_ptr + (b * H + i + u) * W + j + v, mask=inside, other=0.0)
            total += tl.load(k_ptr + (KH - 1 - u) * KW + KW - 1 - v) * x
    tl.store(z_ptr + (b * H + i) * W + j, total, mask=j < W)


@triton.jit
def right_edge_is_the_next_row(x_ptr, k_ptr, z_ptr, H, W, KH, KW, B1: tl.constexpr):
    b, i = tl.program_id(0), tl.program_id(1)
    j = tl.program_id(2) * B1 + tl.arange(0, B1)
    total = tl.zeros((B1,), tl.float32)
    for u in range(KH):
        for v in range(KW):
            at = (i + u) * W + j + v
            x = tl.load(x_ptr + b * H * W + at, mask=at < H * W, other=0.0)
            total += tl.load(k_ptr + u * KW + v) * x
    tl.store(z_ptr + (b * H + i) * W + j, total, mask=j < W)


@triton.jit
def batch_left_out(
    x_ptr, y_ptr, z_ptr, N0, N1, MID, B0: tl.constexpr, B1: tl.constexpr, B_MID: tl.constexpr
):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    j = tl.program_id(1) * B1 + tl.arange(0, B1)
    b = tl.program_id(2)
    total = tl.zeros((B0, B1), tl.float32)
    for start in range(0, MID, B_MID):
        m = start + tl.arange(0, B_MID)
        x_inside = (i < N0)[:, None] & (m < MID)[None, :]
        x = tl.load(x_ptr + (b * N0 + i[:, None]) * MID + m[None, :], mask=x_inside, other=0.0)
        y_inside = (m < MID)[:, None] & (j < N1)[None, :]
        y = tl.load(y_ptr + m[:, None] * N1 + j[None, :], mask=y_inside, other=0.0)
        total = tl.dot(x, y, total, input_precision="ieee")
    inside = (i < N0)[:, None] & (j < N1)[None, :]
    tl.store(z_ptr + (b * N0 + i[:, None]) * N1 + j[None, :], total, mask=inside)


@triton.jit
def tail_of_the_sum_is_not_masked(
    x_ptr, y_ptr, z_ptr, N0, N1, MID, B0: tl.constexpr, B1: tl.constexpr, B_MID: tl.constexpr
):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    j = tl.program_id(1) * B1 + tl.arange(0, B1)
    b = tl.program_id(2)
    total = tl.zeros((B0, B1), tl.float32)
    for start in range(0, MID, B_MID):
        m = start + tl.arange(0, B_MID)
        x_at = x_ptr + (b * N0 + i[:, None]) * MID + m[None, :]
        x = tl.load(x_at, mask=(i < N0)[:, None], other=0.0)
        y_inside = (m < MID)[:, None] & (j < N1)[None, :]
        y_at = y_ptr + (b * MID + m[:, None]) * N1 + j[None, :]
        y = tl.load(y_at, mask=y_inside, other=0.0)
        total = tl.dot(x, y, total, input_precision="ieee")
    inside = (i < N0)[:, None] & (j < N1)[None, :]
    tl.store(z_ptr + (b * N0 + i[:, None]) * N1 + j[None, :], total, mask=inside)


@triton.jit
def quantized(
    scale_ptr,
    offset_ptr,
    weight_ptr,
    activation_ptr,
    z_ptr,
    N0,
    N1,
    MID,
    B0: tl.constexpr,
    B1: tl.constexpr,
    B_MID: tl.constexpr,
    FAULT: tl.constexpr,
):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    j = tl.program_id(1) * B1 + tl.arange(0, B1)
    total = tl.zeros((B0, B1), tl.float32)
    for start in range(0, MID, B_MID):
        m = start + tl.arange(0, B_MID)
        rows = (i < N0)[:, None] & (m < MID)[None, :]
        group = i[:, None] * (MID // 8) + m[None, :] // 8
        scale = tl.load(scale_ptr + group, mask=rows, other=0.0)
        word = tl.load(weight_ptr + group, mask=rows, other=0)
        at = i[:, None] * (MID // 64) + m[None, :] // 64
        offset = tl.load(offset_ptr + at, mask=rows, other=0)
        shift = m[None, :] % 8 * 4
        if FAULT == 3:
            shift = 28 - shift
        nibble = (word >> shift) & 15
        if FAULT == 4:
            nibble = (word << (28 - shift)) >> 28
        zero = (offset >> (m[None, :] // 8 % 8 * 4)) & 15
        if FAULT == 2:
            zero = zero * 0
        weight = (nibble - zero).to(tl.float32)
        if FAULT != 1:
            weight = scale * weight
        inside = (m < MID)[:, None] & (j < N1)[None, :]
        a_at = activation_ptr + m[:, None] * N1 + j[None, :]
        activation = tl.load(a_at, mask=inside, other=0.0)
        total = tl.dot(weight, activation, total, input_precision="ieee")
    inside = (i < N0)[:, None] & (j < N1)[None, :]
    tl.store(z_ptr + i[:, None] * N1 + j[None, :], total, mask=inside)


def images(meta):
    return (meta["N0"], meta["H"], triton.cdiv(meta["W"], meta["B1"]))


def tiles(meta):
    return (
        triton.cdiv(meta["N0"], meta["B0"]),
        triton.cdiv(meta["N1"], meta["B1"]),
        meta.get("N2", 1),
    )


SUM = {"spec": long_sum, "grid": rows}
SOFTMAX = {"spec": long_softmax, "grid": rows}
SPLIT = {"spec": long_sum, "grid": rows_and_blocks}
PRODUCT = {"spec": batched_matmul, "grid": tiles}
QUANTIZED = {"spec": quantized_matmul, "grid": tiles}
# The kernel, what it is checked with, the finding that names its fault, and a piece of the line.
WRONG = [
    (accumulates_in_half, SUM, "wrong-values", None),
    (tail_reads_the_next_row, SUM, "wrong-values", None),
    (forgets_all_but_the_last_block, SUM, "wrong-values", None),
    (programs_race_for_the_sum, {**SPLIT, "initial": 0.0}, "read-of-other", "tl.load(z_ptr"),
    (last_program_wins, SPLIT, "write-conflict", "tl.store"),
    (last_program_wins, SPLIT, "order-dependent", None),
    (softmax_without_the_maximum, SOFTMAX, "wrong-values", None),
    (softmax_without_rescaling, SOFTMAX, "wrong-values", None),
    (softmax_counts_the_padding, SOFTMAX, "wrong-values", None),
    (
        attention_pads_keys_with_infinity,
        {"spec": flash_attention, "grid": rows},
        "wrong-values",
        None,
    ),
    (flips_the_kernel, {"spec": conv2d, "grid": images}, "wrong-values", None),
    (right_edge_is_the_next_row, {"spec": conv2d, "grid": images}, "wrong-values", None),
    (batch_left_out, PRODUCT, "wrong-values", None),
    (tail_of_the_sum_is_not_masked, PRODUCT, "out-of-bounds-load", "x_at, mask"),
    *((quantized, {**QUANTIZED, "FAULT": fault}, "wrong-values", None) for fault in (1, 2, 3, 4)),
]
