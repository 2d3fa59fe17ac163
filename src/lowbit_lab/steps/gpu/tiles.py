"""The steps in which a text says what a block does to tiles, in Triton: threads, shared memory and
what is loaded ahead are the compiler's."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from lowbit.kernels.triton.fast.launch import launch
from lowbit_lab.steps.gpu import PLAIN
from lowbit_lab.steps.registry import step

ROWS, COLUMNS, DEPTH, TOGETHER = 128, 128, 32, 8
"""Of a tile of the output, of K at a time, and of rows of tiles that are worked on together."""


@triton.jit
def product_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    M,
    N,
    K,
    PRECISION: tl.constexpr,
    B_M: tl.constexpr,
    B_N: tl.constexpr,
    B_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A program holds a tile of the output, GROUP rows of tiles before the next column, so that
    programs that run at one time share what they read."""
    down, across = tl.cdiv(M, B_M), tl.cdiv(N, B_N)
    first = tl.program_id(0) // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    inside = tl.program_id(0) % (GROUP * across)
    m = (first + inside % height) * B_M + tl.arange(0, B_M)
    n = (inside // height) * B_N + tl.arange(0, B_N)
    total = tl.zeros((B_M, B_N), tl.float32)
    for start in range(0, K, B_K):
        k = start + tl.arange(0, B_K)
        a_mask, b_mask = (m < M)[:, None] & (k < K)[None, :], (k < K)[:, None] & (n < N)[None, :]
        a = tl.load(a_ptr + m[:, None] * K + k[None, :], mask=a_mask, other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + n[None, :], mask=b_mask, other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    mask = (m < M)[:, None] & (n < N)[None, :]
    tl.store(out_ptr + m[:, None] * N + n[None, :], total, mask=mask)


def _launch(a: Any, b: Any, out: Any, precision: str, warps: int) -> None:
    (m, k), n = a.shape, b.shape[1]
    grid = (triton.cdiv(m, ROWS) * triton.cdiv(n, COLUMNS),)
    given = {"a_ptr": a, "b_ptr": b, "out_ptr": out, "M": m, "N": n, "K": k}
    tile = {"B_M": ROWS, "B_N": COLUMNS, "B_K": DEPTH, "GROUP": TOGETHER}
    arguments = {**given, "PRECISION": precision, **tile}
    launch(product_kernel, grid, arguments, num_warps=warps, num_stages=3)


@step("gpu", 5, PLAIN)
def compiled_tiles(a: Any, b: Any, out: Any) -> None:
    """Tiles of 128 by 128: the compiler gives each of 256 threads 64 outputs, and loads ahead.

    Bytes: from memory each number once for 128 multiply-adds, fetched while the last are
    multiplied; from shared memory one byte for each. Limit: the float32 units.
    """
    _launch(a, b, out, "ieee", 8)


@step("gpu", 6, PLAIN)
def tensor_cores(a: Any, b: Any, out: Any) -> None:
    """Tensor cores: each number is split into two of 11 bits, and three products make one.

    Bytes: those of step 5. A tensor core rounds float32 to TF32; what is lost is a second number,
    and a1 b1 + a1 b2 + a2 b1 is a product to nearly float32's precision (Ootomo and Yokota,
    "Recovering single precision accuracy from Tensor Cores", 2022). Limit: the splitting, and three
    instructions for one; with TF32 alone, where that is enough, it would be one.
    """
    _launch(a, b, out, "tf32x3", 8)
