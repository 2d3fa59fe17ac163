"""The frame of float matrix products: pack what is worth packing, multiply, finish, store.

Two parallel regions, as in product.py. In an item of the second one K is cut into blocks, so that
a block of rows of the left operand stays in the nearest cache while the item's columns of the right
one, which stay in the second, pass by. The first block of K leaves alpha·sum + beta·c, the later
ones add alpha·sum to it; in which order is fixed by the shape, never by the number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.isa.generic import load_head, minimum, select, store_head
from lowbit.isa.types import F32Pointer, Int, U8Pointer, bf16, f32, u32
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.float.micro_kernel import (
    FloatMicro,
    FloatShape,
    Left,
    PackedLeft,
    PackedRight,
    PlainLeft,
    PlainRight,
    Right,
)
from lowbit.kernels.cpu.float.operand import Operand, Reader, float_of
from lowbit.kernels.cpu.float.pack import Part, Source, pack_lines, pack_units
from lowbit.kernels.cpu.shared.functions import canonical


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
    packed_a: U8Pointer,
    packed_b: U8Pointer,
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
) -> None:
    """out[m, n] = alpha·a[m, k_size]·b[k_size, n] + beta·c[m, n]; see _Work and _Calls.

    Strides count elements. `k_size` is a part of K. `k_block` is a multiple of the micro-kernel's
    quantum; an item is so many blocks of rows by so many panels. alpha, beta: bits of float32.
    """
    a_source = _source(k, left, micro, a, (a_stride, a_row_stride), (m, k_size))
    b_source = _source(k, right, micro, b, (b_stride, b_column_stride), (n, k_size))
    depth = a_source.reader.depth
    units = _ceil(k_size, micro.quantum) * (micro.quantum // depth)
    scratch = k.local(f32, shape.rows * shape.vectors * micro.lanes)
    packed = packed_a.cast(u32), packed_b.cast(u32)
    work = _Work(micro, shape, left, right, (a_source, b_source), packed, units, k_block // depth,
                 scratch)  # fmt: skip
    sizes = _ceil(m, shape.rows), _ceil(n, shape.vectors * micro.lanes)
    if left.packed or right.packed:
        _pack(k, work, *sizes)
    target = out.cast(f32 if out_kind == "f32" else bf16)
    calls = _Calls(c, c_stride, reads_c, partial, partial_stride, target, out_stride,
                   (float_of(alpha), float_of(beta)), first, last)  # fmt: skip
    micro.begin(k)
    _items(k, work, calls, sizes, (item_blocks, item_panels))
    micro.end(k)


def _items(
    k: Builder, work: _Work, calls: _Calls, sizes: tuple[Value, Value], item: tuple[Value, Value]
) -> None:
    """All items: of so many blocks of rows and panels in all, so many in each."""
    (blocks, panels), (item_blocks, item_panels) = sizes, item
    across = _ceil(panels, item_panels)
    for number in k.parallel(_ceil(blocks, item_blocks) * across):
        row, column = number // across * item_blocks, number % across * item_panels
        rows = row, minimum(row + item_blocks, blocks)
        columns = column, minimum(column + item_panels, panels)
        _multiply(k, work, calls, rows, columns, panels)


def _source(
    k: Builder,
    operand: Operand,
    micro: FloatMicro,
    start: Value,
    strides: tuple[Value, Value],
    extents: tuple[Value, Value],
) -> Source:
    """An operand in memory; strides along K and across it, its extent across and along."""
    reader = Reader(operand.kind, micro.pair)
    along, across = _strides(k, operand, *strides)
    return Source(reader, reader.pointer(start), along, across, *extents, operand.along)


def _strides(k: Builder, operand: Operand, along_k: Value, along_x: Value) -> tuple[Value, Value]:
    """The strides along K and across it; those that are known to be 1 become constants."""
    one = k.index(1)
    return (
        one if operand.along == "k" else along_k,
        one if operand.along == "x" else along_x,
    )


@dataclass(frozen=True)
class _Work:
    """What all items share. Packed operands have room for whole blocks and panels, with K rounded
    up to the quantum."""

    micro: FloatMicro
    shape: FloatShape
    left: Operand
    right: Operand
    sources: tuple[Source, Source]
    packed: tuple[Value, Value]
    units: Value
    block_units: Value
    scratch: Value


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


@dataclass(frozen=True)
class Finish:
    """How sums become output: value = factors[0]·sum + factors[1]·source, if `reads`.

    Goes to `out` if this is where the sum `ends`, else to `partial`.
    """

    source: Value
    source_stride: Value
    reads: Value
    factors: tuple[Value, Value]
    partial: Value
    partial_stride: Value
    out: Value
    out_stride: Value
    ends: Value
    m: Value
    n: Value


def _pack(k: Builder, work: _Work, blocks: Value, panels: Value) -> None:
    """The first region: an item is one block or panel, over one block of K."""
    pieces = _ceil(work.units, work.block_units)
    packs_left = k.index(1 if work.left.packed else 0)
    packs_right = k.index(1 if work.right.packed else 0)
    for item in k.parallel((blocks * packs_left + panels * packs_right) * pieces):
        which, first = item // pieces, item % pieces * work.block_units
        last = minimum(first + work.block_units, work.units)
        if work.left.packed:
            width = work.shape.rows
            for _ in k.when(which < blocks):
                target = work.packed[0] + which * work.units * width
                part = Part(which * width, width, first, last, target)
                if work.micro.line > 1:
                    pack_lines(k, work.sources[0], part, work.micro.line)
                else:
                    pack_units(k, work.sources[0], part, work.micro.lanes)
        if work.right.packed:
            width = work.shape.vectors * work.micro.lanes
            panel = which - blocks * packs_left
            for _ in k.when(panel > -1):
                target = work.packed[1] + panel * work.units * width
                part = Part(panel * width, width, first, last, target)
                pack_units(k, work.sources[1], part, work.micro.lanes)


def _multiply(
    k: Builder,
    work: _Work,
    calls: _Calls,
    rows: tuple[Value, Value],
    columns: tuple[Value, Value],
    panels: Value,
) -> None:
    """One item: blocks of rows from, to; panels of columns from, to; over all of this call's K."""
    tail = work.shape.tail
    whole = minimum(columns[1], panels - 1) if tail else columns[1]
    for unit in k.range(0, work.units, work.block_units):
        finish = _finish(k, work, calls, unit)
        for block in k.range(*rows):
            for panel in k.range(columns[0], whole):
                _step(k, work, finish, block, panel, unit, work.shape.vectors)
            if tail:
                for _ in k.when(whole < columns[1]):
                    _step(k, work, finish, block, whole, unit, tail)


