"""Chunks of a cache of bytes, multiplied as whole numbers: of 8 bits and of 16.

Queries have 16 bits, with a scale for each; weights, multiplied by the scales of their values, too,
with one for each of `_BLOCK` keys: what either loses is less than a hundredth of what bytes have
lost. A product of two neighbours is one instruction where float32 takes four and two conversions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from lowbit.isa.generic import madd16, maximum, minimum, shuffle
from lowbit.isa.types import Value, Vector, f32, s8, s16, s32
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.attention.chunks import BLOCK, CHUNK, PAD, CachedForm, Chunks, evenly
from lowbit.kernels.cpu.rows.input_format import across
from lowbit.kernels.cpu.shared.functions import rounded

_MOST = 32767.0
_LEAST = 2.0**-100  # what is less than this becomes zero


@dataclass(frozen=True)
class _Bytes:
    """Bytes of a row that are loaded together, at most two for a lane."""

    at: int
    count: int
    lanes: int

    def load(self, k: Builder, row: Value) -> Value:
        """As numbers of 16 bits, two for a lane, with zeros behind them."""
        value, wide = (row + self.at).load(self.count), range(2 * self.lanes)
        if self.count < len(wide):
            order = tuple(min(i, self.count) for i in wide)
            value = shuffle(value, k.zeros(s8, self.count), order)
        return value.to(s16)

    def pairs(self, first: Value, second: Value) -> list[Value]:
        """Elements of two rows beside each other: in each 16 bytes, the first four and the last."""
        n = 2 * self.lanes
        return [
            shuffle(first, second, tuple(at + start + i + row for at in range(0, n, 8)
                                         for i in range(4) for row in (0, n)))
            for start in (0, 4)
        ]  # fmt: skip

    def add(self, row: Value, sums: list[Value]) -> None:
        """Add sums, of the order of `pairs`, to a row of float32."""
        order = [i // 8 * 4 + i % 4 + i // 4 % 2 * self.lanes for i in range(self.count)]
        for at in range(0, self.count, self.lanes):
            some = tuple(order[at : at + self.lanes])
            place = row + self.at + at
            place.store(place.load(len(some)) + shuffle(*sums, some))


def _bytes(form: CachedForm, lanes: int) -> Iterator[_Bytes]:
    at = 0
    while at < form.head_dim:
        count = 2 * lanes
        while count > form.head_dim - at:
            count //= 2
        yield _Bytes(at, count, lanes)
        at += count


class ByteChunks(Chunks):
    """As `Chunks`, of bytes with scales."""

    def __init__(
        self, k: Builder, form: CachedForm, values: Value, scratch: Value, parameters: Value
    ) -> None:
        super().__init__(k, form, values, scratch, parameters)
        self._bytes = list(_bytes(form, self._lanes))
        self._scales = k.local(f32, CHUNK + PAD)
        self._factors = k.local(f32, form.group)
        self._weights = k.local(s16, form.group * BLOCK)

    def _take_queries(self, queries: Value) -> None:
        for h in range(self._form.group):
            vectors = [segment.of_floats(queries + h * self._form.head_dim)[0]
                       for segment in self._segments]  # fmt: skip
            most = self._k.zeros(s32, self._lanes)
            for vector in vectors:
                most = maximum(vector.bits(Vector(s32, self._lanes)) & 0x7FFFFFFF, most)
            inverse = self._scaled(most, h).splat(self._lanes)
            for segment, vector in zip(self._segments, vectors, strict=True):
                whole = rounded(vector * inverse).to(s16)
                (self._query(h, 0).cast(s16) + segment.at).store(whole)

    def _scaled(self, most: Value, h: int) -> Value:
        """What makes 16 bits of numbers, from the greatest bits in each lane; its inverse is kept
        for a query. NaN, whose bits are the greatest of all, makes that NaN."""
        greatest = maximum(self._k.constant(_LEAST, f32), across(most, maximum).bits(f32))
        (self._factors + h).store(greatest * (1 / _MOST))
        return _MOST / greatest

    def _note(self, row: Value, j: Value) -> None:
        scale = (row + self._form.head_dim).cast(f32).load()
        (self._scales + j).store(scale)

    def _products(self, row: Value, some: range) -> list[Value]:
        totals: dict[int, Value] = {}
        for segment in self._bytes:
            part = segment.load(self._k, row)
            for h in some:
                q = (self._query(h, 0).cast(s16) + segment.at).load(2 * self._lanes)
                product = madd16(q, part)
                totals[h] = totals[h] + product if h in totals else product
        return [totals[h] for h in some]

    def _finish_scores(self, count: Value) -> None:
        lanes = self._lanes
        for at in self._k.range(0, count, lanes):
            scale = (self._scales + at).load(lanes)
            for h in range(self._form.group):
                place = self._scores + h * self._stride + at
                whole = place.cast(s32).load(lanes).to(f32)
                place.store(whole * (scale * (self._factors + h).load().splat(lanes)))

    def _make_sums(self, values: Value, count: Value, part: Value) -> None:
        k, form, registers = self._k, self._form, self._k.isa.vector_registers
        together = evenly(form.group, registers // 4)
        room = evenly(len(self._bytes), max(1, (registers - 6) // (2 * together)))
        tiles = [self._bytes[at : at + room] for at in range(0, len(self._bytes), room)]
        zeros = k.zeros(f32, self._lanes)
        for h, segment in product(range(form.group), self._segments):
            segment.store(part + h * form.part, [zeros])
        for first in k.range(0, count, BLOCK):
            left = minimum(count - first, k.index(BLOCK))
            block = values + first * form.row
            for j in k.range(0, left):
                self._note(block + j * form.row, j)
            (self._scales + left).store(zeros)
            for h in range(form.group):
                self._take_weights(first, left, h)
            for start in range(0, form.group, together):
                some = range(start, min(start + together, form.group))
                for tile in tiles:
                    self._sum_pairs(block, left, some, tile, part)

    def _take_weights(self, first: Value, left: Value, h: int) -> None:
        """Weights of a block, times the scales of their values, as whole numbers."""
        k, lanes = self._k, self._lanes
        scores = self._scores + h * self._stride + first
        with k.scope():
            most = k.register(k.zeros(s32, lanes))
            for at in k.range(0, left, lanes):
                weight = (scores + at).load(lanes) * (self._scales + at).load(lanes)
                (scores + at).store(weight)
                most.value = maximum(weight.bits(Vector(s32, lanes)), most.value)
            inverse = self._scaled(most.value, h).splat(lanes)
            for at in k.range(0, left, lanes):
                whole = rounded((scores + at).load(lanes) * inverse)
                (self._weights + h * BLOCK + at).store(whole.to(s16))

    def _sum_pairs(
        self, block: Value, left: Value, some: range, tile: list[_Bytes], part: Value
    ) -> None:
        """Add, for some queries, sums of elements of a block's values, two keys at a time."""
        k, form, lanes = self._k, self._form, self._lanes
        with k.scope():
            sums = [[[k.register(k.zeros(s32, lanes)) for _ in range(2)] for _ in tile]
                    for _ in some]  # fmt: skip
            for j in k.range(0, left, 2):
                lines = [block + at * form.row for at in (j, minimum(j + 1, left - 1))]
                if not some.start:
                    for line in lines:
                        self._fetch_ahead(line, tile[0].at, sum(part.count for part in tile))
                pairs = [part.pairs(*(part.load(k, line) for line in lines)) for part in tile]
                for h, row in zip(some, sums, strict=True):
                    place = (self._weights + h * BLOCK + j).cast(s32)
                    weights = place.load().splat(lanes).bits(Vector(s16, 2 * lanes))
                    for registers, vectors in zip(row, pairs, strict=True):
                        for register, vector in zip(registers, vectors, strict=True):
                            register.value = register.value + madd16(vector, weights)
            for h, row in zip(some, sums, strict=True):
                factor = (self._factors + h).load().splat(lanes)
                for segment, registers in zip(tile, row, strict=True):
                    totals = [register.value.to(f32) * factor for register in registers]
                    segment.add(part + h * form.part, totals)
