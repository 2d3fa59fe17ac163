"""Products of float32 matrices on a GPU, from a thread for each output to tensor cores.

    lowbit compare examples/steps/gpu.py

Each variant has one idea that the one before it has not. See docs/steps.md.
"""

# ruff: noqa: F722
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import triton
import triton.language as tl
from jaxtyping import Float32
from numba import cuda, float32

from lowbit.spec import operation
from lowbit_lab.compare import variant


@operation(
    exercise={"M": 130, "N": 129, "K": 33}, factors=("a", "b"), accumulator="float32", result="out"
)
def spec(
    a: Float32[np.ndarray, "M K"], b: Float32[np.ndarray, "K N"]
) -> Float32[np.ndarray, "M N"]:
    """out[m, n] = Σ_k a[m, k] · b[k, n], summed in float32 in any order."""
    return a @ b


sizes = {"M": 2048, "N": 2048, "K": 2048}
small = {"M": 33, "N": 66, "K": 17}


# The steps in which a text says what each thread does, in Numba-CUDA.

TILE = 16
"""Threads of a block along each axis, and of K at a time in shared memory."""
EACH = 4
"""Rows and columns of outputs of a thread in the fourth step: a block then has 64 by 64."""
WIDE = TILE * EACH
block = (TILE, TILE)


@cuda.jit
def one_thread_each(a, b, out):
    """A thread for each output, its row from x.

    Bytes: each multiply-add reads eight. The threads of a warp differ in x, so they read 32 rows of
    a at once, each from a line of its own of which four bytes are used, and store likewise.
    Limit: the lines: 33 for 32 multiply-adds.
    """
    m = cuda.blockIdx.x * TILE + cuda.threadIdx.x
    n = cuda.blockIdx.y * TILE + cuda.threadIdx.y
    if m < out.shape[0] and n < out.shape[1]:
        total = float32(0)
        for k in range(a.shape[1]):
            total += a[m, k] * b[k, n]
        out[m, n] = total


@cuda.jit
def coalesced(a, b, out):
    """The column from x: threads side by side read numbers side by side.

    Bytes: still eight for each multiply-add, but those of a warp lie in two lines of b, and one or
    two numbers of a serve it. Limit: the nearest cache, from which each of them comes K times.
    """
    n = cuda.blockIdx.x * TILE + cuda.threadIdx.x
    m = cuda.blockIdx.y * TILE + cuda.threadIdx.y
    if m < out.shape[0] and n < out.shape[1]:
        total = float32(0)
        for k in range(a.shape[1]):
            total += a[m, k] * b[k, n]
        out[m, n] = total


