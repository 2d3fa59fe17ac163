"""Exact products of 4-bit integers: how few bits change what is worth doing.

    lowbit compare examples/steps/uint4.py

Rows of a are queries, rows of b vectors, of values 0 to 15: a product of each query and each
vector. Each variant has one idea that the one before it has not. See docs/steps.md.
"""

# ruff: noqa: F722
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Int32, UInt4
from numba import njit
from numpy.typing import NDArray

import lowbit
from lowbit.numerics.nibbles import pack_nibbles
from lowbit.spec import operation
from lowbit.spec.operations.products import integer_product
from lowbit_lab.compare import byte_product, variant

Array = NDArray[Any]


@operation(exercise={"M": 5, "N": 131, "K": 301}, factors=("a", "b"), result="out")
def spec(a: UInt4[np.ndarray, "M K"], b: UInt4[np.ndarray, "N K"]) -> Int32[np.ndarray, "M N"]:
    """out[m, n] = Σ_k a[m, k] · b[n, k], exactly."""
    return integer_product(a, b.T)


sizes = {"M": 256, "N": 16384, "K": 256}

# The steps, from the definition of a matrix product to sums as narrow as four bits allow.

TILE = 64
"""Vectors in a tile: at K = 256 it is 16 KiB of bytes or 32 KiB of 16-bit words, which a
first-level cache holds, or a second-level one at least."""
SPAN = 144
"""Bytes of a row at a time: 288 products, of which a sum of 16 bits holds (2**16 - 1) // 15**2 =
291, in whole registers of 32 words."""


@njit
def naive_loops(a, b, out):
    """Three loops, the sum innermost.

    a: uint8 [M, K], b: uint8 [K, N], out: int32 [M, N].

    Bytes: each multiply-add reads one byte of a and one of b, but the next one of b is N bytes
    further: a cache line of 64 bytes comes for the sake of one. Limit: waiting for those lines.
    If N is a power of two it is worse, since they all fall into a few sets of the cache and push
    each other out. Nothing is left for SIMD, which wants neighbours.
    """
    for m in range(a.shape[0]):
        for n in range(b.shape[1]):
            total = np.int32(0)
            for k in range(a.shape[1]):
                total = np.int32(total + np.int32(a[m, k]) * b[k, n])
            out[m, n] = total


@njit
def loop_order(a, b, out):
    """The loop over vectors innermost, so that neighbours in memory are worked on together.

    a: uint8 [M, K], b: uint8 [K, N], out: int32 [M, N].

    Bytes: each multiply-add reads one byte of b, and reads and writes a sum of four: nine in all.
    Every cache line is used whole, and the compiler makes SIMD of the innermost loop. Limit: the
    sums, which go through the cache K times; a row of 16,384 of them is 64 KiB, more than the
    first-level cache of most machines.
    """
    for m in range(a.shape[0]):
        for n in range(b.shape[1]):
            out[m, n] = 0
        for k in range(a.shape[1]):
            for n in range(b.shape[1]):
                out[m, n] += np.int32(a[m, k]) * b[k, n]


@njit
def dot_rows(a, b, out):
    """A vector lies in a row, so that its sum stays in a register until it is finished.

    a: uint8 [M, K], b: uint8 [N, K], out: int32 [M, N].

    Bytes: each multiply-add reads one byte of a, which stays in the first-level cache, and one of
    b; a sum is written once. The loops are those of step 1: only the layout differs, and SIMD
    adds up several parts of a sum side by side. Limit: instructions. Bytes are widened before
    they are multiplied, and the parts of every sum are added up across the register.
    """
    for m in range(a.shape[0]):
        for n in range(b.shape[0]):
            total = np.int32(0)
            for k in range(a.shape[1]):
                total = np.int32(total + np.int32(a[m, k]) * b[n, k])
            out[m, n] = total


