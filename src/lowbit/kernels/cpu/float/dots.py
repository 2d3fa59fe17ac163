"""Float products of few rows with columns that lie along K: dot products, nothing packed.

A weight [N, K] used as its transpose, by one row or a few, is read once and packing it would cost
more than the product. R rows meet C columns at once; each pair has a vector of partial sums along
K, and in the end the vectors of the C columns are folded into one whose lanes are columns.
"""

from __future__ import annotations

from lowbit.isa.generic import minimum, shuffle
from lowbit.isa.types import F32Pointer, Int, U8Pointer, Vector, bf16, f32
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.float.operand import Reader, float_of
from lowbit.kernels.cpu.float.store import FloatEpilogue
from lowbit.kernels.cpu.float.vectors import VectorMicro


@kernel
def float_dots(
    k: Builder,
    a: U8Pointer,
    a_row_stride: Int,
    b: U8Pointer,
    b_column_stride: Int,
    c: F32Pointer,
    c_stride: Int,
    out: U8Pointer,
    out_stride: Int,
    m: Int,
    n: Int,
    k_size: Int,
    item_blocks: Int,
    alpha: Int,
    beta: Int,
    reads_c: Int,
    *,
    micro: VectorMicro,
    rows: int,
    columns: int,
    kind: str,
    right_kind: str,
    out_kind: str,
) -> None:
    """out[m, n] = alpha·a[m, k_size]·b[k_size, n] + beta·c[m, n], c only read if `reads_c`.

    Both operands are contiguous along K; the other strides count elements. alpha and beta are the
    bits of float32 numbers. An item is `item_blocks` times `columns` columns by all rows.
    """
    readers = Reader(kind, micro.pair), Reader(right_kind, micro.pair)
    left = readers[0].pointer(a)
    right = readers[1].pointer(b)
    target = out.cast(f32 if out_kind == "f32" else bf16)
    factors = float_of(alpha), float_of(beta)
    added = c, c_stride, reads_c > 0, factors
    epilogue = FloatEpilogue(k, *added, target, out_stride, m, n, c, c_stride)
    blocks = (n + (columns - 1)) // columns
    for item in k.parallel((blocks + item_blocks - 1) // item_blocks):
        first = item * item_blocks
        for block in k.range(first, minimum(first + item_blocks, blocks)):
            column = block * columns
            for row in k.range(0, m, rows):
                starts = [left + minimum(row + i, m - 1) * a_row_stride for i in range(rows)]
                others = [
                    right + minimum(column + i, n - 1) * b_column_stride for i in range(columns)
                ]
                with k.scope():
                    for i, total in enumerate(_dots(k, micro, readers, starts, others, k_size)):
                        for _ in k.when(row + i < m):
                            epilogue.row((row + i, column), [total], ragged=True)


def _dots(
    k: Builder, micro: VectorMicro, readers: tuple[Reader, Reader], rows: list[Value],
    columns: list[Value], k_size: Value,
) -> list[Value]:  # fmt: skip
    """For each row a vector of its products with the columns, by where they begin."""
    lanes, zero = micro.lanes, k.zeros(f32, micro.lanes)
    sums = [[k.register(zero) for _ in columns] for _ in rows]
    of_rows, of_columns = readers

    def add(at: Value, left: Value | None) -> None:
        units = [of_columns.along(start + at, lanes, left) for start in columns]
        for start, accumulators in zip(rows, sums, strict=True):
            row = of_rows.along(start + at, lanes, left)
            for accumulator, column in zip(accumulators, units, strict=True):
                accumulator.value = micro.combine(accumulator.value, row, column)

    turn = lanes * of_rows.depth
    whole = k_size // turn * turn
    for at in k.range(0, whole, turn):
        add(at, None)
    for _ in k.when(whole < k_size):
        add(whole, k_size - whole)
    return [folded([accumulator.value for accumulator in row]) for row in sums]


def folded(vectors: list[Value]) -> Value:
    """A vector whose lane i is the sum of all lanes of the i-th of 2^j vectors."""
    kind = vectors[0].type
    assert isinstance(kind, Vector)
    lanes, count = kind.lanes, len(vectors)
    low = tuple(i // 2 + lanes * (i % 2) for i in range(lanes))
    high = tuple(lane + lanes // 2 for lane in low)
    while len(vectors) > 1:
        half = len(vectors) // 2
        pairs = zip(vectors[:half], vectors[half:], strict=True)
        vectors = [shuffle(a, b, low) + shuffle(a, b, high) for a, b in pairs]
    total = vectors[0]
    while lanes > count:
        lanes //= 2
        halves = tuple(range(lanes)), tuple(range(lanes, 2 * lanes))
        total = shuffle(total, total, halves[0]) + shuffle(total, total, halves[1])
    return total
