"""Attention over a cache of keys and values, which rows of new tokens are added to.

A row of the cache belongs to a head of keys and a position: cache[slot, 2, head, position, :], keys
and then values. A row of bytes ends with its scale, a float32: max |x| / 127.

`cached_attention` serves steps: each row is the newest token of a sequence. The keys of a sequence
are cut into chunks, so that one long sequence keeps all threads busy:

    append     queries and keys are turned by their position; keys and values go to the cache
    attend     of each row, head of keys and chunk: scores, weights, sums of values
    combine    the chunks of a row: each is scaled to the greatest score of all

`append_rows` is the first part alone, for chunks of a prompt, whose queries are as many as tiles
want: then `attention` follows, with the number of keys in the table that is made here.

Sources: Su et al. 2021, arXiv:2104.09864 (positions); Dao et al. 2023, Flash-Decoding (chunks).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit.isa.generic import extract, fma, maximum, minimum
from lowbit.isa.types import F32Pointer, Int, S64Pointer, U8Pointer, Vector, f32, s8, s32
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.attention.plan import TABLE_LENGTH, Geometry
from lowbit.kernels.cpu.attention.weights import Weigher, edge_of, narrowed
from lowbit.kernels.cpu.rows.input_format import across
from lowbit.kernels.cpu.shared.formats import FORMATS
from lowbit.kernels.cpu.shared.functions import rounded

CHUNK = 512  # keys of an item: of 128 elements in float32, they and their values fill half an L2
SCALE_BYTES = 4  # of a row of bytes, behind them
_PAD = 16  # elements behind a row of scores or sums, at least a vector
_LEAST = 2.0**-100  # what is less in a row of bytes than this becomes zero
_KEYS, _DIAGONAL = (Geometry._fields.index(name) for name in ("keys", "diagonal"))


class CachedForm(NamedTuple):
    """What is static. It keys the code.

    cache: "f32", "bf16" or "s8". head_dim: of queries, keys and values; `rotated` of them are
    turned by their position, an even number. group: how many heads of queries share one
    of keys. window, cap: of `AttentionForm`.
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
        return self.head_dim + _PAD

    @property
    def scores(self) -> int:
        """Elements of a thread's scratch."""
        return self.group * (CHUNK + _PAD)


def refusal(form: CachedForm) -> str | None:
    """Why the kernels do not serve a form; None if they do."""
    if form.cache not in ("f32", "bf16", "s8"):
        return f"a cache is of float32, bfloat16 or int8, not of {form.cache}"
    if form.head_dim % 8 or form.rotated % 16 or form.rotated > form.head_dim:
        return (
            f"heads have a multiple of 8 elements, of which a multiple of 16 are turned: "
            f"not {form.head_dim} and {form.rotated}"
        )
    return None


def rotation_table(
    positions: int, frequencies: npt.NDArray[np.float64], factor: float = 1.0
) -> npt.NDArray[np.float32]:
    """float32 [positions, 2, n]: factor · cos and sin of position · frequency."""
    angles = np.arange(positions)[:, None] * frequencies
    return (np.stack([np.cos(angles), np.sin(angles)], 1) * factor).astype(np.float32)


