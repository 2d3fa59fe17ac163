"""Products of float32 matrices, from three loops to packed operands.

    lowbit compare examples/steps/float32.py

Each variant has one idea that the one before it has not. See docs/steps.md.
"""

# ruff: noqa: F722
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float32
from numba import njit
from numpy.typing import NDArray

import lowbit
from lowbit.isa.generic import fma, load_head, minimum, store_head
from lowbit.isa.types import F32Pointer, Int, f32
from lowbit.isa.value import Register, Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.spec import operation
from lowbit_lab import CpuKernel
from lowbit_lab.compare import variant

Array = NDArray[Any]


@operation(
    exercise={"M": 5, "N": 35, "K": 70}, factors=("a", "b"), accumulator="float32", result="out"
)
def spec(
    a: Float32[np.ndarray, "M K"], b: Float32[np.ndarray, "K N"]
) -> Float32[np.ndarray, "M N"]:
    """out[m, n] = Σ_k a[m, k] · b[k, n], summed in float32 in any order."""
    return a @ b


sizes = {"M": 512, "N": 512, "K": 512}

ROWS, COLUMNS = 8, 48
"""M and N are padded to multiples of these: whole tiles on every instruction set."""


def rows(a: Array) -> Array:
    """Zeros up to whole tiles of rows."""
    return np.ascontiguousarray(np.pad(a, ((0, -len(a) % ROWS), (0, 0))))


def columns(b: Array) -> Array:
    """Zeros up to whole tiles of columns."""
    return np.ascontiguousarray(np.pad(b, ((0, 0), (0, -b.shape[1] % COLUMNS))))


# The steps that are a compiler's to make fast, in Numba.

LOOP_K_BLOCK, N_BLOCK = 64, 1024
"""A block of b: 256 KiB, which a second-level cache holds."""


@njit
def float32_loops(a, b, out):
    """Three loops, the sum innermost.

    a: float32 [M, K], b: float32 [K, N], out: float32 [M, N].

    Bytes: each multiply-add reads four of a and four of b, a row of b further than the last. Limit:
    waiting: for the line, and for the sum before, which an addition of floats takes 3 or 4 cycles
    to make. The compiler may not add in another order, so it makes no vectors of this.
    """
    for m in range(a.shape[0]):
        for n in range(b.shape[1]):
            total = np.float32(0)
            for k in range(a.shape[1]):
                total += a[m, k] * b[k, n]
            out[m, n] = total


@njit
def float32_loop_order(a, b, out):
    """The loop over columns innermost: neighbouring sums do not wait for each other.

    a: float32 [M, K], b: float32 [K, N], out: float32 [M, N].

    Bytes: twelve for each multiply-add: four of b, and a sum read and written. Vectors of them, and
    the order of each sum is what it was. Limit: the way to the second cache and back, K times.
    """
    for m in range(a.shape[0]):
        for n in range(b.shape[1]):
            out[m, n] = 0
        for k in range(a.shape[1]):
            for n in range(b.shape[1]):
                out[m, n] += a[m, k] * b[k, n]


@njit
def float32_blocks(a, b, out):
    """A block of b stays in the second cache while all rows of a pass over it.

    a: float32 [M, K], b: float32 [K, N], out: float32 [M, N].

    Bytes: those of step 2, but b comes from memory once. Limit: two loads and a store for a product
    and a sum; a core can load two vectors and store one in a cycle, and could multiply and add
    four.
    """
    out[:] = 0
    for first in range(0, b.shape[1], N_BLOCK):
        for start in range(0, a.shape[1], LOOP_K_BLOCK):
            for m in range(a.shape[0]):
                sums = out[m, first : first + N_BLOCK]
                for k in range(start, min(start + LOOP_K_BLOCK, a.shape[1])):
                    x, line = a[m, k], b[k, first : first + N_BLOCK]
                    for n in range(sums.size):
                        sums[n] += x * line[n]


# The steps that need more than a compiler finds, in lowbit's language of kernels.
#
# A tile of the output, some rows by some vectors of columns, stays in registers while K passes by.