def _finish(k: Builder, work: _Work, calls: _Calls, unit: Value) -> Finish:
    """What follows the block of K that begins at `unit`."""
    begins = calls.first.equals(1) & unit.equals(0)
    source = k.register(calls.partial)
    for _ in k.when(begins):
        source.value = calls.c
    return Finish(
        source=source.value,
        source_stride=select(begins, calls.c_stride, calls.partial_stride),
        reads=select(begins, calls.reads_c, k.index(1)) > 0,
        factors=(calls.factors[0], select(begins, calls.factors[1], k.constant(1.0, f32))),
        partial=calls.partial,
        partial_stride=calls.partial_stride,
        out=calls.out,
        out_stride=calls.out_stride,
        ends=calls.last.equals(1) & (work.units < unit + work.block_units + 1),
        m=work.sources[0].extent,
        n=work.sources[1].extent,
    )


def _step(
    k: Builder, work: _Work, finish: Finish, block: Value, panel: Value, unit: Value, vectors: int
) -> None:
    """One block of rows times one panel of columns over one block of K."""
    row, column = block * work.shape.rows, panel * (work.shape.vectors * work.micro.lanes)
    units = minimum(work.block_units, work.units - unit)
    left, right = _left(work, block, unit), _right(work, panel, unit, vectors)
    with k.scope():
        sizes = work.shape.rows, vectors
        sums = work.micro.step(k, sizes, left, right, units, work.scratch)
    with k.scope():  # the accumulators have become plain values
        store_tile(k, finish, (row, column), (work.shape.rows, vectors * work.micro.lanes), sums,
                   work.scratch, work.micro.lanes)  # fmt: skip


