"""The steps in which a text says what each thread does, in Numba-CUDA.

Numba's simulator runs them where there is no GPU; arrays are then NumPy's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda, float32

from lowbit_lab.steps.gpu import PLAIN
from lowbit_lab.steps.registry import step

TILE = 16
"""Threads of a block along each axis, and of K at a time in shared memory."""
EACH = 4
"""Rows and columns of outputs of a thread in step 4: a block then has 64 by 64."""
_WIDE = TILE * EACH


def _launch(kernel: Any, a: Any, b: Any, out: Any, across: int, down: int) -> None:
    """Run blocks of TILE by TILE threads, as many as `out` has tiles of `across` by `down`, the
    first along x."""
    columns, rows = -(-out.shape[1] // across), -(-out.shape[0] // down)
    grid = (rows, columns) if kernel is _row_of_x else (columns, rows)
    given = (one if isinstance(one, np.ndarray) else cuda.as_cuda_array(one) for one in (a, b, out))
    kernel[grid, (TILE, TILE)](*given)


@cuda.jit
def _row_of_x(a, b, out):
    m = cuda.blockIdx.x * TILE + cuda.threadIdx.x
    n = cuda.blockIdx.y * TILE + cuda.threadIdx.y
    if m < out.shape[0] and n < out.shape[1]:
        total = float32(0)
        for k in range(a.shape[1]):
            total += a[m, k] * b[k, n]
        out[m, n] = total


@step("gpu", 1, PLAIN)
def one_thread_each(a: Any, b: Any, out: Any) -> None:
    """A thread for each output, its row from x.

    Bytes: each multiply-add reads eight. The threads of a warp differ in x, so they read 32 rows of
    a at once, each from a line of its own of which four bytes are used, and store likewise.
    Limit: the lines: 33 for 32 multiply-adds.
    """
    _launch(_row_of_x, a, b, out, TILE, TILE)


@cuda.jit
def _column_of_x(a, b, out):
    n = cuda.blockIdx.x * TILE + cuda.threadIdx.x
    m = cuda.blockIdx.y * TILE + cuda.threadIdx.y
    if m < out.shape[0] and n < out.shape[1]:
        total = float32(0)
        for k in range(a.shape[1]):
            total += a[m, k] * b[k, n]
        out[m, n] = total


@step("gpu", 2, PLAIN)
def coalesced(a: Any, b: Any, out: Any) -> None:
    """The column from x: threads side by side read numbers side by side.

    Bytes: still eight for each multiply-add, but those of a warp lie in two lines of b, and one or
    two numbers of a serve it. Limit: the nearest cache, from which each of them comes K times.
    """
    _launch(_column_of_x, a, b, out, TILE, TILE)


@cuda.jit
def _through_shared(a, b, out):
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


@step("gpu", 3, PLAIN)
def shared_memory(a: Any, b: Any, out: Any) -> None:
    """A block of threads brings a tile of a and one of b into shared memory, and all use them.

    Bytes: each number comes from memory once for 16 multiply-adds; from shared memory eight bytes
    for each. Limit: shared memory: two loads for one multiply-add.
    """
    _launch(_through_shared, a, b, out, TILE, TILE)


@cuda.jit
def _tile_in_registers(a, b, out):
    left = cuda.shared.array((TILE, _WIDE), float32)
    right = cuda.shared.array((TILE, _WIDE), float32)
    sums = cuda.local.array((EACH, EACH), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    first_n = cuda.blockIdx.x * _WIDE
    first_m = cuda.blockIdx.y * _WIDE
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


@step("gpu", 4, PLAIN)
def register_tile(a: Any, b: Any, out: Any) -> None:
    """A thread has four by four outputs in registers: each number loaded serves four of them.

    Bytes: from memory a quarter of step 3, from shared memory two for a multiply-add. Limit: what
    Numba makes of the loops: addresses are computed, and loads wait, where nothing runs ahead.
    """
    _launch(_tile_in_registers, a, b, out, _WIDE, _WIDE)