K_BLOCK = 256
"""Of K at a time: a panel of b is 16 or 48 KiB then, which the nearest cache holds, or nearly."""
M_BLOCK = 96
"""Rows of a at a time: 96 KiB, in the second-level cache."""

_Sums = list[list[Register]]
_Combine = Callable[[Value, Value, Value], Value]


def _tile(k: Builder) -> tuple[int, int, int]:
    """Rows, vectors, and lanes of these."""
    lanes = k.isa.vector_bytes // f32.bytes
    return (8, 3, lanes) if k.isa.vector_registers == 32 else (4, 2, lanes)


def _twice_rounded(a: Value, b: Value, total: Value) -> Value:
    return total + a * b


def _multiply(
    k: Builder,
    sums: _Sums,
    count: Value,
    left: Callable[[Value, int], Value],
    right: Callable[[Value], Value],
    combine: _Combine,
) -> None:
    """Add `count` products to each sum. left: where a's number at a k and a row of the tile lies;
    right: where b's numbers at a k begin."""
    _, vectors, lanes = _tile(k)
    for i in k.range(0, count):
        start = right(i)
        columns = [(start + v * lanes).load(lanes) for v in range(vectors)]
        for r, line in enumerate(sums):
            x = left(i, r).load().splat(lanes)
            for total, one in zip(line, columns, strict=True):
                total.value = combine(x, one, total.value)


def _zeros(k: Builder) -> _Sums:
    rows, vectors, lanes = _tile(k)
    zero = k.zeros(f32, lanes)
    return [[k.register(zero) for _ in range(vectors)] for _ in range(rows)]


def _store(
    k: Builder,
    sums: _Sums,
    out: Value,
    at: tuple[Value, Value],
    sizes: tuple[Value, Value, Value],
    more: bool = False,
) -> None:
    """What exists of a tile, to where it begins: row and column; `more`: on top of what is there.
    sizes: M, N and the stride."""
    (row, column), (m, n, stride), lanes = at, sizes, _tile(k)[2]
    for r, line in enumerate(sums):
        for _ in k.when(row + r < m):
            for v, total in enumerate(line):
                place = out + ((row + r) * stride + column + v * lanes)
                left = n - column - v * lanes
                value = total.value + load_head(place, left, lanes) if more else total.value
                store_head(value, place, left)


def _unpacked(
    k: Builder,
    operands: tuple[Value, Value, Value],
    sizes: tuple[Value, Value, Value],
    depth: Value,
    combine: _Combine,
) -> None:
    """The product of operands where they lie; b with rows padded to whole tiles."""
    (a, b, out), (m, n, _) = operands, sizes
    rows, vectors, lanes = _tile(k)
    width = (n + (COLUMNS - 1)) // COLUMNS * COLUMNS
    for column in k.range(0, n, vectors * lanes):
        for row in k.range(0, m, rows):
            with k.scope():
                sums = _zeros(k)
                first, top = a + row * depth, b + column
                _multiply(
                    k,
                    sums,
                    depth,
                    lambda i, r, first=first: first + (depth * r + i),
                    lambda i, top=top: top + i * width,
                    combine,
                )
                _store(k, sums, out, (row, column), sizes)


@kernel
def float32_register_tile(
    k: Builder,
    a: F32Pointer,
    b: F32Pointer,
    out: F32Pointer,
    stride_out_m: Int,
    m: Int,
    n: Int,
    depth: Int,
) -> None:
    """A tile of sums stays in registers, and is stored once.

    Bytes: with 8 rows by 3 vectors each number of b serves 8 multiply-adds, each of a 48; nothing
    is stored until K has passed. Limit: a product and a sum for each multiply-add, each rounded.
    """
    _unpacked(k, (a, b, out), (m, n, stride_out_m), depth, _twice_rounded)


@kernel
def float32_fused(
    k: Builder,
    a: F32Pointer,
    b: F32Pointer,
    out: F32Pointer,
    stride_out_m: Int,
    m: Int,
    n: Int,
    depth: Int,
) -> None:
    """One instruction multiplies and adds, and rounds once.

    Bytes: those of step 4. Limit: where the operands lie. Each k is another row of b, a page
    further on where N is 1024, and rows of a whose length is a power of two push each other out.
    """
    _unpacked(k, (a, b, out), (m, n, stride_out_m), depth, fma)


