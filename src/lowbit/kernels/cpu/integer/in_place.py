"""Rows of bytes multiplied where they lie, unpacked: what the kernels of vector registers share.

Packing costs some cycles for each line of 64 bytes, as much as a product of few columns. Where one
step meets all panels, packed lines would be read once, so rows are read from their own memory: a
piece of each is broadcast and meets vectors of b.

    16 columns, pieces of 4 bytes:  | 4 k of column 0 | 4 k of column 1 | ...    | of column 15 |
    4 columns, pieces of 16 bytes:  | 16 k of column 0              | ... | 16 k of column 3    |
    1 column, pieces of 64 bytes:   | 64 k of column 0                                          |

Panels are made of the first kind. Of 9 columns nearly half of a panel would be multiplied in vain,
so the right operand is packed in vectors of another kind (weights/repacking.py): nine of the last
one, or five that hold two columns each. Their lanes are summed after the last product, which takes
longer the more there are. Which kind takes least is reckoned in `cycles_in_place`.

With more columns than one step meets, a kernel may let all steps read their rows again
(`read_again`), eight rows at most: nothing is packed then either.

Nothing behind the end of a row is read. The last piece ends where the row does, and has zeros in b
for what came before; with pieces of 4 bytes it is two bytes, and one, as K may be less than 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from lowbit.isa import host
from lowbit.isa.generic import minimum, prefetch, prefetch_far, select, shuffle
from lowbit.isa.types import Vector, s32, u8, u16, u32
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.integer.micro_kernel import KernelQuery, Shape, Step
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, QUAD, QUADS, blocks

ROWS = 8  # in a step: each has a pointer of its own
_HALF = 8  # columns, of the shortest vectors of b
_FEWEST = 4  # lanes that a row is stored from
# Cycles of a row: a line from the second-level cache, a piece's load and product, a product alone,
# what follows the sums of a panel; two vectors of lanes made one, a row that is stored by itself; a
# line that is packed.
_LINE, _PIECE, _PRODUCT, _STORE, _SUM, _ROW, _PACK = 1.5, 0.72, 0.5, 5, 1.5, 12, 4

Multiply = Callable[..., None]
"""`VectorKernel.multiply`."""


def shape_in_place(
    query: KernelQuery, lanes: int, panels: int, most_sums: int, odd: bool
) -> Shape | None:
    """How rows are cut by a kernel whose vectors have `lanes` columns, its steps so many panels and
    registers for so many vectors of sums; None: they are better packed. `odd`: pieces may begin
    anywhere; else at even k."""
    if not _may_be(query) or blocks(query.n, PANEL) > panels:
        return None
    shapes = [_short_pieces(query, lanes, most_sums)]
    if odd or query.k % 2 == 0:
        columns = (1 << power for power in range(lanes.bit_length() - 1))
        shapes += [_long_pieces(query, lanes, held, most_sums) for held in columns]
    known = [(cycles_in_place(query, one), one) for one in shapes if one is not None]
    cycles, best = min(known, key=lambda one: one[0], default=(0.0, None))
    return None if query.m < ROWS and _cycles_packed(query) < cycles else best


def read_again(query: KernelQuery, rows: int, panels: int, lanes: int) -> Shape:
    """So many rows that are read by all steps of so many panels, in pieces of four bytes."""
    near = 2 * rows * query.k <= host.caches()["L1d"]
    return Shape(rows, 1, panels, stays=near, in_place=True, lanes=lanes, piece=QUAD)


def may_be_read_again(query: KernelQuery) -> bool:
    """Whether rows can be read where they lie however many columns there are. To make bytes
    unsigned again for each step would take a third of the products' time."""
    return _may_be(query) and not query.signed and query.m >= ROWS


def _may_be(query: KernelQuery) -> bool:
    return query.in_place and query.weight == "s8" and not query.grouping


