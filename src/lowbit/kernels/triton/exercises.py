"""Kernels to learn from: they solve the exercises of `lowbit.spec.exercises`, each as plainly as it
can be, for any shape."""

from __future__ import annotations

import triton
import triton.language as tl

from lowbit.kernels.triton.registry import teaches
from lowbit.spec.exercises import (
    add_constant,
    add_constant_blocks,
    batched_matmul,
    conv2d,
    flash_attention,
    long_softmax,
    long_sum,
    mul_relu_backward,
    outer_add,
    outer_add_blocks,
    outer_mul_relu,
    quantized_matmul,
)

# z_i = x_i + 10, by one program.


@teaches(add_constant, grid=lambda meta: (1,))
@triton.jit
def add_constant_kernel(x_ptr, z_ptr, N0, B0: tl.constexpr):
    """B0 is a power of two, at least N0; the lanes past N0 are masked."""
    i = tl.arange(0, B0)
    x = tl.load(x_ptr + i, mask=i < N0)
    tl.store(z_ptr + i, x + 10.0, mask=i < N0)


# z_i = x_i + 10, a block to each program.


@teaches(add_constant_blocks, grid=lambda meta: (triton.cdiv(meta["N0"], meta["B0"]),))
@triton.jit
def add_constant_blocks_kernel(x_ptr, z_ptr, N0, B0: tl.constexpr):
    """Program p computes the elements from p·B0 on."""
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    x = tl.load(x_ptr + i, mask=i < N0)
    tl.store(z_ptr + i, x + 10.0, mask=i < N0)


# z_ji = x_i + y_j, by one program.


@teaches(outer_add, grid=lambda meta: (1,))
@triton.jit
def outer_add_kernel(x_ptr, y_ptr, z_ptr, N0, N1, B0: tl.constexpr, B1: tl.constexpr):
    """A row of lanes meets a column of lanes: broadcasting makes the block [B1, B0]."""
    i = tl.arange(0, B0)
    j = tl.arange(0, B1)
    x = tl.load(x_ptr + i, mask=i < N0)
    y = tl.load(y_ptr + j, mask=j < N1)
    inside = (j < N1)[:, None] & (i < N0)[None, :]
    tl.store(z_ptr + j[:, None] * N0 + i[None, :], x[None, :] + y[:, None], mask=inside)


# z_ji = x_i + y_j, a block of two dimensions to each program.


@teaches(
    outer_add_blocks,
    grid=lambda meta: (triton.cdiv(meta["N0"], meta["B0"]), triton.cdiv(meta["N1"], meta["B1"])),
)
@triton.jit
def outer_add_blocks_kernel(x_ptr, y_ptr, z_ptr, N0, N1, B0: tl.constexpr, B1: tl.constexpr):
    """The grid has an axis for each dimension of the result."""
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    j = tl.program_id(1) * B1 + tl.arange(0, B1)
    x = tl.load(x_ptr + i, mask=i < N0)
    y = tl.load(y_ptr + j, mask=j < N1)
    inside = (j < N1)[:, None] & (i < N0)[None, :]
    tl.store(z_ptr + j[:, None] * N0 + i[None, :], x[None, :] + y[:, None], mask=inside)


# z_ji = relu(x_i · y_j).


@teaches(
    outer_mul_relu,
    grid=lambda meta: (triton.cdiv(meta["N0"], meta["B0"]), triton.cdiv(meta["N1"], meta["B1"])),
)
@triton.jit
def outer_mul_relu_kernel(x_ptr, y_ptr, z_ptr, N0, N1, B0: tl.constexpr, B1: tl.constexpr):
    """What follows the product happens in registers, before the only store."""
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    j = tl.program_id(1) * B1 + tl.arange(0, B1)
    x = tl.load(x_ptr + i, mask=i < N0)
    y = tl.load(y_ptr + j, mask=j < N1)
    z = tl.maximum(x[None, :] * y[:, None], 0.0)
    inside = (j < N1)[:, None] & (i < N0)[None, :]
    tl.store(z_ptr + j[:, None] * N0 + i[None, :], z, mask=inside)


# dx_ji = dz_ji · y_j where x_ji · y_j > 0, else 0.


