"""Exact products of 8-bit integers, unsigned by signed, from three loops to tiles.

    lowbit compare examples/steps/int8.py

Each variant has one idea that the one before it has not. See docs/steps.md.
"""

# ruff: noqa: F722
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Int8, Int32, UInt8
from numba import njit
from numpy.typing import NDArray

import lowbit
from lowbit.isa.amx import tdpbusd, tileloadd, tilestored, tilezero
from lowbit.isa.avx2 import vpdpbusd_256, vpmaddubsw, vpmaddwd
from lowbit.isa.avx512 import vpdpbusd, vpmaddubsw_512, vpmaddwd_512
from lowbit.isa.generic import madd16, store_head
from lowbit.isa.tiles import ROW_BYTES
from lowbit.isa.tiles import ROWS as TILE_ROWS
from lowbit.isa.types import (
    Int,
    S8Pointer,
    S16Pointer,
    S32Pointer,
    U8Pointer,
    Vector,
    s16,
    s32,
    u8,
    u32,
)
from lowbit.isa.value import Register, Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.shared.tiles import configure, release
from lowbit.spec import operation
from lowbit.spec.operations.products import integer_product
from lowbit_lab import CpuKernel
from lowbit_lab.compare import byte_product, variant

Array = NDArray[Any]


@operation(exercise={"M": 5, "N": 35, "K": 70}, factors=("a", "b"), result="out")
def spec(a: UInt8[np.ndarray, "M K"], b: Int8[np.ndarray, "K N"]) -> Int32[np.ndarray, "M N"]:
    """out[m, n] = Σ_k a[m, k] · b[k, n], exactly."""
    return integer_product(a, b)


sizes = {"M": 512, "N": 512, "K": 512}

ROWS, COLUMNS, LINE = 32, 96, 64
"""M, N and K are padded to multiples of these: whole tiles on every instruction set."""
PANEL = 16
"""Columns that lie together, since so many sums of 32 bits are a line of 64 bytes."""


def padded(matrix: Array, rows: int, columns: int) -> Array:
    """With zeros up to multiples of so many rows and columns."""
    beyond = [(0, -size % of) for size, of in zip(matrix.shape, (rows, columns), strict=True)]
    return np.ascontiguousarray(np.pad(matrix, beyond))