def _pack_panel(
    k: Builder, b: Value, panel: Value, place: tuple[Value, Value, Value], width: Value
) -> None:
    """Copy `count` rows of a tile's columns, from row `start` on, one behind another."""
    (start, count, column), (_, vectors, lanes) = place, _tile(k)
    for i in k.range(0, count):
        line = b + ((start + i) * width + column)
        for v in range(vectors):
            (panel + (i * (vectors * lanes) + v * lanes)).store((line + v * lanes).load(lanes))


@kernel
def float32_packed(
    k: Builder,
    a: F32Pointer,
    b: F32Pointer,
    out: F32Pointer,
    stride_out_m: Int,
    m: Int,
    n: Int,
    depth: Int,
) -> None:
    """Both operands are copied into the order of their use, block by block, in each call.

    Bytes: a block of 96 rows of a and 256 k lies in the second cache, a panel of b in the first,
    and all is read one behind another (Goto and van de Geijn, "Anatomy of high-performance matrix
    multiplication", 2008). Copying costs M times N over M: little. Limit: the multipliers; then
    what is at the edges, of tiles, of blocks and of pages, which is what lowbit.gemm goes on with.
    """
    rows, vectors, lanes = _tile(k)
    wide, width = vectors * lanes, (n + (COLUMNS - 1)) // COLUMNS * COLUMNS
    panel, block = k.local(f32, K_BLOCK * wide), k.local(f32, M_BLOCK * K_BLOCK)
    for top in k.range(0, m, M_BLOCK):
        height = minimum(k.index(M_BLOCK), m - top)
        for start in k.range(0, depth, K_BLOCK):
            count = minimum(k.index(K_BLOCK), depth - start)
            for row in k.range(0, height, rows):
                for i in k.range(0, count):
                    for r in range(rows):
                        x = (a + ((top + row + r) * depth + start + i)).load()
                        (block + (row * K_BLOCK + i * rows + r)).store(x)
            for column in k.range(0, n, wide):
                _pack_panel(k, b, panel, (start, count, column), width)
                for row in k.range(0, height, rows):
                    with k.scope():
                        sums = _zeros(k)
                        packed = block + row * K_BLOCK
                        _multiply(
                            k,
                            sums,
                            count,
                            lambda i, r, packed=packed: packed + (i * rows + r),
                            lambda i: panel + i * wide,
                            fma,
                        )
                        at = top + row, column
                        for _ in k.when(start.equals(0)):
                            _store(k, sums, out, at, (m, n, stride_out_m))
                        for _ in k.when(start > 0):
                            _store(k, sums, out, at, (m, n, stride_out_m), more=True)


# The variants, with what the kernels in lowbit's language are written for and how operands lie.


def length(size: dict[str, int]) -> int:
    """Of a row of a."""
    return size["K"]


def numpy_product(a: Array, b: Array) -> Callable[[], Array]:
    """OpenBLAS"""
    return partial(np.matmul, a, b)


def torch_product(a: Array, b: Array) -> Callable[[], Any]:
    """MKL, on processors of its maker; else what torch is built with"""
    import torch

    return partial(torch.mm, torch.from_numpy(a), torch.from_numpy(b))


def lowbit_product(a: Array, b: Array) -> Callable[[], Array]:
    """the same kernels, cut by the shape"""
    return partial(lowbit.gemm, a, b, threads=1)


variants = [
    float32_loops,
    float32_loop_order,
    float32_blocks,
    *(
        variant(CpuKernel(each, isas), arrange={"a": rows, "b": columns}, depth=length)
        for each, isas in (
            (float32_register_tile, ("generic", "avx2", "avx512")),
            (float32_fused, ("avx2", "avx512")),
            (float32_packed, ("avx2", "avx512")),
        )
    ),
]
peers = {"numpy": numpy_product, "torch": torch_product, "lowbit": lowbit_product}
base = ("torch", "lowbit")