@njit
def packed_rows(a, b, out):
    """Two values to a byte halve what is read, and cost a mask and a shift at every use.

    a: uint8 [M, P], b: uint8 [N, P], the first of a pair in the low half; out: int32 [M, N].

    Bytes: two bytes for two multiply-adds, half of step 3, and half the memory. Limit:
    instructions, as before, and now more of them: each vector is unpacked once for every query.
    What packing saves is memory, and speed only where memory is the limit, as with one query.
    """
    for m in range(a.shape[0]):
        for n in range(b.shape[0]):
            total = np.int32(0)
            for p in range(a.shape[1]):
                x, y = a[m, p], b[n, p]
                low = np.int32(x & 15) * np.int32(y & 15)
                high = np.int32(x >> 4) * np.int32(y >> 4)
                total = np.int32(total + low + high)
            out[m, n] = total


@njit
def unpack_rows(packed, values):
    """Write the 4-bit values of packed uint8 [R, P] to values [R, 2P], of any integer dtype."""
    for r in range(packed.shape[0]):
        for p in range(packed.shape[1]):
            values[r, 2 * p] = packed[r, p] & 15
            values[r, 2 * p + 1] = packed[r, p] >> 4


@njit
def unpacked_tile(a, b, out):
    """A tile of vectors is unpacked once into the cache and serves all queries from there.

    a: uint8 [M, P], b: uint8 [N, P], the first of a pair in the low half; out: int32 [M, N].

    Bytes: half a byte of b from memory for M multiply-adds, and two bytes from the cache for each.
    Memory no longer matters and unpacking next to nothing: 1/M of what it was. Limit:
    instructions, those of step 3.
    """
    queries = np.empty((a.shape[0], 2 * a.shape[1]), np.uint8)
    tile = np.empty((TILE, 2 * b.shape[1]), np.uint8)
    unpack_rows(a, queries)
    for first in range(0, b.shape[0], TILE):
        rows = b[first : first + TILE]
        unpack_rows(rows, tile)
        for m in range(queries.shape[0]):
            for n in range(rows.shape[0]):
                total = np.int32(0)
                for k in range(queries.shape[1]):
                    total = np.int32(total + np.int32(queries[m, k]) * tile[n, k])
                out[m, first + n] = total


@njit
def widened_tile(a, b, out):
    """The tile holds signed 16-bit words, which one instruction multiplies and adds in pairs.

    a: uint8 [M, P], b: uint8 [N, P], the first of a pair in the low half; out: int32 [M, N].

    Bytes: four from the cache for each multiply-add, twice those of step 5, and faster all the
    same: nothing is widened in the innermost loop, which on x86-64 is a load and a multiply-add
    of pairs (vpmaddwd). Limit: adding up each sum across the register. With unsigned words the
    compiler cannot use that instruction and multiplies 32-bit integers.
    """
    queries = np.empty((a.shape[0], 2 * a.shape[1]), np.int16)
    tile = np.empty((TILE, 2 * b.shape[1]), np.int16)
    unpack_rows(a, queries)
    for first in range(0, b.shape[0], TILE):
        rows = b[first : first + TILE]
        unpack_rows(rows, tile)
        for m in range(queries.shape[0]):
            for n in range(rows.shape[0]):
                total = np.int32(0)
                for k in range(queries.shape[1]):
                    total = np.int32(total + np.int32(queries[m, k]) * np.int32(tile[n, k]))
                out[m, first + n] = total


@njit
def narrow_sums(a, b, out):
    """Sums of 16 bits hold 291 products of 4-bit values, so that all arithmetic is 16 bits wide.

    a: uint8 [M, P], b: uint8 [N, P], the first of a pair in the low half; out: int32 [M, N].

    Bytes: as step 6, and past the span the sums once for each span. A register holds twice as
    many sums, so that half as many steps are left in which a register is added up to one sum.
    Eight-bit operands could not do this: one product fills 16 bits. Limit: instructions still;
    the machine has one that multiplies four times as many bytes, and no loop makes LLVM use it.
    """
    queries = np.empty((a.shape[0], 2 * SPAN), np.uint16)
    tile = np.empty((TILE, 2 * SPAN), np.uint16)
    out[:] = 0
    for start in range(0, b.shape[1], SPAN):
        part = a[:, start : start + SPAN]
        unpack_rows(part, queries)
        for first in range(0, b.shape[0], TILE):
            rows = b[first : first + TILE, start : start + SPAN]
            unpack_rows(rows, tile)
            for m in range(part.shape[0]):
                for n in range(rows.shape[0]):
                    total = np.uint16(0)
                    for k in range(2 * rows.shape[1]):
                        total = np.uint16(total + queries[m, k] * tile[n, k])
                    out[m, first + n] += total


