"""Exact products of 4-bit integers: how few bits change what is worth doing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from lowbit.numerics.formats import check_values, int_format, longest_sum
from lowbit.numerics.nibbles import pack_nibbles
from lowbit.spec import Operation
from lowbit.spec.operations.products import (
    product_of_columns,
    product_of_packed_rows,
    product_of_rows,
)
from lowbit_lab.steps.registry import Array, Layout, step

# How the steps take their operands: rows of a are queries, rows of b vectors, of values 0 to 15.
#
# The sums are 32-bit integers, which hold `LONGEST` products of such values.

LONGEST = longest_sum("uint4", "uint4")
"""The largest K: 2**31 - 1 over 15 * 15."""


def check_operands(a: Array, b: Array) -> None:
    """Refuse what no step can multiply.

    a: uint8 [M, K], b: uint8 [N, K], of values 0 to 15. TypeError: another dtype. ValueError:
    not two-dimensional, nothing in it, rows of different lengths, a K whose sums could overflow,
    or a value above 15, naming the first.
    """
    for name, array, form in (("a", a, "[M, K]"), ("b", b, "[N, K]")):
        if array.dtype != np.uint8:
            raise TypeError(f"{name} is of {array.dtype}; give uint4 values 0 to 15 as uint8")
        if array.ndim != 2 or array.size == 0:
            raise ValueError(
                f"{name} has the shape {array.shape}; expected {form} with nothing below 1"
            )
    if a.shape[1] != b.shape[1]:
        raise ValueError(
            f"a {a.shape} and b {b.shape} have rows of different lengths; both are queries or "
            "vectors of K values, so give b as [N, K]"
        )
    if a.shape[1] > LONGEST:
        raise ValueError(
            f"K is {a.shape[1]}; 32-bit sums hold {LONGEST} products of uint4, so split K"
        )
    for name, array in (("a", a), ("b", b)):
        check_values(array, int_format("uint4"), name)


def _layout(text: str, operation: Operation, arrange: Callable[[Array, Array], Any]) -> Layout:
    def checked(a: Array, b: Array) -> tuple[Array, Array]:
        check_operands(a, b)
        return arrange(a, b)

    return Layout(text, operation, checked, stated=True, columns=len)


COLUMNS = _layout(
    "bytes, a vector to a column",
    product_of_columns,
    lambda a, b: (np.ascontiguousarray(a), np.ascontiguousarray(b.T)),
)
ROWS = _layout(
    "bytes, a vector to a row",
    product_of_rows,
    lambda a, b: (np.ascontiguousarray(a), np.ascontiguousarray(b)),
)
PACKED_ROWS = _layout(
    "two values to a byte, a vector to a row",
    product_of_packed_rows,
    lambda a, b: (pack_nibbles(a), pack_nibbles(b)),
)


# The steps, from the definition of a matrix product to sums as narrow as four bits allow.

TILE = 64
"""Vectors in a tile: at K = 256 it is 16 KiB of bytes or 32 KiB of 16-bit words, which a
first-level cache holds, or a second-level one at least."""
SPAN = 144
"""Bytes of a row at a time: 288 products, of which a sum of 16 bits holds (2**16 - 1) // 15**2 =
291, in whole registers of 32 words."""


@step("uint4", 1, COLUMNS)
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


@step("uint4", 2, COLUMNS)
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


@step("uint4", 3, ROWS)
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


@step("uint4", 4, PACKED_ROWS)
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


@step("uint4", 5, PACKED_ROWS)
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


@step("uint4", 6, PACKED_ROWS)
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


@step("uint4", 7, PACKED_ROWS)
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
