"""How a float product is cut: which inner loop, which registers, what is packed, which blocks.

All sizes follow from the shape, the registers of the instruction set and the caches that the
machine reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lowbit import isa as instruction_sets
from lowbit.isa import host
from lowbit.kernels.cpu.float.micro_kernel import FloatMicro, FloatShape, float_micro_kernels
from lowbit.kernels.cpu.float.operand import Operand
from lowbit.kernels.cpu.float.vectors import LATENCY, VectorMicro
from lowbit.kernels.cpu.shared import serving
from lowbit.kernels.cpu.shared.layout import LINE, blocks
from lowbit.product.product import FloatProduct

# What a load of the left and of the right operand, which comes from further away, costs beside the
# products that hide it, in units of a product.
_LEFT_LOAD, _RIGHT_LOAD = 0.1, 0.2
_STEP = 1.0  # what a step costs beside its loop, for each unit of K, in the same units
_BEGIN = 40.0  # and once
# Blocks of rows up to which the right operand is not worth packing; and from afar, a part of the
# registers: few make small blocks, each of which reads it.
_PLAIN_BLOCKS, _PLAIN_PART = 4, 8
# Columns along K are not worth packing up to so many rows, if K is so many times as large (folding
# the sums must be worth it).
MOST_DOT_ROWS, _DOT_DEPTH = 64, 4
_ROWS_BESIDE_TILES = 4  # rows up to which vectors do as well as tiles, of which most would be empty
# Rows of the right operand read one after another, for which the output is passed by once: many;
# fewer from afar, but about twice those of the output. So many are fetched ahead of them from
# beyond that part of the last cache, where nothing else is.
_MOST_STREAMS, _STREAMS_AFAR, _FETCHED_PART = 32, 16, 3 / 8
_STREAM_BYTES = 1024  # of a row that an item should read at least, so that the machine can follow
# Bytes of a row that are read before those of the next, where half of the last cache is too small:
# a Zen 4 core read 4096 x 4096 1.3 times as fast as with three times as many.
_RUN = 512
_PIECE = 1024  # bytes of the output's rows that are worth being written one after another
_PAGE = 4096  # bytes apart, at multiples of which rows fall into the same sets of caches
_COPIED_FOR = 512  # columns beside which it costs little to copy such rows, for some threads too
_GROUP_PANELS = 4  # panels from which it is worth copying rows for a group of them
_AFAR, _ALONG = 8, 4  # second-level caches full of one that is afar; that is fetched along its rows
_PANEL_PART, _GROUPED_PART = 16, 32  # parts of the second-level cache that a panel may take
_SCRATCH_PART = 4  # the part of the third-level cache that packed operands may take: a quarter
_K_UNIT = 32  # blocks of K are multiples of it: every quantum divides it
# K is cut into slices, no more than that, where their sums are so small a part of what is read, and
# at least so many.
_MOST_SLICES, _LEAST_SLICES, _SLICE_PART = 16, 4, 16
_ITEMS_PER_THREAD = 4  # so that a thread that lost its core does not hold up the others
_WORK_PER_ITEM = 1 << 22  # multiply-adds, so that taking an item costs little beside it
# Rows whose products take as long as packing what they meet, and columns, as copying it.
_PACKED_ROWS, _COPIED_COLUMNS = 5, 2


@dataclass(frozen=True, eq=False)
class FloatPlan:
    """The answer: what `float_product` is called with, and how often.

    A call computes up to `chunk_rows` (whole blocks, but for the last) over up to `chunk_depth` of
    K, with scratch of `shared_bytes`, and of `private_bytes` for each thread. `ahead`: what is
    fetched beforehand of a right operand that is not packed: so many of its rows on, or so many
    bytes along them. `group_panels`: panels that meet all rows of an item before the next do.
    `k_slice`: of K, that has sums of its own, and is an item with all rows; 0: K is not cut so.
    """

    micro: FloatMicro
    shape: FloatShape
    left: Operand
    right: Operand
    ahead: tuple[int, int]
    k_block: int
    k_slice: int
    group_panels: int
    item_blocks: int
    item_panels: int
    chunk_rows: int
    chunk_depth: int
    shared_bytes: int
    private_bytes: int


class DotsPlan(NamedTuple):
    """The answer where `float_dots` serves: `rows` by `columns` dot products at once."""

    micro: VectorMicro
    rows: int
    columns: int
    item_blocks: int


def _serving(product: FloatProduct, along: str = "") -> FloatMicro:
    """The best inner loop for a right operand that is packed, or read where it is, along that
    axis."""
    isa, right = instruction_sets.named(product.isa), Operand(product.kind, along, not along)
    micro = serving.consider(float_micro_kernels, isa, right)[-1].micro
    assert micro is not None
    return micro


def plan_dots(product: FloatProduct) -> DotsPlan | None:
    """The plan for few rows by columns that lie along K; None where that is not what is asked."""
    m, n = product.m, product.n
    if product.a_along != "k" or product.b_along != "k":
        return None
    micro = _serving(product, "k")
    assert isinstance(micro, VectorMicro)
    most = MOST_DOT_ROWS if _serving(product).plain else _ROWS_BESIDE_TILES
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
        step = max(rows * columns, loads) + _LEFT_LOAD * loads
        return blocks(m, rows) * blocks(n, columns) * step

    rows, columns = min(sizes, key=cost)
    column_blocks = blocks(n, columns)
    items = min(column_blocks, _ITEMS_PER_THREAD * product.threads) if product.threads > 1 else 1
    return DotsPlan(micro, rows, columns, blocks(column_blocks, items))


def cut(
    micro: FloatMicro, m: int, n: int, depth: int = 1 << 10, run: int = 1 << 10
) -> tuple[int, int]:
    """The (rows, vectors) of registers that cover m x n with the least work; depth: of a step;
    run: the most vectors of a row that is alone.

    A unit of K costs a step its products, or its loads where they are more, and a little for the
    loads that are hidden.
    """
    all_vectors = blocks(n, micro.lanes)

    def cost(sizes: tuple[int, int]) -> tuple[float, int]:
        rows, vectors = sizes

        def step(count: int) -> float:
            hidden = _LEFT_LOAD * rows + _RIGHT_LOAD * count + _STEP + _BEGIN / depth
            waits = 2 * LATENCY / VectorMicro.parts(rows * count) if micro.in_registers else 0
            return (max(rows * count, rows + count, waits) + hidden) if count else 0.0

        whole, tail = divmod(all_vectors, vectors)
        return blocks(m, rows) * (whole * step(vectors) + step(tail)), -vectors

    shapes = micro.shapes(alone=m == 1)
    rows, vectors = min((one for one in shapes if one[0] > 1 or one[1] <= run), key=cost)
    return rows, min(vectors, all_vectors)


def _shape(micro: FloatMicro, rows: int, vectors: int, columns: int) -> FloatShape:
    """How so many columns are cut."""
    all_vectors, ragged = blocks(columns, micro.lanes), columns % micro.lanes != 0
    if all_vectors <= vectors:
        return FloatShape(rows, all_vectors, 0, ragged)
    whole = columns // (vectors * micro.lanes) * vectors
    return FloatShape(rows, vectors, all_vectors - whole, ragged)


class _Blocks(NamedTuple):
    """How K is cut, and what is done about memory: `ahead`, `group_panels` as `FloatPlan` says;
    `grouped`: whether rows are copied for the groups."""

    k_block: int
    ahead: tuple[int, int] = 0, 0
    group_panels: int = 1
    grouped: bool = False


def plan(product: FloatProduct) -> FloatPlan:
    """The plan for a product, all sizes of which are at least 1."""
    m, n, k = product.m, product.n, product.k
    micro, plain_right, streams = _serving(product, "x"), True, _streams(product)
    beyond = product.right_bytes > host.caches()["L3"] // 2
    run = _RUN // (micro.lanes * product.item_bytes) if beyond else micro.isa.vector_registers
    rows, vectors = cut(micro, m, n, streams or k, max(1, run))
    packing = _serving(product)
    if not _reads_plainly(product, micro, packing, rows, vectors * micro.lanes, streams > 0):
        micro, plain_right, streams = packing, False, 0
        rows, vectors = cut(micro, m, n)
    tiles = not micro.in_registers  # they take rows packed, or copied beside each other
    plain_left = product.a_along == "k" and (tiles or not micro.pair)
    width, element = vectors * micro.lanes, 2 if micro.pair else 4
    row_blocks, panels = blocks(m, rows), blocks(n, width)
    if plain_right:
        cut_k = _streamed(product, streams)
    else:
        groups = plain_left and (tiles or panels >= _GROUP_PANELS)
        cut_k = _packed(product, rows, width, element, groups, tiles)
    # Scratch for a packed left operand; a long one is served in chunks, a block of K deep or more.
    chunk_rows, chunk_depth, shared_bytes = m, k, 0
    if not plain_left:
        room = host.caches()["L3"] // _SCRATCH_PART // element
        chunk_rows = min(row_blocks, max(room // cut_k.k_block // rows, 1)) * rows
        chunk_depth = min(k, max(room // chunk_rows // cut_k.k_block, 1) * cut_k.k_block)
        shared_bytes = chunk_rows * blocks(chunk_depth, _K_UNIT) * _K_UNIT * element
        row_blocks = blocks(min(chunk_rows, m), rows)
    least = blocks(_STREAM_BYTES, width * product.item_bytes) if streams else 1
    item_blocks, item_panels = _items((row_blocks, panels), (rows, width), least, product, cut_k)
    k_slice = _slice(product) if streams and plain_left else 0
    if k_slice:
        slices = blocks(k, k_slice)
        item_panels = blocks(panels, min(blocks(product.threads, slices), max(1, panels // least)))
        shared_bytes = slices * m * n * 4
    group_panels = min(cut_k.group_panels, item_panels)
    private_bytes = 0 if plain_right else group_panels * cut_k.k_block * width * element
    if cut_k.grouped:
        private_bytes += rows * (cut_k.k_block * product.item_bytes + LINE)
    return FloatPlan(
        micro=micro,
        shape=_shape(micro, rows, vectors, n),
        left=Operand(product.a.kind, product.a_along, packed=not plain_left, copied=cut_k.grouped),
        right=Operand(product.b.kind, product.b_along, packed=not plain_right),
        ahead=cut_k.ahead,
        k_block=cut_k.k_block,
        k_slice=k_slice,
        group_panels=group_panels,
        item_blocks=item_blocks,
        item_panels=item_panels,
        chunk_rows=chunk_rows,
        chunk_depth=chunk_depth,
        shared_bytes=shared_bytes,
        private_bytes=blocks(private_bytes, LINE) * LINE,
    )


def _reads_plainly(
    product: FloatProduct, plain: FloatMicro, packing: FloatMicro, rows: int, width: int, far: bool
) -> bool:
    """Whether the right operand is read where it is: it is small, or meets few blocks of rows, less
    of them if it comes from `far`."""
    if product.b_along != "x":
        return False
    if not packing.plain:
        return product.m <= _ROWS_BESIDE_TILES
    near = product.right_bytes <= host.caches()["L1d"] * 3 // 2
    most = plain.isa.vector_registers // _PLAIN_PART if far else _PLAIN_BLOCKS
    most *= 4 if product.n <= width else 1  # a single panel lies as if packed
    row_blocks = blocks(product.m, rows)
    return row_blocks <= 1 or (packing is plain and (near or row_blocks <= most))


def _streamed(product: FloatProduct, streams: int) -> _Blocks:
    """Blocks of K where the right operand is read where it is: if it is not near, so many rows
    together, and what is fetched of those that follow."""
    if not streams:
        return _Blocks(blocks(product.k, _K_UNIT) * _K_UNIT)
    size, caches, along = product.right_bytes, host.caches(), host.read_ahead() // 4
    if along:
        return _Blocks(streams, (0, along) if size > _ALONG * caches["L2"] else (0, 0))
    return _Blocks(streams, (streams, 0) if size > _FETCHED_PART * caches["L3"] else (0, 0))


def _streams(product: FloatProduct) -> int:
    """Rows of a right operand that is read where it is that are read together, if it is from beyond
    the second-level cache; else 0."""
    near = host.caches()["L2"]
    if product.right_bytes <= near // 2:
        return 0
    if product.right_bytes <= _AFAR * near:
        return _MOST_STREAMS
    twice = 1 << (2 * product.m).bit_length() - 1  # or less
    return min(max(_STREAMS_AFAR, twice), _MOST_STREAMS)


def _slice(product: FloatProduct) -> int:
    """K of a slice where few rows meet a right operand from afar; 0: it is not cut so."""
    slices = min(product.k // (_SLICE_PART * product.m), _MOST_SLICES)
    return _even(product.k, blocks(product.k, slices)) if slices >= _LEAST_SLICES else 0


def _packed(
    product: FloatProduct, rows: int, width: int, element: int, groups: bool, tiles: bool
) -> _Blocks:
    """Blocks of K where panels of the right operand are packed.

    Over a block the rows of a step stay in the nearest cache, and a panel is a small part of the
    second one. Where all matrices together exceed that, and rows or columns of panels are in each
    other's way in the nearest one, rows are copied and go through a group of panels, so that the
    output is passed by in rows.
    """
    m, n, k, caches = product.m, product.n, product.k, host.caches()
    large = (m * n + m * k + k * n) * product.item_bytes > caches["L2"]
    whole_pages = abs(product.a.strides[0]) % _PAGE == 0 and n >= _COPIED_FOR
    in_the_way = whole_pages or m * width * 4 > 2 * caches["L1d"]
    grouped = groups and (tiles or (large and in_the_way))
    panel = caches["L2"] // (_GROUPED_PART if grouped else _PANEL_PART)
    near = caches["L1d"] * 7 // 8
    k_block = _even(k, min(panel // (width * element), near // (rows * element)))
    if not grouped:
        # As far as panels stay in the nearest cache, some meet all rows together: the output is
        # written in longer pieces.
        together = min(near // (k_block * width * element), _PIECE // (width * 4))
        return _Blocks(k_block, group_panels=max(1, together))
    together = caches["L2"] // 2 // (k_block * width * element)
    return _Blocks(k_block, group_panels=max(1, together), grouped=True)


def _even(k: int, most: int) -> int:
    """A block of K that is at most `most`, if possible, and such that all blocks are alike."""
    count = blocks(k, max(most // _K_UNIT * _K_UNIT, _K_UNIT))
    return blocks(blocks(k, count), _K_UNIT) * _K_UNIT


def _items(
    count: tuple[int, int], size: tuple[int, int], least: int, product: FloatProduct, cut_k: _Blocks
) -> tuple[int, int]:
    """(blocks of rows, panels) of an item of work; `count` and `size` of blocks and of panels.

    Items are such that the threads, of which each takes one after another, are done soonest; one
    packs its columns and copies its rows, which many rows and columns share. Large products have
    several for each thread. `least`: panels of an item.
    """
    (row_blocks, panels), (rows, width), threads = count, size, product.threads
    down = 1
    if not cut_k.grouped:  # the rows stay in half of the second-level cache
        down = blocks(row_blocks, max(1, host.caches()["L2"] // 2 // (cut_k.k_block * 4 * rows)))
    if threads == 1:
        return blocks(row_blocks, down), panels
    each = product.m * product.n * product.k // threads // _WORK_PER_ITEM
    wanted = threads * min(_ITEMS_PER_THREAD, max(1, each))

    def cost(item: tuple[int, int]) -> float:
        items = blocks(row_blocks, item[0]) * blocks(panels, item[1])
        shared = 1 + _PACKED_ROWS / (item[0] * rows) + _COPIED_COLUMNS / (item[1] * width)
        return blocks(items, threads) * item[0] * item[1] * shared

    cuts = [
        (blocks(row_blocks, max(down, more + blocks(wanted, across))), blocks(panels, across))
        for across in range(1, min(wanted, max(1, panels // least)) + 1)
        for more in range(threads)
    ]
    return min(cuts, key=cost)