@teaches(
    mul_relu_backward,
    grid=lambda meta: (triton.cdiv(meta["N0"], meta["B0"]), triton.cdiv(meta["N1"], meta["B1"])),
)
@triton.jit
def mul_relu_backward_kernel(
    x_ptr, y_ptr, dz_ptr, dx_ptr, N0, N1, B0: tl.constexpr, B1: tl.constexpr
):
    """The chain rule: relu passes dz on where its argument is positive, and x meets y there."""
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    j = tl.program_id(1) * B1 + tl.arange(0, B1)
    inside = (j < N1)[:, None] & (i < N0)[None, :]
    at = j[:, None] * N0 + i[None, :]
    x = tl.load(x_ptr + at, mask=inside)
    y = tl.load(y_ptr + j, mask=j < N1)[:, None]
    dz = tl.load(dz_ptr + at, mask=inside)
    tl.store(dx_ptr + at, tl.where(x * y > 0, dz * y, 0.0), mask=inside)


# z_i = Σ_j x_ij, a block of T at a time.


@teaches(long_sum, grid=lambda meta: (triton.cdiv(meta["N0"], meta["B0"]),))
@triton.jit
def long_sum_kernel(x_ptr, z_ptr, N0, T, B0: tl.constexpr, B1: tl.constexpr):
    """Lanes past the end of a row read 0, which adds nothing."""
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    total = tl.zeros((B0,), tl.float32)
    for start in range(0, T, B1):
        j = start + tl.arange(0, B1)
        inside = (i < N0)[:, None] & (j < T)[None, :]
        x = tl.load(x_ptr + i[:, None] * T + j[None, :], mask=inside, other=0.0)
        total += tl.sum(x, axis=1)
    tl.store(z_ptr + i, total, mask=i < N0)


# z_ij = exp(x_ij) / Σ_k exp(x_ik), in two passes over the row.


@teaches(long_softmax, grid=lambda meta: (triton.cdiv(meta["N0"], meta["B0"]),))
@triton.jit
def long_softmax_kernel(x_ptr, z_ptr, N0, T, B0: tl.constexpr, B1: tl.constexpr):
    """The first pass keeps the largest x so far, and the sum of exp(x - largest); when the largest
    grows, the sum is rescaled (Milakov and Gimelshein, Online normalizer calculation for softmax,
    2018). exp(x) is 2^(x · log2(e)), which is the instruction that GPUs have."""
    log2_e = tl.constexpr(1.44269504)
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    row = x_ptr + i[:, None] * T
    largest = tl.full((B0,), -float("inf"), tl.float32)
    total = tl.zeros((B0,), tl.float32)
    for start in range(0, T, B1):
        j = start + tl.arange(0, B1)
        inside = (i < N0)[:, None] & (j < T)[None, :]
        x = tl.load(row + j[None, :], mask=inside, other=-float("inf"))
        # Rows past the last one hold only -inf; 0 keeps their differences from being NaN.
        now = tl.where(i < N0, tl.maximum(largest, tl.max(x, axis=1)), 0.0)
        total *= tl.exp2((largest - now) * log2_e)
        total += tl.sum(tl.exp2((x - now[:, None]) * log2_e), axis=1)
        largest = now
    for start in range(0, T, B1):
        j = start + tl.arange(0, B1)
        inside = (i < N0)[:, None] & (j < T)[None, :]
        x = tl.load(row + j[None, :], mask=inside, other=0.0)
        z = tl.exp2((x - largest[:, None]) * log2_e) / total[:, None]
        tl.store(z_ptr + i[:, None] * T + j[None, :], z, mask=inside)


# z_i = Σ_j softmax_j(q_i · k_j) · v_j, in one loop over j.


@teaches(flash_attention, grid=lambda meta: (triton.cdiv(meta["N0"], meta["B0"]),))
@triton.jit
def flash_attention_kernel(q_ptr, k_ptr, v_ptr, z_ptr, N0, T, B0: tl.constexpr, B1: tl.constexpr):
    """The sum of the weights and the weighted sum of v are rescaled together when a larger score
    comes. Keys past the end are masked in the scores, after the product: a key of -inf would give
    +inf for a negative q, and NaN for 0."""
    log2_e = tl.constexpr(1.44269504)
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    q = tl.load(q_ptr + i, mask=i < N0, other=0.0)
    largest = tl.full((B0,), -float("inf"), tl.float32)
    weights = tl.zeros((B0,), tl.float32)
    weighted = tl.zeros((B0,), tl.float32)
    for start in range(0, T, B1):
        j = start + tl.arange(0, B1)
        k = tl.load(k_ptr + j, mask=j < T, other=0.0)
        v = tl.load(v_ptr + j, mask=j < T, other=0.0)
        scores = tl.where((j < T)[None, :], q[:, None] * k[None, :], -float("inf"))
        now = tl.maximum(largest, tl.max(scores, axis=1))
        rescale = tl.exp2((largest - now) * log2_e)
        weight = tl.exp2((scores - now[:, None]) * log2_e)
        weights = weights * rescale + tl.sum(weight, axis=1)
        weighted = weighted * rescale + tl.sum(weight * v[None, :], axis=1)
        largest = now
    tl.store(z_ptr + i, weighted / weights, mask=i < N0)