@dataclass(frozen=True)
class _Rows:
    """New rows of queries, keys and values, and where they go."""

    k: Builder
    form: CachedForm
    sources: Sequence[tuple[Value, Value]]  # q, key and value: where, and from row to row
    rotation: Value
    positions: Value
    slots: Value | None
    cache: Value
    heads: Value  # of keys
    capacity: Value
    slot_stride: Value

    def keys(self, row: Value, head: Value) -> Value:
        """Where the keys of a row's sequence begin in the cache."""
        place = self.cache.cast(FORMATS[self.form.cache]) + head * self.capacity * self.form.row
        if self.slots is None:
            return place
        return place + (self.slots + row).load() * self.slot_stride

    @property
    def values_behind(self) -> Value:
        """From keys to their values, in elements."""
        return self.heads * self.capacity * self.form.row

    def append(self, row: Value, turned: Value) -> None:
        """Bring a row to the cache, and its queries, turned, to [heads · group, head_dim]."""
        k, size, group = self.k, self.form.head_dim, self.form.group
        position = (self.positions + row).load()
        angles = self.rotation + position * self.form.rotated
        q, key, value = (place + row * stride for place, stride in self.sources)
        for head in k.range(0, self.heads * group):
            self._turn(q + head * size, turned + head * size, angles)
        for head in k.range(0, self.heads):
            line = self.keys(row, head) + position * self.form.row
            if self.form.cache == "s8":
                whole = k.local(f32, size)
                self._turn(key + head * size, whole, angles)
                self._quantize(whole, line)
                self._quantize(value + head * size, line + self.values_behind)
                continue
            self._turn(key + head * size, line, angles)
            for at, lanes in self.pieces(size):
                self._store((value + head * size + at).load(lanes), line + self.values_behind + at)

    def _turn(self, source: Value, target: Value, angles: Value) -> None:
        half = self.form.rotated // 2
        for at, lanes in self.pieces(half):
            x, y = (source + at).load(lanes), (source + half + at).load(lanes)
            cos, sin = (angles + at).load(lanes), (angles + half + at).load(lanes)
            self._store(x * cos - y * sin, target + at)
            self._store(y * cos + x * sin, target + half + at)
        for at, lanes in self.pieces(self.form.head_dim - 2 * half):
            self._store((source + 2 * half + at).load(lanes), target + 2 * half + at)

    def _quantize(self, source: Value, target: Value) -> None:
        """A row as bytes, and its scale behind them; NaN and infinity in it make the scale one."""
        size, most = self.form.head_dim, self.k.constant(0, s32)
        for at, lanes in self.pieces(size):
            bits = (source + at).load(lanes).bits(Vector(s32, lanes)) & 0x7FFFFFFF
            most = maximum(across(bits, maximum), most)  # NaN has more than all numbers
        greatest = most.bits(f32)
        inverse = 127.0 / maximum(self.k.constant(_LEAST, f32), greatest)
        for at, lanes in self.pieces(size):
            steps = (source + at).load(lanes) * inverse.splat(lanes)
            (target + at).store(rounded(steps).to(s8))
        (target + size).cast(f32).store(greatest * (1 / 127))

    def _store(self, value: Value, place: Value) -> None:
        wide = place.type.element == f32  # type: ignore[union-attr]
        place.store(value if wide else narrowed(self.k, value))

    def load(self, place: Value, lanes: int) -> Value:
        """Elements of a row of the cache, as float32 without their scale."""
        value = place.load(lanes)
        return (value.to(s32) if self.form.cache == "s8" else value).to(f32)

    def scale(self, row: Value) -> Value | None:
        """Of a row of bytes; None: there is none."""
        return (row + self.form.head_dim).cast(f32).load() if self.form.cache == "s8" else None

    def pieces(self, size: int) -> Iterator[tuple[int, int]]:
        """Where vectors begin in so many elements, and how wide they are."""
        lanes, at = self.k.isa.vector_bytes // 4, 0
        while at < size:
            while lanes > size - at:
                lanes //= 2
            yield at, lanes
            at += lanes


@kernel
def append_rows(
    k: Builder,
    turned: U8Pointer,
    q: F32Pointer,
    key: F32Pointer,
    value: F32Pointer,
    rotation: F32Pointer,
    positions: S64Pointer,
    cache: U8Pointer,
    table: S64Pointer,
    geometry: S64Pointer,
    q_stride: Int,
    k_stride: Int,
    v_stride: Int,
    rows: Int,
    heads: Int,
    capacity: Int,
    *,
    form: CachedForm,
) -> None:
    """Rows of one sequence at neighbouring positions go to the cache, [2, heads, capacity, row].

    q, key, value: float32 [rows, heads, size], rows as many elements apart as is said; turned: the
    queries, dense, in the cache's format, or float32 if that is bytes. rotation: of
    `rotation_table`. positions: s64 [rows]. geometry is `table`, of
    `plan_attention`, with the keys that there are then.
    """
    none = k.index(0)
    new = _Rows(k, form, [(q, q_stride), (key, k_stride), (value, v_stride)], rotation, positions,
                None, cache, heads, capacity, none)  # fmt: skip
    for row in k.parallel(rows):
        queries = turned.cast(f32 if form.cache == "s8" else FORMATS[form.cache])
        new.append(row, queries + row * (heads * (form.group * form.head_dim)))
        for _ in k.when(row.equals(0)):
            for i in range(TABLE_LENGTH):
                (geometry + i).store((table + i).load())
            first = positions.load()
            (geometry + _KEYS).store(first + rows)
            (geometry + _DIAGONAL).store(first)