# The variants, and how they take their operands: bytes, or two values to a byte.


def across(b: Array) -> Array:
    """A vector to a column."""
    return np.ascontiguousarray(b.T)


def packed(kernel: Any) -> Any:
    return variant(kernel, arrange={"a": pack_nibbles, "b": pack_nibbles})


def einsum(a: Array, b: Array) -> Callable[[], Array]:
    """NumPy's loops over int32, no BLAS"""
    # The faster of the layouts and integer types that were tried.
    return partial(np.einsum, "mk,kn->mn", a.astype(np.int32), across(b).astype(np.int32))


LONGEST_FLOAT_SUM = 2**24 // 15**2
"""Products of uint4 values that float32 sums exactly, in any order: its 24 bits hold every whole
number up to 2**24."""


def blas(a: Array, b: Array) -> Callable[[], Array]:
    """BLAS on float32, exact for small values"""
    if (k := a.shape[1]) > LONGEST_FLOAT_SUM:
        raise ValueError(
            f"K is {k}; float32 sums only {LONGEST_FLOAT_SUM} products of uint4 exactly"
        )
    return partial(np.matmul, a.astype(np.float32), across(b).astype(np.float32))


def on_bytes(name: str, left: type, idea: str) -> Callable[[Array, Array], Any]:
    """A product of bytes, which hold the values whatever the sign of their type."""
    peer = byte_product(name, idea)

    def prepare(a: Array, b: Array) -> Any:
        return peer(a.view(left), across(b).view(np.int8))

    prepare.__doc__ = idea
    return prepare


def numkong(dtype: str, arrange: Callable[[Array], Array], idea: str) -> Callable[..., Any]:
    """`numkong.dots_packed`. Nibbles may be in either order, as long as both sides agree."""

    def prepare(a: Array, b: Array) -> Any:
        library: Any = importlib.import_module("numkong")
        vectors = library.dots_pack(arrange(b), dtype=dtype)
        return partial(library.dots_packed, arrange(a), vectors)

    prepare.__doc__ = idea
    return prepare


def lowbit_packed(a: Array, b: Array) -> Callable[[], Array]:
    """uint4 panels, unpacked on the way into an int8 product"""
    return partial(lowbit.matmul, a, lowbit.pack(b.T, dtype="uint4"), threads=1)


variants = [
    variant(naive_loops, arrange={"b": across}),
    variant(loop_order, arrange={"b": across}),
    dot_rows,
    packed(packed_rows),
    packed(unpacked_tile),
    packed(widened_tile),
    packed(narrow_sums),
]
_SUMS, _FLOATS = "bytes to 32-bit sums, vectors not packed", "bytes to float32, vectors packed"
peers = {
    "numpy einsum": einsum,
    "numpy fp32": blas,
    "torch _int_mm u8": on_bytes("torch _int_mm", np.uint8, _SUMS),
    "torch _int_mm s8": on_bytes("torch _int_mm", np.int8, _SUMS),
    "oneDNN qlinear u8": on_bytes("oneDNN qlinear", np.uint8, _FLOATS),
    "oneDNN qlinear s8": on_bytes("oneDNN qlinear", np.int8, _FLOATS),
    "NumKong uint4": numkong("uint4", pack_nibbles, "two values to a byte on both sides"),
    "NumKong uint8": numkong("uint8", np.ascontiguousarray, "bytes on both sides"),
    "lowbit": lowbit_packed,
}
base = ("numpy fp32", "lowbit")