# z_bij = Σ_uv k_uv · x_b,i+u,j+v, with zeros past the lower and the right edge.


@teaches(conv2d, grid=lambda meta: (meta["N0"], meta["H"], triton.cdiv(meta["W"], meta["B1"])))
@triton.jit
def conv2d_kernel(x_ptr, k_ptr, z_ptr, N0, H, W, KH, KW, B1: tl.constexpr):
    """A program computes B1 neighbours of one row; the mask is the padding."""
    b, i = tl.program_id(0), tl.program_id(1)
    j = tl.program_id(2) * B1 + tl.arange(0, B1)
    total = tl.zeros((B1,), tl.float32)
    for u in range(KH):
        for v in range(KW):
            inside = (i + u < H) & (j + v < W)
            x = tl.load(x_ptr + (b * H + i + u) * W + j + v, mask=inside, other=0.0)
            total += tl.load(k_ptr + u * KW + v) * x
    tl.store(z_ptr + (b * H + i) * W + j, total, mask=j < W)


# z_b = x_b @ y_b.


@teaches(
    batched_matmul,
    grid=lambda meta: (
        triton.cdiv(meta["N0"], meta["B0"]),
        triton.cdiv(meta["N1"], meta["B1"]),
        meta["N2"],
    ),
)
@triton.jit
def batched_matmul_kernel(
    x_ptr,
    y_ptr,
    z_ptr,
    N0,
    N1,
    N2,
    MID,
    B0: tl.constexpr,
    B1: tl.constexpr,
    B_MID: tl.constexpr,
):
    """A program holds a block of z in registers, and walks along MID with one of x and one of y.

    "ieee": float32 products, where tl.dot would round the operands to TF32 otherwise.
    """
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    j = tl.program_id(1) * B1 + tl.arange(0, B1)
    b = tl.program_id(2)
    total = tl.zeros((B0, B1), tl.float32)
    for start in range(0, MID, B_MID):
        m = start + tl.arange(0, B_MID)
        x_inside = (i < N0)[:, None] & (m < MID)[None, :]
        x = tl.load(x_ptr + (b * N0 + i[:, None]) * MID + m[None, :], mask=x_inside, other=0.0)
        y_inside = (m < MID)[:, None] & (j < N1)[None, :]
        y = tl.load(y_ptr + (b * MID + m[:, None]) * N1 + j[None, :], mask=y_inside, other=0.0)
        total = tl.dot(x, y, total, input_precision="ieee")
    inside = (i < N0)[:, None] & (j < N1)[None, :]
    tl.store(z_ptr + (b * N0 + i[:, None]) * N1 + j[None, :], total, mask=inside)


# z = (scale · (nibble(weight) − nibble(offset))) @ activation.


@teaches(
    quantized_matmul,
    grid=lambda meta: (triton.cdiv(meta["N0"], meta["B0"]), triton.cdiv(meta["N1"], meta["B1"])),
)
@triton.jit
def quantized_matmul_kernel(
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
):
    """Element m of a row of the weight is nibble m % 8 of word m // 8, which is its group; the
    group's offset is nibble m // 8 % 8 of word m // 64. MID is a multiple of 64."""
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    j = tl.program_id(1) * B1 + tl.arange(0, B1)
    total = tl.zeros((B0, B1), tl.float32)
    for start in range(0, MID, B_MID):
        m = start + tl.arange(0, B_MID)
        w_inside = (i < N0)[:, None] & (m < MID)[None, :]
        group = i[:, None] * (MID // 8) + m[None, :] // 8
        scale = tl.load(scale_ptr + group, mask=w_inside, other=0.0)
        word = tl.load(weight_ptr + group, mask=w_inside, other=0)
        at = i[:, None] * (MID // 64) + m[None, :] // 64
        offset = tl.load(offset_ptr + at, mask=w_inside, other=0)
        nibble = (word >> (m[None, :] % 8 * 4)) & 15
        zero = (offset >> (m[None, :] // 8 % 8 * 4)) & 15
        weight = scale * (nibble - zero).to(tl.float32)
        a_inside = (m < MID)[:, None] & (j < N1)[None, :]
        a_at = m[:, None] * N1 + j[None, :]
        activation = tl.load(activation_ptr + a_at, mask=a_inside, other=0.0)
        total = tl.dot(weight, activation, total, input_precision="ieee")
    inside = (i < N0)[:, None] & (j < N1)[None, :]
    tl.store(z_ptr + i[:, None] * N1 + j[None, :], total, mask=inside)