@kernel
def cached_attention(
    k: Builder,
    out: F32Pointer,
    turned: F32Pointer,
    q: F32Pointer,
    key: F32Pointer,
    value: F32Pointer,
    rotation: F32Pointer,
    positions: S64Pointer,
    slots: S64Pointer,
    cache: U8Pointer,
    parameters: F32Pointer,
    scratch: F32Pointer,
    parts: F32Pointer,
    q_stride: Int,
    k_stride: Int,
    v_stride: Int,
    rows: Int,
    heads: Int,
    capacity: Int,
    slot_stride: Int,
    chunks: Int,
    *,
    form: CachedForm,
) -> None:
    """out[row] = the attention of a row's queries to the keys of its sequence, up to its own.

    As `append_rows`, but each row is the newest of a sequence: its keys begin slots[row] ·
    slot_stride elements further. out: float32 [rows, heads · group, size]. parameters: what scores
    are multiplied by before 2 is raised to them. scratch: float32 [threads, form.scores]; parts:
    float32 [rows, heads, chunks, group, form.part], where `chunks` of CHUNK keys hold `capacity`,
    or the window.
    """
    new = _Rows(k, form, [(q, q_stride), (key, k_stride), (value, v_stride)], rotation, positions,
                slots, cache, heads, capacity, slot_stride)  # fmt: skip
    work = _Chunks(new, scratch + k.thread() * form.scores, parameters)
    group, size = form.group, form.head_dim
    for row in k.parallel(rows):
        new.append(row, turned + row * (heads * (group * size)))
    for item in k.parallel(rows * heads * chunks):
        chunk, pair = item % chunks, item // chunks
        row, head = pair // heads, pair % heads
        position, base = (positions + row).load(), k.index(0)
        left = position + 1 - chunk * CHUNK
        if form.window:
            base = work.first(position)
            left = left - base
        for _ in k.when(left > 0):
            keys = new.keys(row, head) + chunk * (CHUNK * form.row)
            keys = keys + base * form.row if form.window else keys
            work.attend(turned + pair * (group * size), keys, minimum(left, k.index(CHUNK)),
                        parts + item * (group * form.part))  # fmt: skip
    for pair in k.parallel(rows * heads):
        position = (positions + pair // heads).load()
        if form.window:
            position = position - work.first(position)
        used = (position + CHUNK) // CHUNK
        for h in range(group):
            first = parts + pair * chunks * (group * form.part) + h * form.part
            work.combine(first, used, out + (pair * group + h) * size)


class _Chunks:
    """What is done with chunks of keys."""

    def __init__(self, rows: _Rows, scores: Value, parameters: Value) -> None:
        k = self._k = rows.k
        self._rows, self._form, self._scores = rows, rows.form, scores
        lanes = self._lanes = k.isa.vector_bytes // 4
        edge = edge_of(k, lanes)
        self._weigher = Weigher.of(k, lanes, False, parameters.load(), edge, rows.form.cap)
        self._pieces = list(rows.pieces(self._form.head_dim))
        self._stride = CHUNK + _PAD
        # Sums that registers hold beside what they are made of.
        self._room = max(1, k.isa.vector_registers // 2 - 1)

    def first(self, position: Value) -> Value:
        """The first key of a window."""
        return maximum(position + (1 - self._form.window), self._k.index(0))

    def attend(self, queries: Value, keys: Value, count: Value, part: Value) -> None:
        """A chunk of so many keys, for the queries that share them."""
        k, form = self._k, self._form
        for first in range(0, form.group, self._room):
            some = range(first, min(first + self._room, form.group))
            for j in k.range(0, count):
                self._score(queries, keys + j * form.row, some, self._scores + j)
        for h in range(form.group):
            scores, end = self._scores + h * self._stride, part + h * form.part + form.head_dim
            self._weigher.cap(scores, 0, count)
            shift = self._weigher.shift(scores, count, None, None)
            end.store(shift)
            total = self._weigher.weigh(scores, count, count, shift, False)
            (end + 1).store(across(total, operator.add))
        values = keys + self._rows.values_behind
        vectors = min(len(self._pieces), self._room)
        together = max(1, self._room // vectors)
        for first in range(0, form.group, together):
            some = range(first, min(first + together, form.group))
            for at in range(0, len(self._pieces), vectors):
                self._sum(values, count, some, self._pieces[at : at + vectors], part)

    def _score(self, queries: Value, key: Value, some: range, target: Value) -> None:
        """The scores of a key."""
        size, totals = self._form.head_dim, dict[int, Value]()
        ends: dict[int, list[Value]] = {h: [] for h in some}
        for at, lanes in self._pieces:
            part = self._rows.load(key + at, lanes)
            for h in some:
                q = (queries + h * size + at).load(lanes)
                if lanes < self._lanes:
                    ends[h].append(across(q * part, operator.add))
                else:
                    totals[h] = fma(q, part, totals[h]) if h in totals else q * part
        scale = self._rows.scale(key)
        for h in some:
            sums = [across(totals[h], operator.add)] if h in totals else []
            total, *others = sums + ends[h]
            for other in others:
                total = total + other
            total = total if scale is None else total * scale
            (target + h * self._stride).store(total)

    def _sum(
        self, values: Value, count: Value, some: range, pieces: list[tuple[int, int]], part: Value
    ) -> None:
        """Sums of values by the weights of some heads."""
        k, form = self._k, self._form
        with k.scope():
            sums = [[k.register(k.zeros(f32, lanes)) for _, lanes in pieces] for _ in some]
            for j in k.range(0, count):
                line = values + j * form.row
                parts = [self._rows.load(line + at, lanes) for at, lanes in pieces]
                scale = self._rows.scale(line)
                for h, row in zip(some, sums, strict=True):
                    weight = (self._scores + h * self._stride + j).load()
                    weight = weight if scale is None else weight * scale
                    for total, value, (_, lanes) in zip(row, parts, pieces, strict=True):
                        total.value = fma(weight.splat(lanes), value, total.value)
            for h, row in zip(some, sums, strict=True):
                for total, (at, _) in zip(row, pieces, strict=True):
                    (part + h * form.part + at).store(total.value)

    def combine(self, first: Value, used: Value, out: Value) -> None:
        """Sums of so many chunks become a row of the output."""
        k, form = self._k, self._form
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
            for begin in range(0, len(self._pieces), self._room):
                pieces = self._pieces[begin : begin + self._room]
                with k.scope():
                    sums = [k.register(k.zeros(f32, lanes)) for _, lanes in pieces]
                    for c in k.range(0, used):
                        place = first + c * step
                        share = self._share(least.value, place + size)
                        for one, (at, lanes) in zip(sums, pieces, strict=True):
                            some = (place + at).load(lanes)
                            one.value = fma(share.splat(lanes), some, one.value)
                    for one, (at, lanes) in zip(sums, pieces, strict=True):
                        (out + at).store(one.value * inverse.splat(lanes))

    def _share(self, least: Value, place: Value) -> Value:
        """What the sums of a chunk are multiplied by, of the shift that is here."""
        exponent = (least - place.load()).splat(self._lanes)
        return extract(self._weigher.power(exponent), 0)
