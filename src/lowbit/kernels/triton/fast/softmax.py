# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false
"""Softmax over rows, forward and backward, in one pass over memory."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.kernels.triton.fast.launch import choosing
from lowbit.kernels.triton.fast.rows import (
    RowConfig,
    RowTable,
    again,
    as_rows,
    edge_of,
    launch_rows,
    limit_of,
    load_pieces,
    meet,
    place,
    row_choice,
    store_piece,
)

_SHORT = (
    (1024, RowConfig(1, 1024, 2)),
    (2048, RowConfig(1, 2048, 4)),
    (4096, RowConfig(1, 4096, 4)),
    (8192, RowConfig(1, 8192, 16)),
    (16384, RowConfig(1, 16384, 8)),
)
# Measured on an H200.
FORWARD: RowTable = {
    (90, 2): (
        *_SHORT,
        (32768, RowConfig(1, 32768, 16, 2)),
        (1 << 18, RowConfig(1, 8192, 4, 2)),
        (1 << 21, RowConfig(1, 16384, 8, 2)),
    ),
    (90, 4): (
        *_SHORT,
        (32768, RowConfig(1, 32768, 16)),
        (1 << 18, RowConfig(1, 8192, 8)),
    ),
}


@triton.jit
def softmax_kernel(
    x_ptr, z_ptr, words_ptr, rows, length, x_stride,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, PIECES: tl.constexpr, HELD: tl.constexpr,
    ASM: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, VEC: tl.constexpr = 1,
):  # fmt: skip
    """z = exp(x - max) / sum; parts meet with their largest x and their sum relative to it."""
    log2_e = tl.constexpr(1.4426950408889634)
    PIECE: tl.constexpr = CHUNK // PIECES
    row, part, column = place(words_ptr, rows, ROWS, CHUNK, PIECES, PARTS)
    limit = limit_of(row, x_stride, length, VEC)
    x = load_pieces(x_ptr, x_stride, row, rows, column, limit, -float("inf"), PIECES, VEC)
    largest = x[0].to(tl.float32)
    for i in tl.static_range(1, PIECES):
        largest = tl.maximum(largest, x[i].to(tl.float32))
    largest = tl.max(largest, axis=1)
    if VEC > 1:
        at, there = edge_of(row, rows, part, x_stride, length, limit, VEC)
        edge = tl.load(x_ptr + row[:, None] * x_stride + at, mask=there, other=-float("inf"))
        edge = edge.to(tl.float32)
        largest = tl.maximum(largest, tl.max(edge, axis=1))
    # A row of -inf alone has no exp(x - max); with 0 for the maximum it is 0 / 0, which is right.
    base = tl.where(largest == -float("inf"), 0.0, largest)
    total = tl.zeros((ROWS, PIECE), tl.float32)
    for i in tl.static_range(PIECES):
        total += tl.exp2((again(x[i], tl.program_id(1), HELD, ASM) - base[:, None]) * log2_e)
    total = tl.sum(total, axis=1)
    if VEC > 1:
        total += tl.sum(tl.exp2((edge - base[:, None]) * log2_e), axis=1)
    common = base
    if PARTS > 1:
        bases, totals = meet(base, total, words_ptr, row, part, PARTS, PARTS_BLOCK)
        # A part of -inf alone has the sum 0 and no say in the maximum; lanes past PARTS are so.
        taken = totals != 0
        largest = tl.max(tl.where(taken, bases, -float("inf")), axis=0)
        largest = tl.where(largest == -float("inf"), 0.0, largest)
        factors = tl.where(taken, tl.exp2((bases - largest) * log2_e), 0.0)
        common = tl.full((ROWS,), largest, tl.float32)
        total = tl.full((ROWS,), tl.sum(totals * factors, axis=0), tl.float32)
    for i in tl.static_range(PIECES):
        if HELD:  # exp is taken once more; its scale is in the exponent
            z = (again(x[i], tl.program_id(2), HELD, ASM) - common[:, None]) * log2_e
            z = tl.exp2(z - tl.log2(total)[:, None])
        else:  # what was summed up is still there
            scale = 1.0 / total
            if PARTS > 1:
                # Only the base of a part of -inf alone, 0, may be above the common one.
                scale *= tl.exp2(tl.minimum(base - common, 0.0) * log2_e)
            z = tl.exp2((x[i].to(tl.float32) - base[:, None]) * log2_e) * scale[:, None]
        store_piece(z_ptr, z, row, rows, column + i * PIECE, length, limit, VEC)
    if VEC > 1:
        z = tl.exp2((edge - common[:, None]) * log2_e - tl.log2(total)[:, None])
        to = z_ptr + row[:, None] * length + at
        tl.store(to, z.to(z_ptr.dtype.element_ty), mask=there)


@triton.jit
def softmax_backward_kernel(
    z_ptr, dz_ptr, dx_ptr, words_ptr, rows, length, z_stride, dz_stride,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, PIECES: tl.constexpr, HELD: tl.constexpr,
    ASM: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr,
):  # fmt: skip
    """dx = z · (dz - Σ z · dz)."""
    PIECE: tl.constexpr = CHUNK // PIECES
    row, part, column = place(words_ptr, rows, ROWS, CHUNK, PIECES, PARTS)
    z = load_pieces(z_ptr, z_stride, row, rows, column, length, 0.0, PIECES)
    dz = load_pieces(dz_ptr, dz_stride, row, rows, column, length, 0.0, PIECES)
    dot = tl.zeros((ROWS, PIECE), tl.float32)
    for i in tl.static_range(PIECES):
        dot += z[i].to(tl.float32) * dz[i].to(tl.float32)
    dot = tl.sum(dot, axis=1)
    if PARTS > 1:
        # One number would do.
        dots, _ = meet(dot, dot, words_ptr, row, part, PARTS, PARTS_BLOCK)
        dot = tl.full((ROWS,), tl.sum(dots, axis=0), tl.float32)
    for i in tl.static_range(PIECES):
        zero = tl.program_id(2)
        dx = again(z[i], zero, HELD, ASM) * (again(dz[i], zero, HELD, ASM) - dot[:, None])
        store_piece(dx_ptr, dx, row, rows, column + i * PIECE, length, length)


softmax_choice = choosing("softmax")(partial(row_choice, "softmax_kernel", FORWARD))
softmax_backward_choice = choosing("softmax_backward")(
    partial(row_choice, "softmax_backward_kernel", {})
)


def softmax(x: Tensor, config: RowConfig | None = None) -> Tensor:
    """softmax of [..., length] over its last dimension, in x's dtype; float32 within.

    ValueError if `config` does not fit, or the rows are too long for the GPU.
    """
    z = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_rows(softmax_kernel, softmax_choice, config, {"z_ptr": z}, x=as_rows(x))
    return z


def softmax_backward(z: Tensor, dz: Tensor, config: RowConfig | None = None) -> Tensor:
    """The gradient of x, from the softmax and its gradient. ValueError as for `softmax`."""
    dx = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    rows = {"z": as_rows(z), "dz": as_rows(dz)}
    launch_rows(softmax_backward_kernel, softmax_backward_choice, config, {"dx_ptr": dx}, **rows)
    return dx
