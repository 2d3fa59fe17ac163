"""How a float product is cut: which inner loop, which registers, what is packed, which blocks.

All sizes follow from the shape, the registers of the instruction set and the caches that the
machine reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lowbit import isa as instruction_sets
from lowbit.isa import host
from lowbit.kernels.cpu.float.micro_kernel import (
    FloatMicro,
    FloatQuery,
    FloatShape,
    float_micro_kernels,
)
from lowbit.kernels.cpu.float.operand import Operand
from lowbit.kernels.cpu.float.vectors import VectorMicro
from lowbit.kernels.cpu.shared import serving
from lowbit.kernels.cpu.shared.layout import blocks
from lowbit.product.float_product import FloatProduct

_LOADS = 0.1  # what a load costs beside the products that hide it, in units of a product
_PLAIN_BLOCKS = 4  # blocks of rows up to which the right operand is not worth packing
# Columns along K are not worth packing up to so many rows, if K is so many times as large (folding
# the sums must be worth it).
MOST_DOT_ROWS, _DOT_DEPTH = 64, 4
_ROWS_BESIDE_TILES = 4  # rows up to which vectors do as well as tiles, of which most would be empty
_STREAMS = 8  # rows of the right operand read side by side for one block of rows, 16 for more
_SCRATCH_PART = 4  # the part of the third-level cache that packed operands may take: a quarter
_K_UNIT = 32  # blocks of K are multiples of it: every quantum divides it
_ITEMS_PER_THREAD = 4  # so that a thread that lost its core does not hold up the others


@dataclass(frozen=True, eq=False)
class FloatPlan:
    """The answer: what `float_product` is called with, and how often.

    A call computes up to `chunk_rows` by `chunk_columns` (whole blocks and panels, but for the last
    ones) over up to `chunk_depth` of K, with scratch of `packed_a` and `packed_b` bytes.
    """

    micro: FloatMicro
    rows: int
    vectors: int
    left: Operand
    right: Operand
    k_block: int
    item_blocks: int
    item_panels: int
    chunk_rows: int
    chunk_columns: int
    chunk_depth: int
    packed_a: int
    packed_b: int

    def shape(self, columns: int) -> FloatShape:
        """How a call on so many columns is cut."""
        lanes = self.micro.lanes
        vectors, ragged = blocks(columns, lanes), columns % lanes != 0
        if vectors <= self.vectors:
            return FloatShape(self.rows, vectors, 0, ragged)
        whole = columns // (self.vectors * lanes) * self.vectors
        return FloatShape(self.rows, self.vectors, vectors - whole, ragged)


class DotsPlan(NamedTuple):
    """The answer where `float_dots` serves: `rows` by `columns` dot products at once."""

    micro: VectorMicro
    rows: int
    columns: int
    item_blocks: int


def _serving(product: FloatProduct, reads: str) -> FloatMicro:
    """The best inner loop for operands that are read so."""
    isa, query = instruction_sets.named(product.isa), FloatQuery(product.kind, reads)
    micro = serving.consider(float_micro_kernels(), isa, query)[-1].micro
    assert micro is not None
    return micro


def plan_dots(product: FloatProduct) -> DotsPlan | None:
    """The plan for few rows by columns that lie along K; None where that is not what is asked."""
    m, n = product.m, product.n
    if product.a_along != "k" or product.b_along != "k":
        return None
    micro = _serving(product, "along")
    assert isinstance(micro, VectorMicro)
    most = MOST_DOT_ROWS if _serving(product, "packed").plain else _ROWS_BESIDE_TILES
    if m > min(most, product.k // (_DOT_DEPTH * (2 if micro.pair else 1))):
        return None
    sizes = [
        (rows, columns)
        for rows, columns in micro.shapes()
        if columns in (4, 8) and columns <= micro.lanes
    ]

    def cost(size: tuple[int, int]) -> float:
        rows, columns = size
        loads = rows + columns
        step = max(rows * columns, loads) + _LOADS * loads
        return blocks(m, rows) * blocks(n, columns) * step

    rows, columns = min(sizes, key=cost)
    column_blocks = blocks(n, columns)
    items = min(column_blocks, _ITEMS_PER_THREAD * product.threads) if product.threads > 1 else 1
    return DotsPlan(micro, rows, columns, blocks(column_blocks, items))


def cut(micro: FloatMicro, m: int, n: int) -> tuple[int, int]:
    """The (rows, vectors) of registers that cover m x n with the least work.

    A unit of K costs a step its products, or its loads where they are more, and a little for the
    loads that are hidden.
    """
    all_vectors = blocks(n, micro.lanes)

    def cost(sizes: tuple[int, int]) -> tuple[float, int]:
        rows, vectors = sizes

        def step(count: int) -> float:
            loads = rows + count
            return (max(rows * count, loads) + _LOADS * loads) if count else 0.0

        whole, tail = divmod(all_vectors, vectors)
        return blocks(m, rows) * (whole * step(vectors) + step(tail)), -vectors

    rows, vectors = min(micro.shapes(), key=cost)
    return rows, min(vectors, all_vectors)


def plan(product: FloatProduct) -> FloatPlan:
    """The plan for a product, all sizes of which are at least 1."""
    m, n, k = product.m, product.n, product.k
    micro = _serving(product, "plain")
    rows, vectors = cut(micro, m, n)
    packing = _serving(product, "packed")
    most_plain = _PLAIN_BLOCKS if packing is micro else 1
    plain_right = product.b_along == "x" and blocks(m, rows) <= most_plain
    if not packing.plain:
        plain_right = plain_right and m <= _ROWS_BESIDE_TILES
    if not plain_right:
        micro = packing
        rows, vectors = cut(micro, m, n)
    plain_left = not micro.pair and product.a_along == "k"
    width, element = vectors * micro.lanes, 2 if micro.pair else 4
    if plain_right and k * n * element > host.caches()["L3"] // 2:
        # From far away it is read row by row, in as many streams as the machine can follow.
        k_block = _STREAMS * min(blocks(m, rows), 2)
    elif plain_right and blocks(m, rows) == 1:
        k_block = blocks(k, _K_UNIT) * _K_UNIT
    else:
        k_block = _even(k, host.caches()["L1d"] // 2 // (rows * element))
    # Scratch for what is packed; longer operands are served in chunks, at least a block of K deep.
    room = host.caches()["L3"] // _SCRATCH_PART // element
    chunk_rows, chunk_columns, held = m, n, 0
    if not plain_left:
        chunk_rows = min(blocks(m, rows), max(room // 2 // k_block // rows, 1)) * rows
        held += chunk_rows
    if not plain_right:
        chunk_columns = min(blocks(n, width), max(room // 2 // k_block // width, 1)) * width
        held += chunk_columns
    chunk_depth = min(k, max(room // held // k_block, 1) * k_block) if held else k
    packed_depth = blocks(chunk_depth, _K_UNIT) * _K_UNIT * element
    item_blocks, item_panels = _items(
        blocks(min(chunk_rows, m), rows),
        blocks(min(chunk_columns, n), width),
        k_block * element * width,
        product.threads,
    )
    return FloatPlan(
        micro=micro,
        rows=rows,
        vectors=vectors,
        left=Operand(product.kind, product.a_along, packed=not plain_left),
        right=Operand(product.kind, product.b_along, packed=not plain_right),
        k_block=k_block,
        item_blocks=item_blocks,
        item_panels=item_panels,
        chunk_rows=chunk_rows,
        chunk_columns=chunk_columns,
        chunk_depth=chunk_depth,
        packed_a=0 if plain_left else chunk_rows * packed_depth,
        packed_b=0 if plain_right else chunk_columns * packed_depth,
    )


def _even(k: int, most: int) -> int:
    """A block of K that is at most `most`, if possible, and such that all blocks are alike."""
    count = blocks(k, max(most // _K_UNIT * _K_UNIT, _K_UNIT))
    return blocks(blocks(k, count), _K_UNIT) * _K_UNIT


def _items(rows: int, panels: int, panel_bytes: int, threads: int) -> tuple[int, int]:
    """(blocks of rows, panels) of an item of work, of so many in all.

    Its panels over one block of K fill at most half of the second-level cache. Where that leaves
    too few items for the threads, rows are cut first, then columns.
    """
    across = blocks(panels, max(1, host.caches()["L2"] // 2 // panel_bytes))
    down = 1
    if threads > 1:
        wanted = _ITEMS_PER_THREAD * threads
        down = min(rows, blocks(wanted, across))
        across = max(across, min(panels, blocks(wanted, down)))
    return blocks(rows, down), blocks(panels, across)