@cuda.jit
def shared_memory(a, b, out):
    """A block of threads brings a tile of a and one of b into shared memory, and all use them.

    Bytes: each number comes from memory once for 16 multiply-adds; from shared memory eight bytes
    for each. Limit: shared memory: two loads for one multiply-add.
    """
    left = cuda.shared.array((TILE, TILE), float32)
    right = cuda.shared.array((TILE, TILE), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    n = cuda.blockIdx.x * TILE + x
    m = cuda.blockIdx.y * TILE + y
    total = float32(0)
    for start in range(0, a.shape[1], TILE):
        left[y, x] = right[y, x] = float32(0)
        if m < a.shape[0] and start + x < a.shape[1]:
            left[y, x] = a[m, start + x]
        if start + y < b.shape[0] and n < b.shape[1]:
            right[y, x] = b[start + y, n]
        cuda.syncthreads()
        for k in range(TILE):
            total += left[y, k] * right[k, x]
        cuda.syncthreads()
    if m < out.shape[0] and n < out.shape[1]:
        out[m, n] = total


@cuda.jit
def register_tile(a, b, out):
    """A thread has four by four outputs in registers: each number loaded serves four of them.

    Bytes: from memory a quarter of step 3, from shared memory two for a multiply-add. Limit: what
    Numba makes of the loops: addresses are computed, and loads wait, where nothing runs ahead.
    """
    left = cuda.shared.array((TILE, WIDE), float32)
    right = cuda.shared.array((TILE, WIDE), float32)
    sums = cuda.local.array((EACH, EACH), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    first_n = cuda.blockIdx.x * WIDE
    first_m = cuda.blockIdx.y * WIDE
    for i in range(EACH):
        for j in range(EACH):
            sums[i, j] = float32(0)
    for start in range(0, a.shape[1], TILE):
        for i in range(EACH):
            row, column = y + i * TILE, x + i * TILE
            left[x, row] = right[y, column] = float32(0)
            if first_m + row < a.shape[0] and start + x < a.shape[1]:
                left[x, row] = a[first_m + row, start + x]
            if start + y < b.shape[0] and first_n + column < b.shape[1]:
                right[y, column] = b[start + y, first_n + column]
        cuda.syncthreads()
        for k in range(TILE):
            for i in range(EACH):
                for j in range(EACH):
                    sums[i, j] += left[k, y + i * TILE] * right[k, x + j * TILE]
        cuda.syncthreads()
    for i in range(EACH):
        for j in range(EACH):
            m, n = first_m + y + i * TILE, first_n + x + j * TILE
            if m < out.shape[0] and n < out.shape[1]:
                out[m, n] = sums[i, j]


# The steps in which a text says what a block does to tiles, in Triton: threads, shared memory and
# what is loaded ahead are the compiler's.


@triton.jit
def tile_product(
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


@triton.jit
def compiled_tiles(
    a_ptr,
    b_ptr,
    out_ptr,
    M,
    N,
    K,
    B_M: tl.constexpr,
    B_N: tl.constexpr,
    B_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Tiles of 128 by 128: the compiler gives each of 256 threads 64 outputs, and loads ahead.

    Bytes: from memory each number once for 128 multiply-adds, fetched while the last are
    multiplied; from shared memory one byte for each. Limit: the float32 units.
    """
    tile_product(a_ptr, b_ptr, out_ptr, M, N, K, "ieee", B_M, B_N, B_K, GROUP)


@triton.jit
def tensor_cores(
    a_ptr,
    b_ptr,
    out_ptr,
    M,
    N,
    K,
    B_M: tl.constexpr,
    B_N: tl.constexpr,
    B_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Tensor cores: each number is split into two of 11 bits, and three products make one.

    Bytes: those of step 5. A tensor core rounds float32 to TF32; what is lost is a second number,
    and a1 b1 + a1 b2 + a2 b1 is a product to nearly float32's precision (Ootomo and Yokota,
    "Recovering single precision accuracy from Tensor Cores", 2022). Limit: the splitting, and three
    instructions for one; with TF32 alone, where that is enough, it would be one.
    """
    tile_product(a_ptr, b_ptr, out_ptr, M, N, K, "tf32x3", B_M, B_N, B_K, GROUP)


# The variants with their grids, and what others make of the same product.


def tiles(size: dict[str, int]) -> tuple[int, int]:
    """Blocks of TILE by TILE outputs, the columns along x."""
    return -(-size["N"] // TILE), -(-size["M"] // TILE)


def wide_tiles(size: dict[str, int]) -> tuple[int, int]:
    return -(-size["N"] // WIDE), -(-size["M"] // WIDE)


def programs(size: dict[str, int]) -> int:
    return -(-size["M"] // size["B_M"]) * -(-size["N"] // size["B_N"])


def cublas(a: Any, b: Any) -> Callable[[], Any]:
    """cuBLAS in float32"""
    return lambda: a @ b


def cublas_rounded(a: Any, b: Any) -> Callable[[], Any]:
    """cuBLAS, operands rounded to TF32"""
    import torch

    def call() -> Any:
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return a @ b
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False

    return call


def lowbit_product(a: Any, b: Any) -> Callable[[], Any]:
    """lowbit.torch.functional.bmm"""
    from lowbit.torch import functional

    return lambda: functional.bmm(a[None], b[None])[0]


in_tiles = partial(
    variant, grid=programs, B_M=128, B_N=128, B_K=32, GROUP=8, num_warps=8, num_stages=3
)
variants = [
    variant(one_thread_each, grid=lambda size: tiles(size)[::-1]),
    variant(coalesced, grid=tiles),
    variant(shared_memory, grid=tiles),
    variant(register_tile, grid=wide_tiles),
    in_tiles(compiled_tiles),
    in_tiles(tensor_cores),
]
peers = {
    "torch (cuBLAS)": cublas,
    "torch (cuBLAS, TF32)": cublas_rounded,
    "lowbit": lowbit_product,
}
base = ("torch (cuBLAS)", "lowbit")
