"""The frame of float matrix products: pack what is worth packing, multiply, finish, store.

K is cut into blocks. Over one of them a panel of the right operand, or a group of panels, is packed
for a thread alone, just before the item's rows pass by. The first block of K leaves
alpha·sum + beta·c, the later ones add alpha·sum to it; in which order is fixed by the shape, never
by the number of threads. A left operand that cannot be read where it is was packed before, in a
parallel region of its own. Where few rows meet a large right operand K is cut into slices too, each
an item with sums of its own, which another region adds up: so a thread reads whole rows, one after
another, where columns of them would fall into a few sets of its caches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from lowbit.isa.generic import load_head, minimum, select
from lowbit.isa.types import F32Pointer, Int, U8Pointer, bf16, f32, u32
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.float.ahead import Ahead, Along, Beside
from lowbit.kernels.cpu.float.micro_kernel import (
    FloatMicro,
    FloatShape,
    Left,
    PackedLeft,
    PackedRight,
    Passing,
    PlainLeft,
    PlainRight,
    Right,
)
from lowbit.kernels.cpu.float.operand import Operand, Reader, float_of
from lowbit.kernels.cpu.float.pack import Part, Source, copy_rows, pack_lines, pack_units
from lowbit.kernels.cpu.float.store import Finish, Pending, store_tile
from lowbit.kernels.cpu.shared.layout import LINE

_PANELS_PER_COPY = 16  # from which on rows are copied for tiles
_UNITS_AHEAD = 16  # of a packed panel that comes from the second-level cache
_ADDED = 16  # vectors of a row that an item of the region adds which adds up slices
_ROWS_IN_PASSING = 2  # finished for each 32 k; more would outlast the products


def _ceil(a: Value, b: Value | int) -> Value:
    return (a + b - 1) // b


@kernel
def float_product(
    k: Builder,
    a: U8Pointer,
    a_row_stride: Int,
    a_stride: Int,
    b: U8Pointer,
    b_column_stride: Int,
    b_stride: Int,
    shared: U8Pointer,
    private: U8Pointer,
    private_bytes: Int,
    group_panels: Int,
    c: F32Pointer,
    c_stride: Int,
    partial: F32Pointer,
    partial_stride: Int,
    out: U8Pointer,
    out_stride: Int,
    m: Int,
    n: Int,
    k_size: Int,
    k_block: Int,
    k_slice: Int,
    item_blocks: Int,
    item_panels: Int,
    alpha: Int,
    beta: Int,
    reads_c: Int,
    first: Int,
    last: Int,
    *,
    micro: FloatMicro,
    shape: FloatShape,
    left: Operand,
    right: Operand,
    out_kind: str,
    ahead: tuple[int, int],
    sliced: bool,
) -> None:
    """out[m, n] = alpha·a[m, k_size]·b[k_size, n] + beta·c[m, n]; see _Work and _Calls.

    Strides count elements. `k_size` is a part of K, `k_block` a multiple of the micro-kernel's
    quantum. An item is so many blocks of rows by so many panels, of which `group_panels` meet all
    rows before the next; if `sliced`, all rows over `k_slice` of K, in blocks. alpha, beta: bits.
    Scratch: private, so many bytes a thread; shared, for a packed left operand or slices' sums.
    """
    mine = private + k.thread() * private_bytes
    a_source = _source(k, left, micro, a, (a_stride, a_row_stride), (m, k_size))
    b_source = _source(k, right, micro, b, (b_stride, b_column_stride), (n, k_size))
    depth = a_source.reader.depth
    units = _ceil(k_size, micro.quantum) * (micro.quantum // depth)
    packed = shared.cast(u32), mine.cast(u32)
    copied = _copied(a_source, mine, k_block, group_panels * (shape.vectors * micro.lanes))
    slices = _Slices(shared.cast(f32), k_slice // depth, units) if sliced else None
    work = _Work(micro, shape, left, right, ahead, (a_source, b_source), packed, copied,
                 units, k_block // depth, slices, _pending(k, micro, shape))  # fmt: skip
    target = out.cast(f32 if out_kind == "f32" else bf16)
    sums = (target, out_stride) if out_kind == "f32" else (partial, partial_stride)
    calls = _Calls(c, c_stride, reads_c, *sums, target, out_stride, (alpha, beta), first, last)
    _items(k, work, calls, (item_blocks, item_panels, group_panels))


def _pending(k: Builder, micro: FloatMicro, shape: FloatShape) -> Pending | None:
    """The sums that are finished in passing, where registers do not hold them."""
    tile = shape.rows * shape.vectors * micro.lanes
    return None if micro.in_registers else Pending(k, k.local(f32, tile))


def _items(k: Builder, work: _Work, calls: _Calls, item: tuple[Value, Value, Value]) -> None:
    """All items: of so many blocks of rows by so many panels, in groups of panels."""
    (item_blocks, item_panels, group), slices = item, work.slices
    blocks = _ceil(work.sources[0].extent, work.shape.rows)
    panels = _ceil(work.sources[1].extent, work.shape.vectors * work.micro.lanes)
    if work.left.packed:
        _pack_left(k, work, blocks)
    work.micro.begin(k)
    across = _ceil(panels, item_panels)
    down = slices.count if slices else _ceil(blocks, item_blocks)
    for number in k.parallel(down * across):
        part, column = number // across, number % across * item_panels
        rows, units = (k.index(0), blocks), (k.index(0), work.units)
        if slices:
            units = slices.units(part)
        else:
            rows = part * item_blocks, minimum((part + 1) * item_blocks, blocks)
        end = minimum(column + item_panels, panels)
        for unit in k.range(*units, work.block_units):
            finish = _finish(k, work, calls, unit)
            if slices:
                finish = slices.finish(k, finish, part, unit > units[0])
            for first in k.range(column, end, group):
                columns = first, minimum(first + group, end)
                block = unit, minimum(unit + work.block_units, units[1])
                _multiply(k, work, finish, rows, columns, panels, block)
    work.micro.end(k)
    if slices:
        slices.add(k, _finish(k, work, calls, k.index(0)), work.micro.lanes)


@dataclass(frozen=True)
class _Slices:
    """K in slices of `size` units, each with sums [m, n] of its own."""

    sums: Value
    size: Value
    all_units: Value

    @property
    def count(self) -> Value:
        return _ceil(self.all_units, self.size)

    def units(self, number: Value) -> tuple[Value, Value]:
        """From, to of a slice."""
        first = number * self.size
        return first, minimum(first + self.size, self.all_units)

    def finish(self, k: Builder, finish: Finish, number: Value, reads: Value) -> Finish:
        """What follows a block of K of a slice; `reads`: sums of those before it are there."""
        own = self.sums + number * (finish.m * finish.n)
        return replace(
            finish, source=own, source_stride=finish.n, reads=reads,
            factors=(finish.factors[0], k.constant(1.0, f32)),
            partial=own, partial_stride=finish.n, out=own, out_stride=finish.n,
        )  # fmt: skip

    def add(self, k: Builder, finish: Finish, lanes: int) -> None:
        """Another region: the sums of all slices, in their order, become the output."""
        ends = k.index(0).equals(0)
        finish = replace(finish, factors=(k.constant(1.0, f32), finish.factors[1]), ends=ends)
        wide = _ADDED * lanes
        pieces = _ceil(finish.n, wide)
        for item in k.parallel(finish.m * pieces):
            row, first = item // pieces, item % pieces * wide
            for column in k.range(first, minimum(first + wide, finish.n), lanes):
                at, left = self.sums + (row * finish.n + column), finish.n - column
                with k.scope():
                    total = k.register(load_head(at, left, lanes))
                    for number in k.range(1, self.count):
                        more = load_head(at + number * (finish.m * finish.n), left, lanes)
                        total.value = total.value + more
                    sums = [[total.value]]
                with k.scope():
                    store_tile(k, finish, (row, column), sums, lanes, ragged=True)


def _source(
    k: Builder, operand: Operand, micro: FloatMicro, start: Value, strides: tuple[Value, Value],
    extents: tuple[Value, Value],
) -> Source:  # fmt: skip
    """An operand in memory; strides along K and across it, of which one that is known to be 1
    becomes a constant; its extent across and along."""
    reader = Reader(operand.kind, micro.pair)
    along = k.index(1) if operand.along == "k" else strides[0]
    across = k.index(1) if operand.along == "x" else strides[1]
    return Source(reader, reader.pointer(start), along, across, *extents, operand.along)


def _copied(source: Source, mine: Value, k_block: Value, columns: Value) -> Source:
    """A block of rows over a block of K, behind so many packed columns in a thread's scratch."""
    base = source.reader.pointer(mine + k_block * columns * (4 // source.reader.depth))
    return replace(source, base=base, x_stride=k_block + LINE // source.reader.bytes)


@dataclass(frozen=True)
class _Work:
    """What all items share. The packed left operand has room for whole blocks, with K rounded up
    to the quantum; of the right one, a panel over a block of K is packed at a time."""

    micro: FloatMicro
    shape: FloatShape
    left: Operand
    right: Operand
    ahead: tuple[int, int]
    sources: tuple[Source, Source]
    packed: tuple[Value, Value]
    copied: Source
    units: Value
    block_units: Value
    slices: _Slices | None
    pending: Pending | None


@dataclass(frozen=True)
class _Calls:
    """Where a call of the kernel gets c, if `reads_c`, and leaves sums.

    The `first` part of K begins from beta·c, the others from `partial`, which all but the `last`
    one leave their sums in; for float32 outputs it is the output itself.
    """

    c: Value
    c_stride: Value
    reads_c: Value
    partial: Value
    partial_stride: Value
    out: Value
    out_stride: Value
    factors: tuple[Value, Value]
    first: Value
    last: Value


def _pack_left(k: Builder, work: _Work, blocks: Value) -> None:
    """The first region: an item is one block of rows over one block of K."""
    pieces, rows = _ceil(work.units, work.block_units), work.shape.rows
    for item in k.parallel(blocks * pieces):
        block, first = item // pieces, item % pieces * work.block_units
        last = minimum(first + work.block_units, work.units)
        target = work.packed[0] + block * work.units * rows
        part = Part(block * rows, rows, first, last, target)
        if work.micro.line > 1:
            pack_lines(k, work.sources[0], part, work.micro.line)
        else:
            pack_units(k, work.sources[0], part, work.micro.lanes)


def _multiply(
    k: Builder, work: _Work, finish: Finish, rows: tuple[Value, Value],
    columns: tuple[Value, Value], panels: Value, units: tuple[Value, Value],
) -> None:  # fmt: skip
    """Blocks of rows from, to by panels of columns from, to over units from, to, a block of K."""
    shape, lanes, (unit, end) = work.shape, work.micro.lanes, units
    width = shape.vectors * lanes
    panel_units = work.block_units * width
    if work.right.packed:
        for panel in k.range(*columns):
            target = work.packed[1] + ((panel - columns[0]) * panel_units - unit * width)
            pack_units(k, work.sources[1], Part(panel * width, width, unit, end, target), lanes)
    whole = minimum(columns[1], panels - 1) if shape.tail else columns[1]
    for block in k.range(*rows):
        left = _left(k, work, block, units, columns[1] - columns[0])

        def step(panel: Value, vectors: int, block: Value = block, left: Left = left) -> None:
            packed = work.packed[1] + (panel - columns[0]) * panel_units
            _step(k, work, finish, left, packed, (block, panel), units, vectors)

        for panel in k.range(columns[0], whole):
            step(panel, shape.vectors)
        if shape.tail:
            for _ in k.when(whole < columns[1]):
                _drain(k, work, finish, shape.vectors)
                step(whole, shape.tail)
                _drain(k, work, finish, shape.tail)
    _drain(k, work, finish, shape.vectors)


def _ragged(shape: FloatShape, vectors: int) -> bool:
    """Whether of a step of so many vectors, the last in a row, the last may not be whole."""
    return shape.ragged and vectors == (shape.tail or vectors)


def _drain(k: Builder, work: _Work, finish: Finish, vectors: int) -> None:
    """Finish what waits of a step of so many vectors."""
    if work.pending is not None:
        ragged = _ragged(work.shape, vectors)
        work.pending.finish(k, finish, vectors, work.micro.lanes, ragged)


def _finish(k: Builder, work: _Work, calls: _Calls, unit: Value) -> Finish:
    """What follows the block of K that begins at `unit`."""
    begins, (alpha, beta) = calls.first.equals(1) & unit.equals(0), map(float_of, calls.factors)
    source = k.register(calls.partial)
    for _ in k.when(begins):
        source.value = calls.c
    return Finish(
        source=source.value,
        source_stride=select(begins, calls.c_stride, calls.partial_stride),
        reads=select(begins, calls.reads_c, k.index(1)) > 0,
        factors=(alpha, select(begins, beta, k.constant(1.0, f32))),
        partial=calls.partial,
        partial_stride=calls.partial_stride,
        out=calls.out,
        out_stride=calls.out_stride,
        ends=calls.last.equals(1) & (work.units < unit + work.block_units + 1),
        m=work.sources[0].extent,
        n=work.sources[1].extent,
    )


def _step(
    k: Builder, work: _Work, finish: Finish, left: Left, packed: Value, place: tuple[Value, Value],
    block_units: tuple[Value, Value], vectors: int,
) -> None:  # fmt: skip
    """One block of rows times one panel of columns, `packed` there or not, over a block of K."""
    shape, lanes, (block, panel) = work.shape, work.micro.lanes, place
    row, column = block * shape.rows, panel * (shape.vectors * lanes)
    unit, units = block_units[0], block_units[1] - block_units[0]
    ragged, pending = _ragged(shape, vectors), work.pending
    if work.right.packed:
        right: Right = PackedRight(packed, shape.vectors * lanes, lanes)
    else:
        right = _plain_right(work, column, unit, vectors, vectors - 1 if ragged else None)
    ahead, passing = _ahead(work, right, vectors), None
    if pending is not None:
        rest = partial(pending.finish, k, finish, vectors, lanes, ragged)
        passing = Passing(pending.scratch, partial(rest, rows=_ROWS_IN_PASSING), rest)
    with k.scope():
        sums = work.micro.step(k, (shape.rows, vectors), left, right, units, ahead, passing)
    if pending is not None:
        pending.put(finish, (row, column), shape.rows)
        return
    with k.scope():  # the accumulators have become plain values
        store_tile(k, finish, (row, column), sums, lanes, ragged)


def _left(k: Builder, work: _Work, block: Value, units: tuple[Value, Value], panels: Value) -> Left:
    """A block of rows over units from, to, which so many panels will meet."""
    rows, source, copied, unit = work.shape.rows, work.sources[0], work.copied, units[0]
    if work.left.packed:
        return PackedLeft(work.packed[0] + (block * work.units + unit) * rows, rows)
    if not work.left.copied:
        starts = [source.at(block * rows + row, unit) for row in range(rows)]
        return PlainLeft(source.reader, starts, source.stride)
    if work.micro.in_registers:
        copy_rows(k, source, copied, block, rows, units)
        starts = [copied.base + copied.x_stride * row for row in range(rows)]
        return PlainLeft(source.reader, starts, source.stride)
    # Tiles take whole rows, whole units, from anywhere: for a few panels as they lie.
    start, apart = k.register(copied.base), k.register(copied.x_stride)
    whole = (block * rows + (rows - 1) < source.extent) & (panels < _PANELS_PER_COPY)
    for _ in k.when(whole & (units[1] * source.reader.depth < source.depth + 1)):
        start.value, apart.value = source.at(block * rows, unit), source.x_stride
    for _ in k.when(apart.value.equals(copied.x_stride)):
        copy_rows(k, source, copied, block, rows, units)
        start.value = copied.base
    return PlainLeft(source.reader, [start.value], source.stride, apart.value)


def _plain_right(
    work: _Work, column: Value, unit: Value, vectors: int, masked: int | None
) -> PlainRight:
    lanes, source = work.micro.lanes, work.sources[1]
    start = source.base + (column + unit * source.reader.depth * source.stride)
    left = source.extent - (column + (vectors - 1) * lanes)
    return PlainRight(source.reader, start, source.stride, lanes, masked, left)


def _ahead(work: _Work, right: Right, vectors: int) -> Ahead | None:
    """What fetches, unit by unit, what is to be read later: of a packed panel, or of an operand
    that is read where it is."""
    if isinstance(right, PackedRight):
        return Along(right, vectors, _UNITS_AHEAD)
    assert isinstance(right, PlainRight)
    rows, along = work.ahead
    if not rows and not along:
        return None
    return Beside(right, vectors, rows // right.reader.depth, along // right.reader.bytes)
