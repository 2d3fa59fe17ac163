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
from lowbit.kernels.cpu.float.store import FloatEpilogue, PendingTile
from lowbit.kernels.cpu.shared.layout import LINE

_PANELS_PER_COPY = 16  # from which on rows are copied for tiles
_UNITS_AHEAD = 16  # of a packed panel that comes from the second-level cache
_ADDED = 16  # vectors of a row that an item of the region adds which adds up slices
_ROWS_IN_PASSING = 2  # finished for each 32 k; more would outlast the products

Range = tuple[Value, Value]


def _ceil(a: Value, b: Value | int) -> Value:
    return (a + b - 1) // b


@kernel
def float_product(
    k: Builder, a: U8Pointer, a_row_stride: Int, a_stride: Int, b: U8Pointer, b_column_stride: Int,
    b_stride: Int, shared: U8Pointer, private: U8Pointer, private_bytes: Int, group_panels: Int,
    c: F32Pointer, c_stride: Int, partial: F32Pointer, partial_stride: Int, out: U8Pointer,
    out_stride: Int, m: Int, n: Int, k_size: Int, k_block: Int, k_slice: Int, item_blocks: Int,
    item_panels: Int, alpha: Int, beta: Int, reads_c: Int, first: Int, last: Int,
    *, micro: FloatMicro, shape: FloatShape, left: Operand, right: Operand, out_kind: str,
    ahead: tuple[int, int], sliced: bool,
) -> None:  # fmt: skip
    """out[m, n] = alpha·a[m, k_size]·b[k_size, n] + beta·c[m, n]; see _Product.

    Strides count elements. `k_block` is a multiple of the micro-kernel's quantum. An item is so
    many blocks of rows by so many panels, `group_panels` at a time; if `sliced`, all rows over
    `k_slice` of K. Scratch: `private`, for each thread; `shared`, for packed rows or slices' sums.
    """
    mine = private + k.thread() * private_bytes
    a_source = _source(k, left, micro, a, (a_stride, a_row_stride), (m, k_size))
    b_source = _source(k, right, micro, b, (b_stride, b_column_stride), (n, k_size))
    depth = a_source.reader.depth
    units = _ceil(k_size, micro.quantum) * (micro.quantum // depth)
    packed = shared.cast(u32), mine.cast(u32)
    copied = _copied(a_source, mine, k_block, group_panels * (shape.vectors * micro.lanes))
    slices = _Slices(k, shared.cast(f32), k_slice // depth, units) if sliced else None
    block_units, pending = k_block // depth, _pending(k, micro, shape)
    target = out.cast(f32 if out_kind == "f32" else bf16)
    sums = (target, out_stride) if out_kind == "f32" else (partial, partial_stride)
    call = FloatEpilogue(k, c, c_stride, reads_c, (alpha, beta), target, out_stride, m, n, *sums)
    work = _Product(k, micro, shape, left, right, ahead, a_source, b_source, packed, copied, units,
                    block_units, slices, pending, call, (first, last))  # fmt: skip
    work.run(item_blocks, item_panels, group_panels)


def _pending(k: Builder, micro: FloatMicro, shape: FloatShape) -> PendingTile | None:
    """The sums that are finished in passing, where registers do not hold them."""
    tile = shape.rows * shape.vectors * micro.lanes
    return None if micro.in_registers else PendingTile(k, k.local(f32, tile), micro.lanes)


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
class _Slices:
    """K in slices of `size` units, each with sums [m, n] of its own."""

    k: Builder
    sums: Value
    size: Value
    all_units: Value

    @property
    def count(self) -> Value:
        return _ceil(self.all_units, self.size)

    def units(self, number: Value) -> Range:
        """From, to of a slice."""
        first = number * self.size
        return first, minimum(first + self.size, self.all_units)

    def epilogue(self, whole: FloatEpilogue, number: Value, reads: Value) -> FloatEpilogue:
        """What follows a block of K of a slice; `reads`: sums of those before it are there."""
        own, factors = self.sums + number * (whole.m * whole.n), whole.factors
        return replace(
            whole, source=own, source_stride=whole.n, reads=reads,
            factors=(factors[0], self.k.constant(1.0, f32)), out=own, out_stride=whole.n,
            ends=None,
        )  # fmt: skip

    def add(self, epilogue: FloatEpilogue, lanes: int) -> None:
        """Another region: the sums of all slices, in their order, become the output."""
        factors = self.k.constant(1.0, f32), epilogue.factors[1]
        k, epilogue, wide = self.k, replace(epilogue, factors=factors, ends=None), _ADDED * lanes
        pieces = _ceil(epilogue.n, wide)
        for item in k.parallel(epilogue.m * pieces):
            row, first = item // pieces, item % pieces * wide
            for column in k.range(first, minimum(first + wide, epilogue.n), lanes):
                at, left = self.sums + (row * epilogue.n + column), epilogue.n - column
                with k.scope():
                    total = k.register(load_head(at, left, lanes))
                    for number in k.range(1, self.count):
                        more = load_head(at + number * (epilogue.m * epilogue.n), left, lanes)
                        total.value = total.value + more
                    sums = [[total.value]]
                with k.scope():
                    epilogue.tile((row, column), sums, ragged=True)


@dataclass(frozen=True)
class _Product:
    """What all items share. The packed left operand has room for whole blocks, with K rounded up
    to the quantum; of the right one, some panels over a block of K are packed at a time, and all
    rows of an item meet them before the next.

    call: where a call of the kernel gets c, if `reads`, and leaves sums; factors are bits. whole:
    whether it has the first part of K, which begins from beta·c, as the others do from `partial`,
    and the last, as all but that leave sums there; for float32 outputs it is the output itself.
    """

    k: Builder
    micro: FloatMicro
    shape: FloatShape
    left: Operand
    right: Operand
    ahead: tuple[int, int]
    rows: Source
    columns: Source
    packed: tuple[Value, Value]
    copied: Source
    units: Value
    block_units: Value
    slices: _Slices | None
    pending: PendingTile | None
    call: FloatEpilogue
    whole: tuple[Value, Value]

    @property
    def width(self) -> int:
        """Columns of a panel."""
        return self.shape.vectors * self.micro.lanes

    def run(self, item_blocks: Value, item_panels: Value, group: Value) -> None:
        """All items: of so many blocks of rows by so many panels, in groups of panels."""
        k, slices = self.k, self.slices
        blocks = _ceil(self.rows.extent, self.shape.rows)
        panels = _ceil(self.columns.extent, self.width)
        if self.left.packed:
            self._pack_left(blocks)
        self.micro.begin(k)
        across = _ceil(panels, item_panels)
        down = slices.count if slices else _ceil(blocks, item_blocks)
        for number in k.parallel(down * across):
            part, column = number // across, number % across * item_panels
            rows, units = (k.index(0), blocks), (k.index(0), self.units)
            if slices:
                units = slices.units(part)
            else:
                rows = part * item_blocks, minimum((part + 1) * item_blocks, blocks)
            end = minimum(column + item_panels, panels)
            for unit in k.range(*units, self.block_units):
                epilogue = self._epilogue(unit)
                if slices:
                    epilogue = slices.epilogue(epilogue, part, unit > units[0])
                for first in k.range(column, end, group):
                    columns = first, minimum(first + group, end)
                    block = unit, minimum(unit + self.block_units, units[1])
                    self._multiply(epilogue, rows, columns, panels, block)
        self.micro.end(k)
        if slices:
            slices.add(self._epilogue(k.index(0)), self.micro.lanes)

    def _pack_left(self, blocks: Value) -> None:
        """The first region: an item is one block of rows over one block of K."""
        pieces, rows = _ceil(self.units, self.block_units), self.shape.rows
        for item in self.k.parallel(blocks * pieces):
            block, first = item // pieces, item % pieces * self.block_units
            last = minimum(first + self.block_units, self.units)
            target = self.packed[0] + block * self.units * rows
            part = Part(block * rows, rows, first, last, target)
            if self.micro.line > 1:
                pack_lines(self.k, self.rows, part, self.micro.line)
            else:
                pack_units(self.k, self.rows, part, self.micro.lanes)

    def _epilogue(self, unit: Value) -> FloatEpilogue:
        """What follows the block of K that begins at `unit`."""
        k, call = self.k, self.call
        begins, (alpha, beta) = (
            self.whole[0].equals(1) & unit.equals(0),
            map(float_of, call.factors),
        )
        source = k.register(call.partial)
        for _ in k.when(begins):
            source.value = call.source
        epilogue = replace(
            call,
            source=source.value,
            source_stride=select(begins, call.source_stride, call.partial_stride),
            reads=select(begins, call.reads, k.index(1)) > 0,
            factors=(alpha, select(begins, beta, k.constant(1.0, f32))),
            ends=self.whole[1].equals(1) & (self.units < unit + self.block_units + 1),
        )
        return epilogue if call.out.type != call.partial.type else replace(epilogue, ends=None)

    def _multiply(
        self, epilogue: FloatEpilogue, rows: Range, columns: Range, panels: Value, units: Range
    ) -> None:
        """Blocks of rows from, to by panels of columns from, to over units from, to, a block of
        K."""
        k, shape, width, (unit, end) = self.k, self.shape, self.width, units
        panel_units = self.block_units * width
        if self.right.packed:
            for panel in k.range(*columns):
                target = self.packed[1] + ((panel - columns[0]) * panel_units - unit * width)
                part = Part(panel * width, width, unit, end, target)
                pack_units(k, self.columns, part, self.micro.lanes)
        whole = minimum(columns[1], panels - 1) if shape.tail else columns[1]
        for block in k.range(*rows):
            left = self._left(block, units, columns[1] - columns[0])

            def step(panel: Value, vectors: int, block: Value = block, left: Left = left) -> None:
                packed = self.packed[1] + (panel - columns[0]) * panel_units
                self._step(epilogue, left, packed, (block, panel), units, vectors)

            for panel in k.range(columns[0], whole):
                step(panel, shape.vectors)
            if shape.tail:
                for _ in k.when(whole < columns[1]):
                    self._drain(epilogue, shape.vectors)
                    step(whole, shape.tail)
                    self._drain(epilogue, shape.tail)
        self._drain(epilogue, shape.vectors)

    def _ragged(self, vectors: int) -> bool:
        """Whether of a step of so many vectors, the last in a row, the last may not be whole."""
        return self.shape.ragged and vectors == (self.shape.tail or vectors)

    def _drain(self, epilogue: FloatEpilogue, vectors: int) -> None:
        """Finish what waits of a step of so many vectors."""
        if self.pending is not None:
            self.pending.finish(epilogue, vectors, self._ragged(vectors))

    def _step(
        self, epilogue: FloatEpilogue, left: Left, packed: Value, place: tuple[Value, Value],
        block_units: Range, vectors: int,
    ) -> None:  # fmt: skip
        """One block of rows times one panel of columns, `packed` there or not, over a block of
        K."""
        k, shape, lanes, (block, panel) = self.k, self.shape, self.micro.lanes, place
        row, column = block * shape.rows, panel * self.width
        unit, units = block_units[0], block_units[1] - block_units[0]
        ragged, pending, passing = self._ragged(vectors), self.pending, None
        if self.right.packed:
            right: Right = PackedRight(packed, self.width, lanes, _UNITS_AHEAD)
        else:
            source, reader = self.columns, self.columns.reader
            start = source.base + (column + unit * reader.depth * source.stride)
            exist = source.extent - (column + (vectors - 1) * lanes)
            masked = vectors - 1 if ragged else None
            ahead = self.ahead[0] // reader.depth, self.ahead[1] // reader.bytes
            right = PlainRight(reader, start, source.stride, lanes, masked, exist, ahead)
        if pending is not None:
            rest = partial(pending.finish, epilogue, vectors, ragged)
            passing = Passing(pending.scratch, partial(rest, rows=_ROWS_IN_PASSING), rest)
        with k.scope():
            sums = self.micro.step(k, (shape.rows, vectors), left, right, units, passing)
        if pending is not None:
            pending.put(epilogue, (row, column), shape.rows)
            return
        with k.scope():  # the accumulators have become plain values
            epilogue.tile((row, column), sums, ragged)

    def _left(self, block: Value, units: Range, panels: Value) -> Left:
        """A block of rows over units from, to, which so many panels will meet."""
        k, rows, source, copied = self.k, self.shape.rows, self.rows, self.copied
        if self.left.packed:
            return PackedLeft(self.packed[0] + (block * self.units + units[0]) * rows, rows)
        if not self.left.copied:
            starts = [source.at(block * rows + row, units[0]) for row in range(rows)]
            return PlainLeft(source.reader, starts, source.stride)
        if self.micro.in_registers:
            copy_rows(k, source, copied, block, rows, units)
            starts = [copied.base + copied.x_stride * row for row in range(rows)]
            return PlainLeft(source.reader, starts, source.stride)
        # Tiles take whole rows, whole units, from anywhere: for a few panels as they lie.
        start, apart = k.register(copied.base), k.register(copied.x_stride)
        whole = (block * rows + (rows - 1) < source.extent) & (panels < _PANELS_PER_COPY)
        for _ in k.when(whole & (units[1] * source.reader.depth < source.depth + 1)):
            start.value, apart.value = source.at(block * rows, units[0]), source.x_stride
        for _ in k.when(apart.value.equals(copied.x_stride)):
            copy_rows(k, source, copied, block, rows, units)
            start.value = copied.base
        return PlainLeft(source.reader, [start.value], source.stride, apart.value)
