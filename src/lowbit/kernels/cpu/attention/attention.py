"""Attention as one operation: out = softmax(scale · q kᵀ + mask) v, for each head.

An item is a head, or some of its queries. It packs the keys and values of the head for itself, and
then takes a block of about 32 queries at a time:

    scores   block of queries × packed keys          float32, a row for each query
    weights  2^(scores − the greatest of a row)      where the scores were, in two passes
    sums     weights × packed values                 float32
    out      sums / the sum of a row's weights       in the output's format

So no more than the scores of a block are ever in memory, and all of a row's: its softmax is that of
the definition, not an online one. Products are those of the float micro-kernels: bfloat16 with sums
in float32 on AMX and AVX-512 BF16, else float32. Bytes lose nothing on their way: a stored value
less its zero point is a bfloat16 number, and scales are applied to scores and sums.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from lowbit.isa.generic import load_head, maximum, minimum, select
from lowbit.isa.types import (
    F32Pointer,
    Int,
    S64Pointer,
    Scalar,
    U8Pointer,
    bf16,
    element_of,
    f32,
    s32,
    u32,
)
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.attention.plan import (
    TABLE_LENGTH,
    AttentionForm,
    Geometry,
    converted_kind,
    geometry_of,
    step_shape,
    window_step,
)
from lowbit.kernels.cpu.attention.weights import Weigher, edge_of, narrowed
from lowbit.kernels.cpu.float.micro_kernel import FloatMicro, Left, PackedRight, Passing, PlainLeft
from lowbit.kernels.cpu.float.operand import Reader
from lowbit.kernels.cpu.float.pack import Part, Source, pack_units
from lowbit.kernels.cpu.rows.input_format import across
from lowbit.kernels.cpu.shared.formats import (
    FORMATS,
    Convert,
    RowStore,
    parameters_of,
    store_vector,
)
from lowbit.kernels.cpu.shared.functions import rounded


@kernel
def attention(
    k: Builder,
    out: U8Pointer,
    q: U8Pointer,
    key: U8Pointer,
    value: U8Pointer,
    mask: F32Pointer,
    padding: U8Pointer,
    parameters: F32Pointer,
    geometry: S64Pointer,
    scratch: U8Pointer,
    items: Int,
    *,
    form: AttentionForm,
    micro: FloatMicro,
) -> None:
    """out[b, h, i] = Σ_j w[j] value[b, h, j], where w is the softmax over j of
    scale · q[b, h, i] · key[b, h, j] + mask[b, h, i, j].

    mask: float32; padding: bytes, 0 where a key takes no part, of which the last axis is dense, as
    it is of all operands. geometry, items, and scratch for each thread, at a multiple of 64: of
    `plan_attention`. parameters: of `attention_parameters`. Where no key takes part the output is
    zero. A weight of zero still multiplies its value: infinity becomes NaN.
    """
    g = geometry_of([(geometry + i).load() for i in range(TABLE_LENGTH)])
    mine = scratch + k.thread() * g.scratch_bytes
    work = _Work(k, form, micro, g, mine, parameters)
    kind = FORMATS[form.inputs]
    inputs = [q.cast(FORMATS[form.queries]), key.cast(kind), value.cast(kind)]
    places = [*inputs, out.cast(FORMATS[form.out]), mask, padding]
    micro.begin(k)
    for item in k.parallel(items):
        chunk, head, batch = (
            item % g.chunks,
            item // g.chunks % g.heads,
            item // g.chunks // g.heads,
        )
        shared = head // g.group
        at = [
            place + batch * stride.batch + (shared if number in (1, 2) else head) * stride.head
            for number, (place, stride) in enumerate(zip(places, g.strides, strict=True))
        ]
        first = chunk * g.chunk_rows
        last = minimum(first + g.chunk_rows, g.queries)
        origin = work.first(first) // work.step * work.step if form.window else None
        if origin is not None:  # what is before stays out of scratch
            at[1:3] = [at[i] + origin * g.strides[i].row for i in (1, 2)]
        work.pack(at[1], at[2], work.limit(last - 1, origin))
        for row in k.range(first, last, work.block):
            work.attend(at, row, minimum(k.index(work.block), last - row), origin)
    micro.end(k)


@dataclass(frozen=True)
class _Rows:
    """Rows of units in scratch, for vectors."""

    starts: list[Value]

    def one(self, unit: Value, row: int) -> Value:
        return (self.starts[row] + unit).load()


class _Work:
    """What all items share."""

    def __init__(
        self, k: Builder, form: AttentionForm, micro: FloatMicro, g: Geometry[Value],
        scratch: Value, parameters: Value,
    ) -> None:  # fmt: skip
        self._k, self._form, self._micro, self._g = k, form, micro, g
        self.rows, self.vectors, self.block = step_shape(micro)
        self.lanes, self.depth = micro.lanes, 2 if micro.pair else 1
        self.step = window_step(micro)
        self._keys = scratch.cast(u32)
        self._values = (scratch + g.values_at).cast(u32)
        self._queries = (scratch + g.queries_at).cast(u32)
        self._scores = (scratch + g.scores_at).cast(f32)
        self._sums = (scratch + g.sums_at).cast(f32)
        self._factors = (scratch + g.factors_at).cast(f32)
        self._converted = scratch + g.converted_at
        numbers = [(parameters + i).load() for i in range(5 + parameters_of(form.out))]
        self._value_scale, self._zeros = numbers[1], [rounded(zero) for zero in numbers[2:5]]
        last = [n.splat(self.lanes) for n in numbers[5:]]
        self._store_row = RowStore(k, form.out, last, self.lanes)
        edge = edge_of(k, self.lanes)
        self._weigher = Weigher.of(k, self.lanes, micro.pair, numbers[0], edge, form.cap)

    def limit(self, row: Value, origin: Value | None = None) -> Value:
        """The end of the keys that a query attends to, from `origin` on."""
        end = maximum(minimum(row + self._g.diagonal + 1, self._g.keys), self._k.index(0))
        return end if origin is None else end - origin

    def first(self, row: Value) -> Value:
        """The first key that a query with a window attends to."""
        begin = row + self._g.diagonal + (1 - self._form.window)
        return maximum(minimum(begin, self._g.keys), self._k.index(0))

    def pack(self, key: Value, value: Value, keys: Value) -> None:
        """Pack so many keys and values of a head."""
        g, k = self._g, self._k
        kind = converted_kind(self._form, self._micro) or self._form.inputs
        reader = Reader(kind, self._micro.pair)
        for number, start, target, size in (
            (1, key, self._keys, g.head_dim),
            (2, value, self._values, g.value_dim),
        ):
            stride = g.strides[number].row
            if kind != self._form.inputs:
                place = self._converted.cast(FORMATS[kind])
                convert = self._converting(number, FORMATS[kind])
                for row in k.range(0, keys):
                    source = start + row * stride
                    if self._form.scaled_rows:
                        convert = self._scaling(source + size, FORMATS[kind])
                    self._convert_row(source, place + row * size, size, convert)
                start, stride = self._converted, size
            one, base = k.index(1), reader.pointer(start)
            if number == 1:
                source = Source(reader, base, one, stride, keys, size, "k")
                units = g.key_units
            else:
                source = Source(reader, base, stride, one, size, keys, "x")
                units = self._units(keys)
            width = self.vectors * self.lanes
            zero = k.index(0)
            for panel in k.range(0, (source.extent + (width - 1)) // width):
                place = target + panel * width * (g.key_units if number == 1 else g.value_units)
                pack_units(k, source, Part(panel * width, width, zero, units, place), self.lanes)

    def attend(self, at: list[Value], row: Value, rows: Value, origin: Value | None) -> None:
        """A block of so many queries from `row` on; `at`: where the operands of its head are;
        origin: the first key that is packed."""
        k, g = self._k, self._g
        packed, values = self._keys, self._values
        if origin is not None:  # whole panels of keys that no query of the block attends to
            width = self.vectors * self.lanes
            skipped = (self.first(row) - origin) // self.step * self.step
            origin = origin + skipped
            packed = packed + skipped * g.key_units
            values = values + skipped // self.depth * width
        keys = self.limit(row + rows - 1, origin)
        convert = self._converting(0, bf16 if self._micro.pair else f32)
        filled = g.key_units * self.depth
        for i in k.range(0, rows):
            source = at[0] + (row + i) * g.strides[0].row
            target = self._queries.cast(bf16 if self._micro.pair else f32) + i * filled
            self._convert_row(source, target, g.head_dim, convert, filled)
        scores = (self._scores, g.score_stride)
        self._multiply(rows, (self._queries, g.key_units), (packed, g.key_units),
                       (keys, g.key_units), scores)  # fmt: skip
        units = self._units(keys)
        self._weigh(at, row, rows, units * self.depth, origin)
        self._multiply(rows, (self._scores.cast(u32), g.score_stride),
                       (values, g.value_units), (g.value_dim, units),
                       (self._sums, g.sum_stride))  # fmt: skip
        for i in k.range(0, rows):
            self._store(at[3] + (row + i) * g.strides[3].row, i)

    def _weigh(
        self, at: list[Value], first: Value, rows: Value, end: Value, origin: Value | None
    ) -> None:
        """Make weights of rows of scores, and keep what their sums are to be multiplied by.

        Each pass takes all rows before the next begins, so that one row does not wait for another.
        """
        g, form, k = self._g, self._form, self._k
        for i in k.range(0, rows):
            row = first + i
            mask = at[4] + row * g.strides[4].row if form.mask else None
            padding = at[5] + row * g.strides[5].row if form.padding else None
            scores, limit = self._scores + i * g.score_stride, self.limit(row, origin)
            begin = self._begin(row, origin)
            self._weigher.cap(scores, 0 if begin is None else begin, limit)
            if origin is not None and begin is not None:
                scores, limit = scores + begin, limit - begin
                self._weigher.exclude(scores, self.first(row) - origin - begin)
            shift = self._weigher.shift(scores, limit, mask, padding)
            (self._factors + i).store(shift)
        for i in k.range(0, rows):
            scores, shift = self._scores + i * g.score_stride, (self._factors + i).load()
            row = first + i
            limit, masked = self.limit(row, origin), form.mask or form.padding
            begin = self._begin(row, origin)
            some = self._weigher.weigh(scores, limit, end, shift, masked, begin)
            (self._sums + i * g.sum_stride).store(some)  # where nothing else is yet
        for i in k.range(0, rows):
            some = (self._sums + i * g.sum_stride).load(self.lanes)
            total = across(some, operator.add)
            share = select(total.equals(0.0), k.constant(0.0, f32), 1.0 / total)
            (self._factors + i).store(share * self._value_scale)

    def _begin(self, row: Value, origin: Value | None) -> Value | None:
        """Where the vector of scores begins with which a query's window does."""
        if origin is None:
            return None
        return (self.first(row) - origin) // self.lanes * self.lanes

    def _store(self, target: Value, i: Value) -> None:
        """Finish and store a row of the output."""
        g, lanes = self._g, self.lanes
        sums, factor = self._sums + i * g.sum_stride, (self._factors + i).load().splat(lanes)
        self._store_row(g.value_dim, lambda at, left: (sums + at).load(lanes) * factor, target)

    def _units(self, keys: Value) -> Value:
        """Of so many keys along which weights and values are multiplied."""
        quantum = self._micro.quantum
        return (keys + (quantum - 1)) // quantum * (quantum // self.depth)

    def _multiply(
        self, rows: Value, left: tuple[Value, Value], right: tuple[Value, Value],
        sizes: tuple[Value, Value], out: tuple[Value, Value],
    ) -> None:  # fmt: skip
        """out = left · right, for so many rows, and (columns, units) `sizes`.

        left, out: where their first rows begin, and how far apart they are, in units. right: where
        the panels begin, and how many units each has.
        """
        k, (columns, units) = self._k, sizes
        vectors = (columns + (self.lanes - 1)) // self.lanes
        whole, width = vectors // self.vectors, self.vectors * self.lanes
        tail = vectors % self.vectors
        for row in k.range(0, rows, self.rows):
            lines = self._left(left[0] + row * left[1], left[1])

            def step(panel: Value, count: int, row: Value = row, lines: Left = lines) -> None:
                base = right[0] + panel * right[1] * width
                place = out[0] + row * out[1] + panel * width
                self._step(
                    lines, PackedRight(base, width, self.lanes), count, units, (place, out[1])
                )

            for panel in k.range(0, whole):
                step(panel, self.vectors)
            for count in range(1, self.vectors):
                for _ in k.when(tail.equals(count)):
                    step(whole, count)

    def _left(self, start: Value, stride: Value) -> Left:
        if self._micro.in_registers:
            return _Rows([start + stride * row for row in range(self.rows)])
        reader = Reader("bf16", pair=True)
        return PlainLeft(reader, [reader.pointer(start)], self._k.index(1), stride * self.depth)

    def _step(
        self, left: Left, right: PackedRight, vectors: int, units: Value, out: tuple[Value, Value],
    ) -> None:  # fmt: skip
        """One step: rows by so many vectors, its sums to `out`, rows so far apart."""
        k, (place, stride) = self._k, out
        passing = None
        if not self._micro.in_registers:
            passing = Passing(place, stride=stride)
        with k.scope():
            sums = self._micro.step(k, (self.rows, vectors), left, right, units, passing)
        for row, values in enumerate(sums):
            for vector, total in enumerate(values):
                (place + stride * row + vector * self.lanes).store(total)

    def _converting(self, number: int, to: Scalar) -> Convert:
        """From what an input stores to `to`, without its scale: operand number 0, 1 or 2."""

        name = self._form.inputs if number else self._form.queries
        if parameters_of(name):
            zero = self._zeros[number].splat(self.lanes)
            return lambda value: self._narrow((value.to(s32) - zero).to(f32), to)
        if FORMATS[name] == to:
            return lambda value: value
        return lambda value: self._narrow(value.to(f32), to)

    def _scaling(self, scale: Value, to: Scalar) -> Convert:
        """From a row of bytes to `to`, by the scale that lies there."""
        factor = scale.cast(f32).load().splat(self.lanes)
        return lambda value: self._narrow(value.to(s32).to(f32) * factor, to)

    def _narrow(self, value: Value, to: Scalar) -> Value:
        return narrowed(self._k, value) if to == bf16 else value

    def _convert_row(
        self, source: Value, target: Value, count: Value, convert: Convert,
        filled: Value | None = None,
    ) -> None:  # fmt: skip
        """Convert a row, with zeros behind it up to `filled`."""
        k, lanes, kind = self._k, self.lanes, element_of(target.type)
        if element_of(source.type) == kind:  # which is copied
            lanes = k.isa.vector_bytes // kind.bytes
        whole = count // lanes * lanes
        for at in k.range(0, whole, lanes):
            (target + at).store(convert((source + at).load(lanes)))
        for _ in k.when(whole < count):
            left = count - whole
            store_vector(convert(load_head(source + whole, left, lanes)), target + whole, left)
        if filled is not None:
            for at in k.range(count, filled):
                (target + at).store(k.constant(0, kind))
