"""Attention of a few queries to a chunk of cached keys and values, which are read once.

    scores    `lanes` keys at a time: products with every query, then the sums of all lanes, by
              pairs, so that a vector holds the scores of neighbours
    weights   2^(scores − the greatest of the chunk)
    values    a key at a time, for as many queries and elements as registers hold sums of

Queries share what is loaded. Elements of a row may be in another order than in memory: of bfloat16,
those with even numbers come before the odd ones, which a shift and a mask tell apart.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from lowbit.isa.generic import extract, fma, minimum, prefetch, shuffle
from lowbit.isa.types import Value, Vector, element_of, f32, u8, u32
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.attention.weights import Weigher, edge_of
from lowbit.kernels.cpu.rows.input_format import across
from lowbit.kernels.cpu.shared.formats import FORMATS
from lowbit.kernels.cpu.shared.layout import LINE

CHUNK = 256  # keys of an item: results depend on it, and not on the number of threads
SCALE_BYTES = 4  # of a row of bytes, behind them
PAD = 16  # elements behind a row of scores or sums, at least a vector
BLOCK = 64  # keys whose values are read again from the nearest cache
# Bytes from what is read to what is fetched: what comes from memory in its latency, at 50 GB/s.
_AHEAD = 8192


class CachedForm(NamedTuple):
    """What is static. It keys the code.

    cache: "f32", "bf16" or "s8". head_dim: of queries, keys and values; `rotated` of them are
    turned by their position, an even number. group: how many heads of queries share one of keys.
    window, cap: of `AttentionForm`.
    """

    cache: str
    head_dim: int
    rotated: int
    group: int
    window: int = 0
    cap: float = 0.0

    @property
    def row(self) -> int:
        """Elements of the cache from one position to the next."""
        return self.head_dim + (SCALE_BYTES if self.cache == "s8" else 0)

    @property
    def part(self) -> int:
        """Elements of what a chunk leaves for a row and a head: sums, shift and total."""
        return self.head_dim + PAD

    @property
    def query(self) -> int:
        """Elements of a query in scratch, whole vectors."""
        return -(-self.head_dim // PAD) * PAD

    @property
    def scores(self) -> int:
        """Elements of a thread's scratch."""
        return self.group * (CHUNK + PAD + self.query)


@dataclass(frozen=True)
class _Segment:
    """Elements of a row that are loaded together: one vector, or two of bfloat16 (`pair`)."""

    k: Builder
    cache: str
    at: int
    count: int
    lanes: int

    @property
    def pair(self) -> bool:
        return self.count > self.lanes

    def of_cache(self, row: Value) -> list[Value]:
        """Vectors of float32 of a row of the cache, without its scale."""
        if self.pair:
            bits = (row + self.at).cast(u32).load(self.lanes)
            kind = Vector(f32, self.lanes)
            return [(bits << 16).bits(kind), (bits & 0xFFFF0000).bits(kind)]
        value = (row + self.at).load(self.count)
        return [self._whole(value.to(f32))]

    def of_floats(self, row: Value) -> list[Value]:
        """The same elements of a row of float32."""
        if not self.pair:
            return [self._whole((row + self.at).load(self.count))]
        low, high = ((row + self.at + i * self.lanes).load(self.lanes) for i in range(2))
        return [shuffle(low, high, tuple(range(odd, self.count, 2))) for odd in range(2)]

    def store(self, row: Value, vectors: Sequence[Value]) -> None:
        """Bring the elements to a row of float32."""
        if not self.pair:
            (value,) = vectors
            if self.count < self.lanes:
                value = shuffle(value, value, tuple(range(self.count)))
            (row + self.at).store(value)
            return
        order = [lane for i in range(self.lanes) for lane in (i, self.lanes + i)]
        for i in range(2):
            half = tuple(order[i * self.lanes : (i + 1) * self.lanes])
            (row + self.at + i * self.lanes).store(shuffle(*vectors, half))

    def _whole(self, value: Value) -> Value:
        if self.count == self.lanes:
            return value
        zeros = self.k.zeros(f32, self.count)
        return shuffle(value, zeros, tuple(min(i, self.count) for i in range(self.lanes)))


def _segments(k: Builder, form: CachedForm) -> Iterator[_Segment]:
    lanes, at = k.isa.vector_bytes // 4, 0
    while at < form.head_dim:
        left = form.head_dim - at
        count = 2 * lanes if form.cache == "bf16" and left >= 2 * lanes else min(left, lanes)
        yield _Segment(k, form.cache, at, count, lanes)
        at += count