def _panels(b: Array, together: int) -> Array:
    """[N / 16][K / together][16][together]: what one column multiplies at once, side by side."""
    whole = padded(b, LINE, COLUMNS)
    k, n = whole.shape
    parts = whole.reshape(k // together, together, n // PANEL, PANEL)
    return np.ascontiguousarray(parts.transpose(2, 0, 3, 1))


def rows(matrix: Array) -> Array:
    """Zeros up to whole tiles of rows."""
    return padded(matrix, ROWS, 1)


def columns(matrix: Array) -> Array:
    """Zeros up to whole tiles of columns."""
    return padded(matrix, 1, COLUMNS)


def whole(matrix: Array) -> Array:
    """Zeros up to whole tiles of rows, and up to whole lines of K."""
    return padded(matrix, ROWS, LINE)


def words(matrix: Array) -> Array:
    return whole(matrix).astype(np.int16)


def pairs(b: Array) -> Array:
    """16-bit words in panels of 16 columns, two k of a column side by side."""
    return _panels(b, 2).astype(np.int16)


def quads(b: Array) -> Array:
    """Bytes in panels of 16 columns, four k of a column side by side."""
    return _panels(b, 4)


# The steps that are a compiler's to make fast, in Numba.

K_BLOCK, N_BLOCK = 128, 1024
"""A block of b: 128 KiB of bytes, which a second-level cache holds."""


@njit
def int8_loops(a, b, out):
    """Three loops, the sum innermost.

    a: uint8 [M, K], b: int8 [K, N], out: int32 [M, N].

    Bytes: each multiply-add reads a byte of a and one of b, N bytes from the last: a cache line of
    64 for the sake of one. Limit: waiting for these lines, one multiply-add at a time.
    """
    for m in range(a.shape[0]):
        for n in range(b.shape[1]):
            total = np.int32(0)
            for k in range(a.shape[1]):
                total = np.int32(total + np.int32(a[m, k]) * np.int32(b[k, n]))
            out[m, n] = total


@njit
def int8_loop_order(a, b, out):
    """The loop over columns innermost, which the compiler makes vectors of.

    a: uint8 [M, K], b: int8 [K, N], out: int32 [M, N].

    Bytes: nine for each multiply-add: one of b, and a sum of four read and written. Limit: the sums
    on their way through the cache, K times.
    """
    for m in range(a.shape[0]):
        for n in range(b.shape[1]):
            out[m, n] = 0
        for k in range(a.shape[1]):
            x = np.int32(a[m, k])
            for n in range(b.shape[1]):
                out[m, n] += x * np.int32(b[k, n])


@njit
def int8_blocks(a, b, out):
    """A block of b stays in the second cache while all rows of a pass over it.

    a: uint8 [M, K], b: int8 [K, N], out: int32 [M, N].

    Bytes: those of step 2, but b comes from memory once, where it is larger than that cache. Limit:
    still the sums: two loads, a widening, a product, a sum and a store for a few multiply-adds.
    """
    out[:] = 0
    for first in range(0, b.shape[1], N_BLOCK):
        for start in range(0, a.shape[1], K_BLOCK):
            for m in range(a.shape[0]):
                sums = out[m, first : first + N_BLOCK]
                for k in range(start, min(start + K_BLOCK, a.shape[1])):
                    x, line = np.int32(a[m, k]), b[k, first : first + N_BLOCK]
                    for n in range(sums.size):
                        sums[n] += x * np.int32(line[n])


# The steps that need more than a compiler finds, in lowbit's language of kernels.
#
# All share a frame: a tile of the output, some rows by some vectors of columns, stays in registers
# while K passes by; then it is stored. A step says what happens for a few k.

_Sums = list[list[Register]]
_NARROW = 8  # sums of two products of a nibble and a byte that 16 bits hold: 8 * 2 * 15 * 128


def _tile(k: Builder) -> tuple[int, int]:
    """Rows and vectors whose sums are three quarters of the registers, or half of few."""
    return (
        (8, 3) if k.isa.vector_registers == 32 else (2, 4) if k.isa.vector_bytes == 16 else (4, 2)
    )


def _tiles(
    k: Builder,
    out: Value,
    sizes: tuple[Value, Value, Value],
    shape: tuple[int, int],
    multiply: Callable[[Value, Value, _Sums], None],
) -> None:
    """Have every tile of out multiplied, and store what of it exists. sizes: M, N and how far rows
    of out are apart. multiply: given the first row, the first column, and registers of zeros."""
    (m, n, stride), (rows, vectors) = sizes, shape
    lanes = k.isa.vector_bytes // 4
    for column in k.range(0, n, vectors * lanes):
        for row in k.range(0, m, rows):
            with k.scope():
                zero = k.zeros(s32, lanes)
                sums = [[k.register(zero) for _ in range(vectors)] for _ in range(rows)]
                multiply(row, column, sums)
                for r, line in enumerate(sums):
                    for _ in k.when(row + r < m):
                        for v, total in enumerate(line):
                            place = out + ((row + r) * stride + column + v * lanes)
                            store_head(total.value, place, n - column - v * lanes)


def _places(
    k: Builder, b: Value, column: Value, vectors: int, panel: Value, together: int
) -> list[Value]:
    """Where the vectors of a tile begin in packed panels of so many elements each."""
    lanes = k.isa.vector_bytes // 4
    inside = [(v * lanes // PANEL, v * lanes % PANEL) for v in range(vectors)]
    return [b + ((column // PANEL + p) * panel + at * together) for p, at in inside]


@kernel
def int8_register_tile(
    k: Builder,
    a: U8Pointer,
    b: S8Pointer,
    out: S32Pointer,
    stride_out_m: Int,
    m: Int,
    n: Int,
    depth: Int,
) -> None:
    """A tile of sums stays in registers, and is stored once.

    Bytes: for each k, a number of a for each row and a vector of b for each vector of columns feed
    rows times vectors of multiply-adds: with 8 by 3 a byte for eleven instead of nine for one.
    Limit: instructions. Bytes become 32-bit numbers, of which a vector holds few.
    """
    rows, vectors = _tile(k)
    lanes = k.isa.vector_bytes // 4
    width = (n + (COLUMNS - 1)) // COLUMNS * COLUMNS

    def multiply(row: Value, column: Value, sums: _Sums) -> None:
        for i in k.range(0, depth):
            start = b + (i * width + column)
            columns = [(start + v * lanes).load(lanes).to(s32) for v in range(vectors)]
            for r, line in enumerate(sums):
                x = (a + ((row + r) * depth + i)).load().to(s32).splat(lanes)
                for total, one in zip(line, columns, strict=True):
                    total.value = total.value + x * one

    _tiles(k, out, (m, n, stride_out_m), (rows, vectors), multiply)


@kernel
def int8_packed_pairs(
    k: Builder,
    a: S16Pointer,
    b: S16Pointer,
    out: S32Pointer,
    stride_out_m: Int,
    m: Int,
    n: Int,
    depth: Int,
) -> None:
    """b is packed in the order of its use, as 16-bit words of which one instruction adds pairs.

    Bytes: two for each number, read one behind another: no address is far from the last. Limit:
    instructions, half as many as in step 4: vpmaddwd multiplies two k of a column and adds them.
    """
    rows, vectors = _tile(k)
    lanes = k.isa.vector_bytes // 4
    multiply_add = {16: vpmaddwd_512, 8: vpmaddwd}.get(lanes, madd16)
    words = Vector(s16, 2 * lanes)

    def multiply(row: Value, column: Value, sums: _Sums) -> None:
        panels = _places(k, b, column, vectors, depth * PANEL, 2)
        for i in k.range(0, depth, 2):
            columns = [(place + i * PANEL).load(2 * lanes) for place in panels]
            for r, line in enumerate(sums):
                pair = (a + ((row + r) * depth + i)).cast(u32).load().splat(lanes).bits(words)
                for total, one in zip(line, columns, strict=True):
                    total.value = total.value + multiply_add(pair, one)

    _tiles(k, out, (m, n, stride_out_m), (rows, vectors), multiply)


@kernel
def int8_split_bytes(
    k: Builder,
    a: U8Pointer,
    b: S8Pointer,
    out: S32Pointer,
    stride_out_m: Int,
    m: Int,
    n: Int,
    depth: Int,
) -> None:
    """Bytes are multiplied as bytes, a in two halves of four bits so that nothing saturates.

    Bytes: one for each number. vpmaddubsw multiplies twice as many as vpmaddwd, but adds pairs in
    16 bits, and 2 * 255 * 127 is too much for these: it saturates and says nothing. A half of a
    byte is at most 15, so that even eight pairs fit, and sums are widened once in eight times.
    Limit: instructions: two products for the two halves, so that little of the gain is left.
    """
    wide = k.isa.vector_bytes == ROW_BYTES
    rows, vectors = (4, 2) if wide else (2, 2)
    lanes = k.isa.vector_bytes // 4
    pairs_of_bytes = vpmaddubsw_512 if wide else vpmaddubsw
    pairs_of_words = vpmaddwd_512 if wide else vpmaddwd
    words, quads = Vector(s16, 2 * lanes), Vector(u8, 4 * lanes)

    def multiply(row: Value, column: Value, sums: _Sums) -> None:
        panels = _places(k, b, column, vectors, depth * PANEL, 4)
        one = k.constant(1, words)
        for block in k.range(0, depth, 4 * _NARROW):
            halves = [[[one - one] * 2 for _ in line] for line in sums]
            for i in range(0, 4 * _NARROW, 4):
                columns = [(place + (block + i) * PANEL).load(4 * lanes) for place in panels]
                for r, line in enumerate(halves):
                    four = (a + ((row + r) * depth + block + i)).cast(u32).load()
                    parts = [(x & 0x0F0F0F0F).splat(lanes).bits(quads) for x in (four, four >> 4)]
                    for each, b_bytes in zip(line, columns, strict=True):
                        for half, part in enumerate(parts):
                            each[half] = each[half] + pairs_of_bytes(part, b_bytes)
            for line, narrow in zip(sums, halves, strict=True):
                for total, (low, high) in zip(line, narrow, strict=True):
                    wider = pairs_of_words(high, one) << 4
                    total.value = total.value + pairs_of_words(low, one) + wider

    _tiles(k, out, (m, n, stride_out_m), (rows, vectors), multiply)


@kernel
def int8_dot_products(
    k: Builder,
    a: U8Pointer,
    b: S8Pointer,
    out: S32Pointer,
    stride_out_m: Int,
    m: Int,
    n: Int,
    depth: Int,
) -> None:
    """VNNI: one instruction multiplies four bytes of each column and adds them in 32 bits, exactly.

    Bytes: those of step 6. Limit: the multipliers themselves, if loads keep pace: with 8 by 3
    vectors 11 of them feed 24 products. What is lost is at the edges and in stores.
    """
    rows, vectors = _tile(k)
    lanes = k.isa.vector_bytes // 4
    dot = vpdpbusd if lanes == PANEL else vpdpbusd_256
    quads = Vector(u8, 4 * lanes)

    def multiply(row: Value, column: Value, sums: _Sums) -> None:
        panels = _places(k, b, column, vectors, depth * PANEL, 4)
        for i in k.range(0, depth, 4):
            columns = [(place + i * PANEL).load(4 * lanes) for place in panels]
            for r, line in enumerate(sums):
                four = (a + ((row + r) * depth + i)).cast(u32).load().splat(lanes).bits(quads)
                for total, one in zip(line, columns, strict=True):
                    total.value = dot(total.value, four, one)

    _tiles(k, out, (m, n, stride_out_m), (rows, vectors), multiply)


@kernel
def int8_tiles(
    k: Builder,
    a: U8Pointer,
    b: S8Pointer,
    out: S32Pointer,
    stride_out_m: Int,
    m: Int,
    n: Int,
    depth: Int,
) -> None:
    """AMX: an instruction multiplies 16 rows of 64 bytes by 16 columns of 64 bytes.

    Bytes: for each 64 k four tiles, a kilobyte each, feed four products of 16,384 multiply-adds.
    Limit: loads of tiles, whose rows should be whole cache lines; the stores of sums, through
    memory, while nothing is multiplied. lowbit itself stores the last tile during the next one.
    """
    configure(k)
    scratch = k.local(s32, TILE_ROWS * PANEL)
    for column in k.range(0, n, 2 * PANEL):
        panels = [b + (column // PANEL + p) * depth * PANEL for p in range(2)]
        for row in k.range(0, m, 2 * TILE_ROWS):
            sums = [[k.tile(2 * d + p) for p in range(2)] for d in range(2)]
            for tile in (*sums[0], *sums[1]):
                tilezero(tile)
            for i in k.range(0, depth, LINE):
                for d in range(2):
                    tileloadd(k.tile(4 + d), a + ((row + d * TILE_ROWS) * depth + i), depth)
                for p, panel in enumerate(panels):
                    tileloadd(k.tile(6 + p), panel + i * PANEL, k.index(ROW_BYTES))
                for d in range(2):
                    for p in range(2):
                        tdpbusd(sums[d][p], k.tile(4 + d), k.tile(6 + p))
            for d in range(2):
                for p in range(2):
                    tilestored(sums[d][p], scratch, k.index(ROW_BYTES))
                    for r in range(TILE_ROWS):
                        line = row + (d * TILE_ROWS + r)
                        for _ in k.when(line < m):
                            place = out + (line * stride_out_m + column + p * PANEL)
                            left = n - column - p * PANEL
                            store_head((scratch + r * PANEL).load(PANEL), place, left)
    release(k)


# The variants, with what the kernels in lowbit's language are written for and how operands lie.


def length(size: dict[str, int]) -> int:
    """Of a row of a."""
    return size["K"]


def whole_lines(size: dict[str, int]) -> int:
    """Of a row of a that is padded."""
    return -(-size["K"] // LINE) * LINE


def lowbit_packed(a: Array, b: Array) -> Callable[[], Array]:
    """weights packed; rows while they are multiplied"""
    return partial(lowbit.matmul, a, lowbit.pack(b), threads=1)


variants = [
    int8_loops,
    int8_loop_order,
    int8_blocks,
    variant(
        CpuKernel(int8_register_tile, ("generic", "avx2", "avx512")),
        arrange={"a": rows, "b": columns},
        depth=length,
    ),
    variant(
        CpuKernel(int8_packed_pairs, ("generic", "avx2", "avx512")),
        arrange={"a": words, "b": pairs},
        depth=whole_lines,
    ),
    *(
        variant(CpuKernel(each, isas), arrange={"a": whole, "b": quads}, depth=whole_lines)
        for each, isas in (
            (int8_split_bytes, ("avx2", "avx512")),
            (int8_dot_products, ("avx2_vnni", "avx512_vnni")),
            (int8_tiles, ("amx",)),
        )
    ),
]
peers = {
    "numpy fp32": byte_product("numpy fp32", "BLAS in float32"),
    "torch _int_mm": byte_product("torch _int_mm", "bytes to 32-bit sums, weights not packed"),
    "oneDNN qlinear": byte_product("oneDNN qlinear", "bytes to float32, weights packed"),
    "FBGEMM qlinear": byte_product("FBGEMM qlinear", "bytes to 8 bits, weights packed"),
    "MKL s8u8s32": byte_product("MKL s8u8s32", "bytes to 32-bit sums, weights packed"),
    "NumKong i8": byte_product("NumKong i8", "bytes to 32-bit sums, weights packed"),
    "lowbit": lowbit_packed,
}
base = ("numpy fp32", "lowbit")