def _short_pieces(query: KernelQuery, lanes: int, most_sums: int) -> Shape | None:
    """Of four bytes, which meet panels."""
    wide, columns = blocks(query.n, PANEL), query.n
    if query.m < ROWS:
        return None  # the sums of few rows and short pieces would wait for each other
    if query.signed and query.k > LINE // 2:
        return None  # each piece is made unsigned, which would take longer than packing lines
    if columns <= _HALF:
        lanes = _HALF
    rows = min(most_sums // (wide * blocks(min(columns, PANEL), lanes)), ROWS)
    shape = read_again(query, rows, wide, lanes)
    return shape if wide > 1 else replace(shape, columns=columns)


def _long_pieces(query: KernelQuery, lanes: int, held: int, most_sums: int) -> Shape | None:
    """Of as many bytes as a vector of b has of each column, if it holds so many columns."""
    vectors, piece = blocks(query.n, held), lanes // held * QUAD
    rows = min(most_sums // vectors, ROWS, query.m)
    if vectors == 1 and query.m < ROWS:
        rows = min(_power(query.m // 2 + 1), most_sums)  # whose sums can be joined in pairs
    if rows == 0 or piece > query.k:
        return None
    wide = blocks(query.n, PANEL)
    return Shape(rows, 1, wide, in_place=True, lanes=lanes, columns=query.n, piece=piece)


def _cycles_packed(query: KernelQuery) -> float:
    """Of one row that is packed, but for what follows its sums."""
    products = _PRODUCT * blocks(query.n, PANEL)
    return blocks(query.k, QUAD) * max(_PIECE, products) + _PACK * query.k_blocks


def cycles_in_place(query: KernelQuery, shape: Shape) -> float:
    """Of one row, in registers of 512 bits."""
    part, wide = shape.piece // QUAD, blocks(query.n, PANEL)
    vectors, steps = (shape.column_vectors, 1) if part > 1 else (wide, blocks(wide, shape.panels))
    products = vectors + steps * query.signed  # what makes bytes unsigned takes as long as one
    shared = vectors / shape.rows  # of the loads of b
    far = query.k * query.n > host.caches()["L1d"] * 3 // 4
    piece = max(_PIECE * steps, _PRODUCT * max(products, steps + shared), _LINE * shared * far)
    pieces = max(blocks(query.k, shape.piece) * piece, query.k_blocks * _LINE)
    after = _STORE * wide + _ROW * (part > 1 and vectors > 1)
    while part > 1:
        vectors, part = blocks(vectors, 2), part // 2
        after += _SUM * vectors
    again = blocks(query.m, shape.rows) * shape.rows / query.m  # the last rows, by two steps
    return again * (pieces + after)


def multiply_in_place(
    k: Builder, multiply: Multiply, shape: Shape, step: Step, panels: int
) -> None:
    """Emit the product of a block of rows with so many panels, and what follows."""
    assert step.row_stride is not None
    lanes, zero = shape.lanes, k.zeros(s32, shape.lanes)
    rows = [step.a + step.row_stride * number for number in range(shape.rows)]
    if shape.piece > QUAD:
        places = [(0, number * lanes) for number in range(shape.column_vectors)]
    else:
        offsets = range(0, shape.columns or PANEL, lanes)
        places = [(panel, at) for panel in range(panels) for at in offsets]
    held = len(rows) * len(places) * blocks(lanes * QUAD, k.isa.vector_bytes)
    with k.scope():
        parts = 2 if held <= k.isa.vector_registers // 3 else 1  # lest they wait for each other
        sums = [[[k.register(zero) for _ in places] for _ in rows] for _ in range(parts)]

        def add(which: int, column: Value, at: Value, size: int, mask: Value | None = None) -> None:
            columns = [
                (step.b + (step.panel_bytes * panel + column + offset * QUAD)).load(lanes * QUAD)
                for panel, offset in places
            ]
            if mask is not None:
                columns = [one.bits(Vector(u32, lanes)) & mask for one in columns]
            pieces = (_broadcast(row + at, size, lanes) ^ step.flip for row in rows)
            if len(columns) <= len(rows):
                multiply(k, lanes, pieces, columns, sums[which % parts])
                return
            pieces = list(pieces)  # which are fewer, so they stay in registers
            for number, column in enumerate(columns):
                multiply(k, lanes, pieces, [column], [[row[number]] for row in sums[which % parts]])

        _add_all(k, shape, step, rows, add)
        vectors = [[one.value for one in row] for row in sums[0]]
        for part in sums[1:]:
            for row, more in zip(vectors, part, strict=True):
                row[:] = [a + b.value for a, b in zip(row, more, strict=True)]
    if shape.piece > QUAD and shape.column_vectors > 1:
        vectors = [_wide_enough(_summed(row, shape.piece // QUAD)) for row in vectors]
        lanes = vectors[0][0].lanes
        places = [divmod(at, PANEL) for at in range(0, shape.columns, lanes)]
        vectors = [row[: len(places)] for row in vectors]
    elif shape.columns and shape.columns <= lanes:
        _store_few(k, shape, step, [row[0] for row in vectors])
        return
    if k.isa.vector_registers > 16 and lanes * len(places) % PANEL == 0:
        numbered = [(step.row + number, row) for number, row in enumerate(vectors)]
        all_columns = (step.panel + panels) * PANEL < step.n + 1
        for ends in (False, True):
            for _ in k.when(all_columns.equals(int(not ends))):
                step.columns.whole(step.panel, len(places), lanes, ends)(numbered)
        return
    for (panel, at), column in zip(places, zip(*vectors, strict=True), strict=True):
        store = step.columns(step.panel + panel, at, lanes)  # what it loads stays in registers
        for number, value in enumerate(column):
            store(step.row + number, value)


def _add_all(
    k: Builder, shape: Shape, step: Step, rows: list[Value], add: Callable[..., None]
) -> None:
    """Add the products of all pieces. `add`: to which sums, the place of a vector of b, that of a
    piece, its bytes, and of a dword of b what counts."""
    piece = shape.piece
    size = shape.held * piece if piece > QUAD else LINE
    whole = step.k_size // piece
    pairs = whole // 2 * 2
    for number in _pairs(k, shape, step, rows, pairs):
        for which in range(2):
            add(which, (number + which) * size, (number + which) * piece, piece)
    for _ in k.when(pairs < whole):
        add(0, pairs * size, pairs * piece, piece)
    if piece > QUAD:
        for _ in k.when(whole * piece < step.k_size):
            add(1, whole * size, step.k_size - piece, piece)
        return
    two = (step.k_size & 2) > 0
    for _ in k.when(two):
        add(0, whole * size, whole * piece, 2, k.constant(0xFFFF, Vector(u32, shape.lanes)))
    for _ in k.when((step.k_size & 1) > 0):
        # One byte is everywhere in a dword; the mask leaves its place in the column.
        first, third = (k.constant(0xFF << bits, u32) for bits in (0, 16))
        add(1, whole * size, step.k_size - 1, 1, select(two, third, first).splat(shape.lanes))


def _pairs(
    k: Builder, shape: Shape, step: Step, rows: list[Value], pairs: Value
) -> Iterator[Value]:
    """Every second piece. Of four bytes, with what is read next for each 64 k: panels of the next
    item, and in the last panels' steps the next rows, which are too short for a core to follow.
    """
    assert step.row_stride is not None
    if shape.columns:
        yield from k.range(0, pairs, 2)
        return
    fetch = prefetch if shape.stays else prefetch_far
    last = (step.panel + 2 * shape.panels) * PANEL > step.n
    for block in k.range(0, (pairs + (QUADS - 1)) // QUADS):
        step.fetch_share(k, block)
        for _ in k.when(last):
            for row in rows:
                fetch(row + (step.row_stride * shape.rows + block * LINE))
        begin = block * QUADS
        for quad in k.range(0, minimum(pairs - begin, k.index(QUADS)), 2):
            yield begin + quad


def _broadcast(source: Value, size: int, lanes: int) -> Value:
    """Some bytes, a power of two, again and again in a vector of dwords."""
    wide = lanes * QUAD
    if size > QUAD:
        piece = source.load(size)
        return shuffle(piece, piece, tuple(i % size for i in range(wide)))
    element = {1: u8, 2: u16, 4: u32}[size]
    return source.cast(element).load().splat(wide // size).bits(Vector(u8, wide))


def _summed(sums: list[Value], part: int) -> list[Value]:
    """The sums of each column, in order, whose products are in `part` lanes of the vectors."""
    while part > 1:
        odd = len(sums) % 2 and len(sums) > 1
        sums, part = _halved([*sums, sums[-1]] if odd else sums, part), part // 2
    return sums


def _wide_enough(sums: list[Value]) -> list[Value]:
    """Of vectors in order, with as many lanes as are stored from."""
    lanes = sums[0].lanes
    if lanes >= _FEWEST:
        return sums
    return [shuffle(one, one, tuple(i % lanes for i in range(_FEWEST))) for one in sums]


def _store_few(k: Builder, shape: Shape, step: Step, sums: list[Value]) -> None:
    """Sum lanes that belong to one column, and store rows: where it can be, some in a vector."""
    columns, sums = shape.columns, _summed(sums, shape.piece // QUAD)
    each = shape.lanes * QUAD // shape.piece  # lanes of one row
    if columns == _power(columns) and shape.rows > 1 and columns < shape.lanes:
        _store_joined(k, shape, step, sums, each)
        return
    store = step.columns(step.panel, 0, max(each, _FEWEST))
    for number in range(shape.rows):
        which, place = divmod(number * each, sums[0].lanes)
        lanes = tuple(place + lane % each for lane in range(max(each, _FEWEST)))
        store(step.row + number, shuffle(sums[which], sums[which], lanes))


def _store_joined(k: Builder, shape: Shape, step: Step, sums: list[Value], each: int) -> None:
    """Bring as many rows into a vector as there are lanes; `each` row has so many at first."""
    columns, most = shape.columns, max(k.isa.vector_bytes // QUAD, shape.lanes)
    lanes = sums[0].lanes
    used = tuple(row + lane for row in range(0, lanes, each) for lane in range(columns))
    while len(sums) > 1 and len(used) < most:
        both = (*used, *(lanes + lane for lane in used))
        sums = [shuffle(x, y, both) for x, y in zip(sums[::2], sums[1::2], strict=True)]
        lanes = len(both)
        used = tuple(range(lanes))
    rows = len(used) // columns
    store = step.columns(step.panel, 0, len(used), rows)
    for number, value in enumerate(sums):
        whole = value if len(used) == lanes else shuffle(value, value, used)
        store(step.row + number * rows, whole)


def _halved(vectors: list[Value], part: int) -> list[Value]:
    """Both halves of each part of the vectors added; two vectors become one, and one a half."""
    lanes, many = vectors[0].lanes, len(vectors) > 1
    starts = range(0, lanes * (1 + many), part)
    low = tuple(start + i for start in starts for i in range(part // 2))
    high = tuple(i + part // 2 for i in low)
    pairs = zip(vectors[::2], vectors[1::2], strict=True) if many else [(vectors[0],) * 2]
    return [shuffle(x, y, low) + shuffle(x, y, high) for x, y in pairs]


def _power(least: int) -> int:
    """The least power of two that is no less."""
    return 1 << (least - 1).bit_length()