class Chunks:
    """What is done with chunks of keys. scratch: of a thread, `form.scores` elements; values: from
    a key to its value, in elements of the cache."""

    def __init__(
        self, k: Builder, form: CachedForm, values: Value, scratch: Value, parameters: Value
    ) -> None:
        self._k, self._form, self._values = k, form, values
        self._queries, self._scores = scratch, scratch + form.group * form.query
        lanes = self._lanes = k.isa.vector_bytes // 4
        edge = edge_of(k, lanes)
        self._weigher = Weigher.of(k, lanes, False, parameters.load(), edge, form.cap)
        self._segments = list(_segments(k, form))
        self._stride = CHUNK + PAD

    def attend(self, queries: Value, keys: Value, count: Value, part: Value) -> None:
        """A chunk of so many keys, for the queries that share them."""
        form = self._form
        self._take_queries(queries)
        self._make_scores(keys, count)
        self._finish_scores(count)
        values = keys + self._values
        self._fetch(values, _AHEAD)
        for h in range(form.group):
            scores, end = self._scores + h * self._stride, part + h * form.part + form.head_dim
            self._weigher.cap(scores, 0, count)
            shift = self._weigher.shift(scores, count, None, None)
            end.store(shift)
            total = self._weigher.weigh(scores, count, count, shift, False)
            (end + 1).store(across(total, operator.add))
        self._make_sums(values, count, part)

    def _take_queries(self, queries: Value) -> None:
        """Bring queries to scratch, in the order of what they are multiplied by."""
        for h in range(self._form.group):
            for segment, at in zip(self._segments, self._starts(), strict=True):
                for i, vector in enumerate(segment.of_floats(queries + h * self._form.head_dim)):
                    self._query(h, at + i).store(vector)

    def _note(self, row: Value, j: Value) -> None:
        """What is kept of key `j` besides its products."""

    def _finish_scores(self, count: Value) -> None:
        """Make float32 of so many sums of products."""

    def combine(self, first: Value, used: Value, out: Value) -> None:
        """Sums of so many chunks become a row of the output."""
        k, form, lanes = self._k, self._form, self._lanes
        step, size = form.group * form.part, form.head_dim
        with k.scope():
            least = k.register((first + size).load())
            for c in k.range(1, used):
                least.value = minimum((first + c * step + size).load(), least.value)
            total = k.register(k.constant(0.0, f32))
            for c in k.range(0, used):
                place = first + c * step + size
                total.value = total.value + (place + 1).load() * self._share(least.value, place)
            inverse = 1.0 / total.value
            # Whole vectors: what is behind sums is the shift and the total, and is not stored.
            room = max(1, k.isa.vector_registers // 2 - 1) * lanes
            for begin in range(0, size, room):
                ends = range(begin, min(begin + room, size), lanes)
                with k.scope():
                    sums = [k.register(k.zeros(f32, lanes)) for _ in ends]
                    for c in k.range(0, used):
                        place = first + c * step
                        share = self._share(least.value, place + size).splat(lanes)
                        for summed, at in zip(sums, ends, strict=True):
                            summed.value = fma(share, (place + at).load(lanes), summed.value)
                    for summed, at in zip(sums, ends, strict=True):
                        row = summed.value * inverse.splat(lanes)
                        if size - at < lanes:
                            row = shuffle(row, row, tuple(range(size - at)))
                        (out + at).store(row)

    def _share(self, least: Value, place: Value) -> Value:
        """What the sums of a chunk are multiplied by, of the shift that is here."""
        exponent = (least - place.load()).splat(self._lanes)
        return extract(self._weigher.power(exponent), 0)

    def _starts(self) -> list[int]:
        """The number of the first vector of each segment."""
        starts = [0]
        for segment in self._segments:
            starts.append(starts[-1] + 1 + segment.pair)
        return starts[:-1]

    def _query(self, h: int, vector: int) -> Value:
        return self._queries + h * self._form.query + vector * self._lanes

    def _fetch(self, row: Value, count: int) -> None:
        """Ask for so many bytes from a row on."""
        for at in range(0, count, LINE):
            prefetch(row.cast(u8) + at)

    def _fetch_ahead(self, row: Value, first: int, count: int) -> None:
        """Ask for so many elements, from number `first` on, of a row that is read later."""
        element = FORMATS[self._form.cache].bytes
        self._fetch(row.cast(u8) + (first * element + _AHEAD), count * element)

    def _make_scores(self, keys: Value, count: Value) -> None:
        """The scores of all keys, for each query a row."""
        k, form, lanes = self._k, self._form, self._lanes
        # Of a query, sums of 1, 2, 4, … keys wait for their neighbours.
        room = max(1, (k.isa.vector_registers - 4) // lanes.bit_length())
        together = evenly(form.group, room)
        whole = count // lanes * lanes
        for j in k.range(0, whole, lanes):
            block = keys + j * form.row
            for first in range(0, form.group, together):
                some = range(first, min(first + together, form.group))
                self._score_block(block, some, j)
        for j in k.range(whole, count):
            row = keys + j * form.row
            self._note(row, j)
            for first in range(0, form.group, together):
                some = range(first, min(first + together, form.group))
                for h, vector in zip(some, self._products(row, some), strict=True):
                    total = across(vector, operator.add)
                    place = self._scores + h * self._stride + j
                    place.cast(element_of(total.type)).store(total)

    def _score_block(self, block: Value, some: range, j: Value) -> None:
        """The scores of `lanes` neighbours, from key `j` on."""
        waiting: list[list[tuple[int, Value]]] = [[] for _ in some]
        for i in range(self._lanes):
            row = block + i * self._form.row
            if not some.start:
                self._fetch_ahead(row, 0, self._form.head_dim)
                self._note(row, j + i)
            for stack, total in zip(waiting, self._products(row, some), strict=True):
                stack.append((0, total))
                while len(stack) > 1 and stack[-1][0] == stack[-2][0]:
                    (level, right), (_, left) = stack.pop(), stack.pop()
                    stack.append((level + 1, _paired(left, right, level)))
        for h, stack in zip(some, waiting, strict=True):
            total = stack[0][1]
            place = self._scores + h * self._stride + j
            place.cast(element_of(total.type)).store(total)

    def _products(self, row: Value, some: range) -> list[Value]:
        """Of a key and some queries, sums in each lane."""
        totals: dict[int, Value] = {}
        for segment, start in zip(self._segments, self._starts(), strict=True):
            for i, vector in enumerate(segment.of_cache(row)):
                for h in some:
                    q = self._query(h, start + i).load(self._lanes)
                    totals[h] = fma(q, vector, totals[h]) if h in totals else q * vector
        return [totals[h] for h in some]

    def _make_sums(self, values: Value, count: Value, part: Value) -> None:
        """Sums of values by weights, for each query a row."""
        k, form, registers = self._k, self._form, self._k.isa.vector_registers
        together = evenly(form.group, registers // 4)
        room = max(1, (registers - 2) // (together + 1))  # vectors of a value, and their sums
        tiles = self._tiles(room)
        groups = [range(first, min(first + together, form.group))
                  for first in range(0, form.group, together)]  # fmt: skip
        if len(tiles) * len(groups) == 1:
            self._sum(values, k.index(0), count, groups[0], tiles[0], part, False)
            return
        zeros = k.zeros(f32, self._lanes)
        for h, segment in product(range(form.group), self._segments):
            segment.store(part + h * form.part, [zeros] * (1 + segment.pair))
        for first in k.range(0, count, BLOCK):
            last = minimum(first + BLOCK, count)
            for some, tile in product(groups, tiles):
                self._sum(values, first, last, some, tile, part, True)

    def _tiles(self, room: int) -> list[list[_Segment]]:
        """Segments whose vectors registers hold together, at most so many or one segment."""
        counts = [1 + segment.pair for segment in self._segments]
        most = max(evenly(sum(counts), room), counts[0])
        tiles: list[list[_Segment]] = []
        for segment in self._segments:
            if not tiles or sum(1 + other.pair for other in [*tiles[-1], segment]) > most:
                tiles.append([])
            tiles[-1].append(segment)
        return tiles

    def _sum(
        self, values: Value, first: Value, last: Value, some: range, tile: list[_Segment],
        part: Value, again: bool,
    ) -> None:  # fmt: skip
        """Sums of some elements of values by the weights of some queries, to those that there are,
        if there are some (`again`)."""
        k, form, lanes = self._k, self._form, self._lanes
        with k.scope():
            rows = [part + h * form.part for h in some]
            sums = [
                [
                    [k.register(vector) for vector in segment.of_floats(row)] if again
                    else [k.register(k.zeros(f32, lanes)) for _ in range(1 + segment.pair)]
                    for segment in tile
                ]
                for row in rows
            ]  # fmt: skip
            for j in k.range(first, last):
                line = values + j * form.row
                if not some.start:
                    self._fetch_ahead(line, tile[0].at, sum(part.count for part in tile))
                vectors = [segment.of_cache(line) for segment in tile]
                for h, row in zip(some, sums, strict=True):
                    weight = (self._scores + h * self._stride + j).load().splat(lanes)
                    for registers, loaded in zip(row, vectors, strict=True):
                        for register, vector in zip(registers, loaded, strict=True):
                            register.value = fma(weight, vector, register.value)
            for target, row in zip(rows, sums, strict=True):
                for segment, registers in zip(tile, row, strict=True):
                    segment.store(target, [register.value for register in registers])


def evenly(count: int, room: int) -> int:
    """How many to take at a time, at most `room`, so that each time takes about as many."""
    return -(-count // -(-count // room))


def _paired(left: Value, right: Value, level: int) -> Value:
    """Sums of lanes of two vectors, which each hold the sums of 2^level keys: first of those within
    16 bytes, in which the keys come to lie beside each other, and then of these fours."""
    lanes = left.lanes
    if level == 0:
        low = [four + i + n for four in range(0, lanes, 4) for i in (0, 1) for n in (0, lanes)]
        high = [lane + 2 for lane in low]
    elif level == 1:
        low = [four + i + n for four in range(0, lanes, 4) for n in (0, lanes) for i in (0, 1)]
        high = [lane + 2 for lane in low]
    else:
        low = [four + i for four in range(0, 2 * lanes, 8) for i in range(4)]
        high = [lane + 4 for lane in low]
    return shuffle(left, right, tuple(low)) + shuffle(left, right, tuple(high))
