"""Programs that launch wrong kernels, without a specification, each with what is to be found."""

# Triton's own annotations do not know what launches a kernel, and with what.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.jit
def copies_a_block(x_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(z_ptr + i, tl.load(x_ptr + i), mask=i < N)


def no_mask() -> None:
    copies_a_block[(2,)](torch.zeros(40), torch.zeros(40), 40, B=32)


@triton.jit
def stores_a_block(z_ptr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(z_ptr + i, i)


def stores_without_mask() -> None:
    stores_a_block[(2,)](torch.zeros(40, dtype=torch.int32), B=32)


@triton.jit
def far_away_in_a_loop(x_ptr, z_ptr, B: tl.constexpr):
    i = tl.arange(0, B)
    for _ in range(3):
        tl.store(z_ptr + i, tl.load(x_ptr + i + 500))


def in_a_loop() -> None:
    far_away_in_a_loop[(1,)](torch.zeros(16), torch.zeros(16), B=16)


@triton.jit
def products_one_further(a_ptr, b_ptr, c_ptr, N, K, B: tl.constexpr):
    m = tl.program_id(0) * B + tl.arange(0, B)[:, None]
    n = tl.program_id(1) * B + tl.arange(0, B)[None, :]
    total = tl.zeros((B, B), tl.float32)
    for start in range(0, K, B):
        k = start + tl.arange(0, B)
        a = tl.load(a_ptr + m * K + k[None, :] + 1)
        total += tl.dot(a, tl.load(b_ptr + k[:, None] * N + n))
    tl.store(c_ptr + m * N + n, total)


def one_tile_too_far() -> None:
    a, b, c = (torch.zeros(32, 32) for _ in range(3))
    products_one_further[(2, 2)](a, b, c, 32, 32, B=16)


@triton.jit
def takes_strided(x_ptr, z_ptr, N, stride, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(z_ptr + i, tl.load(x_ptr + i * stride, mask=i < N, other=0.0), mask=i < N)


def more_than_the_view_has() -> None:
    x = torch.zeros(9)[::2]
    takes_strided[(1,)](x, torch.zeros(6), 6, x.stride(0), B=8)


def between_the_elements_of_a_view() -> None:
    takes_strided[(1,)](torch.zeros(10)[::2], torch.zeros(5), 5, 1, B=8)


def columns_of_the_neighbour() -> None:
    takes_strided[(1,)](torch.zeros(4, 8)[:, 2:5], torch.zeros(4), 4, 1, B=8)


@triton.jit
def sorts_places(z_ptr, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(z_ptr + tl.sort(i, descending=True), i, mask=i < 2)


def at_sorted_places() -> None:
    sorts_places[(1,)](torch.zeros(7, dtype=torch.int32), B=8)


@triton.jit
def fills_a_row(z_ptr, row, columns: tl.constexpr):
    for column in range(columns):
        tl.store(z_ptr + row * columns + column, 1.0)


@triton.jit
def fills_rows(z_ptr, rows, columns: tl.constexpr):
    for row in range(rows):
        fills_a_row(z_ptr, row, columns)


def in_a_helper() -> None:
    fills_rows[(1,)](torch.zeros(11), 3, columns=4)


@triton.jit
def gathers(index_ptr, x_ptr, z_ptr, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(z_ptr + i, tl.load(x_ptr + tl.load(index_ptr + i)))


def through_a_loaded_index() -> None:
    gathers[(1,)](torch.tensor([0, 3, 1, 8]), torch.zeros(8), torch.zeros(4), B=4)


@triton.jit
def before_the_first(z_ptr):
    tl.store(z_ptr + tl.program_id(0) - 1, 1.0)


def before_a_tensor() -> None:
    before_the_first[(3,)](torch.zeros(3))


@triton.jit
def counts(z_ptr, B: tl.constexpr):
    tl.atomic_add(z_ptr + tl.arange(0, B), 1)


def counts_outside() -> None:
    counts[(1,)](torch.zeros(3, dtype=torch.int32), B=4)


@triton.jit
def all_write_one(z_ptr):
    tl.store(z_ptr, tl.program_id(0))


def two_programs_write() -> None:
    all_write_one[(3,)](torch.zeros(1, dtype=torch.int32))


@triton.jit
def shifts(x_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(x_ptr + i + 1, mask=i + 1 < N, other=0.0)
    tl.store(x_ptr + i, x, mask=i < N)


def shifts_in_place() -> None:
    shifts[(3,)](torch.zeros(48), 48, B=16)


def shifts_through_another_view() -> None:
    x = torch.zeros(33)
    copies_a_block[(2,)](x[1:], x[:32], 32, B=16)


@triton.jit
def lanes_meet(z_ptr, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(z_ptr + i // 2, i)


def two_lanes_write() -> None:
    lanes_meet[(1,)](torch.zeros(4, dtype=torch.int32), B=8)


def reads_what_nobody_wrote() -> None:
    copies_a_block[(1,)](torch.empty(32), torch.zeros(32), 32, B=32)


def torch_reads_what_nobody_wrote() -> None:
    z = torch.empty(40)
    copies_a_block[(1,)](torch.zeros(32), z, 32, B=32)
    z.sum()


@triton.jit
def sums_a_row(x_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.arange(0, B)
    x = tl.load(x_ptr + i, mask=i < N)
    tl.store(z_ptr, tl.max(x, axis=0))


def uses_undefined_lanes() -> None:
    sums_a_row[(1,)](torch.full((5,), -1.0), torch.zeros(1), 5, B=8)


@triton.jit
def follows_undefined_places(index_ptr, x_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.arange(0, B)
    index = tl.load(index_ptr + i, mask=i < N)
    tl.store(z_ptr + i, tl.load(x_ptr + index))


def goes_to_an_undefined_place() -> None:
    index = torch.zeros(5, dtype=torch.int32)
    follows_undefined_places[(1,)](index, torch.zeros(1), torch.zeros(8), 5, B=8)


@triton.jit
def adds_unlike_blocks(z_ptr, A: tl.constexpr, B: tl.constexpr):
    tl.store(z_ptr + tl.arange(0, A), tl.arange(0, A) + tl.arange(0, B))


def stops_with_an_error() -> None:
    adds_unlike_blocks[(1,)](torch.zeros(8), A=8, B=4)


@gluon.jit
def moves_in_gluon(x_ptr, z_ptr, N, B: gl.constexpr, layout: gl.constexpr):
    i = gl.program_id(0) * B + gl.arange(0, B, layout=layout)
    x = gl.load(x_ptr + i, mask=i < N)
    gl.store(z_ptr + i + 1, x, mask=i < N)


def in_gluon() -> None:
    layout = gl.BlockedLayout([1], [32], [1], [0])
    moves_in_gluon[(2,)](torch.zeros(40), torch.zeros(40), 40, 32, layout, num_warps=1)


# A function, the finding, and what stands in the line of the kernel, or of the host.
WRONG = [
    (no_mask, "out-of-bounds-load", "tl.load(x_ptr + i)"),
    (stores_without_mask, "out-of-bounds-store", "tl.store(z_ptr + i, i)"),
    (in_a_loop, "out-of-bounds-load", "i + 500"),
    (one_tile_too_far, "out-of-bounds-load", "k[None, :] + 1"),
    (more_than_the_view_has, "out-of-bounds-load", "i * stride"),
    (between_the_elements_of_a_view, "out-of-bounds-load", "i * stride"),
    (columns_of_the_neighbour, "out-of-bounds-load", "i * stride"),
    (at_sorted_places, "out-of-bounds-store", "tl.sort"),
    (in_a_helper, "out-of-bounds-store", "row * columns + column"),
    (through_a_loaded_index, "out-of-bounds-load", "tl.load(index_ptr + i)"),
    (before_a_tensor, "out-of-bounds-store", "- 1, 1.0"),
    (counts_outside, "out-of-bounds-store", "tl.atomic_add"),
    (two_programs_write, "write-conflict", "tl.program_id(0))"),
    (shifts_in_place, "read-of-other", "tl.store(x_ptr + i, x"),
    (shifts_through_another_view, "read-of-other", "tl.store(z_ptr + i"),
    (two_lanes_write, "lane-conflict", "i // 2"),
    (reads_what_nobody_wrote, "unwritten-read", "tl.load(x_ptr + i)"),
    (torch_reads_what_nobody_wrote, "unwritten-read", "z.sum()"),
    (uses_undefined_lanes, "undefined-lanes", "tl.max(x"),
    (goes_to_an_undefined_place, "out-of-bounds-load", "x_ptr + index"),
    (in_gluon, "out-of-bounds-store", "i + 1, x"),
    (stops_with_an_error, "crash", "tl.arange(0, A) + tl.arange(0, B)"),
]