def _left(work: _Work, block: Value, unit: Value) -> Left:
    rows, source = work.shape.rows, work.sources[0]
    if work.left.packed:
        return PackedLeft(work.packed[0] + (block * work.units + unit) * rows, rows)
    starts = [source.at(block * rows + row, unit) for row in range(rows)]
    return PlainLeft(source.reader, starts, source.stride)


def _right(work: _Work, panel: Value, unit: Value, vectors: int) -> Right:
    width, source = work.shape.vectors * work.micro.lanes, work.sources[1]
    if work.right.packed:
        base = work.packed[1] + (panel * work.units + unit) * width
        return PackedRight(base, width, work.micro.lanes)
    column = panel * width
    last = vectors - 1
    masked = last if work.shape.ragged and vectors == (work.shape.tail or vectors) else None
    start = source.base + (column + unit * source.reader.depth * source.stride)
    left = source.extent - (column + last * work.micro.lanes)
    return PlainRight(source.reader, start, source.stride, work.micro.lanes, masked, left)


def store_tile(
    k: Builder,
    finish: Finish,
    place: tuple[Value, Value],
    sizes: tuple[int, int],
    sums: list[list[Value]] | None,
    scratch: Value,
    lanes: int,
) -> None:
    """Finish and store the sums [rows, width] at (row, column) `place`; None: they are in scratch.

    Whole tiles of float32 go straight from the registers, others through scratch.
    """
    (row, column), (rows, width) = place, sizes
    if sums is None:
        _store_from(k, finish, place, sizes, scratch, lanes)
        return

    def spill() -> None:
        for r, line in enumerate(sums):
            for v, value in enumerate(line):
                (scratch + (r * width + v * lanes)).store(value)
        _store_from(k, finish, place, sizes, scratch, lanes)

    if finish.out.type != finish.partial.type:
        spill()
        return
    whole = k.register(k.index(0))
    for _ in k.when((row + (rows - 1) < finish.m) & (column + (width - 1) < finish.n)):
        whole.value = k.index(1)
    for _ in k.when(whole.value > 0):
        _store_whole(k, finish, place, sums, lanes)
    for _ in k.when(whole.value.equals(0)):
        spill()


def _store_whole(
    k: Builder, finish: Finish, place: tuple[Value, Value], sums: list[list[Value]], lanes: int
) -> None:
    """Finish and store a tile of which every row and column exists."""
    row, column = place
    alpha, beta = (factor.splat(lanes) for factor in finish.factors)
    totals = [[k.register(value * alpha) for value in line] for line in sums]
    for _ in k.when(finish.reads):
        for r, line in enumerate(totals):
            source = finish.source + ((row + r) * finish.source_stride + column)
            for v, total in enumerate(line):
                total.value = total.value + (source + v * lanes).load(lanes) * beta
    for r, line in enumerate(totals):
        target = finish.out + ((row + r) * finish.out_stride + column)
        for v, total in enumerate(line):
            (target + v * lanes).store(canonical(total.value))


def _store_from(
    k: Builder,
    finish: Finish,
    place: tuple[Value, Value],
    sizes: tuple[int, int],
    scratch: Value,
    lanes: int,
) -> None:
    """Finish and store what exists of a tile in scratch."""
    (row, column), (rows, width) = place, sizes
    alpha, beta = (factor.splat(lanes) for factor in finish.factors)
    for r in k.range(0, minimum(k.index(rows), finish.m - row)):
        source = finish.source + ((row + r) * finish.source_stride + column)
        target = finish.out + ((row + r) * finish.out_stride + column)
        partial = finish.partial + ((row + r) * finish.partial_stride + column)
        for offset in k.range(0, minimum(k.index(width), finish.n - column), lanes):
            left = finish.n - column - offset
            value = (scratch + (r * width + offset)).load(lanes) * alpha
            with k.scope():
                total = k.register(value)
                for _ in k.when(finish.reads):
                    total.value = value + load_head(source + offset, left, lanes) * beta
                if finish.out.type == finish.partial.type:
                    store_head(canonical(total.value), target + offset, left)
                else:
                    for _ in k.when(finish.ends):
                        store_head(total.value.to(bf16), target + offset, left)
                    for _ in k.when(select(finish.ends, k.index(0), k.index(1)) > 0):
                        store_head(total.value, partial + offset, left)
