"""Attention over a cache of keys and values, which rows of new tokens are added to.

A row of the cache belongs to a head of keys and a position: cache[slot, 2, head, position, :], keys
and then values. A row of bytes ends with its scale, a float32: max |x| / 127.

`cached_attention` serves steps: each row is the newest token of a sequence. The keys of a sequence
are cut into chunks, so that one long sequence keeps all threads busy:

    attend     of each row, head of keys and chunk: queries are turned by their position, and in the
               last chunk the key, which goes to the cache with its value; scores, weights, sums
    combine    the chunks of a row: each is scaled to the greatest score of all

`append_rows` brings chunks of a prompt to the cache, whose queries are as many as tiles want: then
`attention` follows, with the number of keys in the table that is made here.

Sources: Su et al. 2021, arXiv:2104.09864 (positions); Dao et al. 2023, Flash-Decoding (chunks).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lowbit.isa.generic import maximum, minimum, select
from lowbit.isa.types import F32Pointer, Int, S64Pointer, U8Pointer, Vector, f32, s8, s32
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.attention.byte_chunks import ByteChunks
from lowbit.kernels.cpu.attention.chunks import CHUNK, CachedForm, Chunks
from lowbit.kernels.cpu.attention.plan import TABLE_LENGTH, Geometry
from lowbit.kernels.cpu.attention.weights import narrowed
from lowbit.kernels.cpu.rows.input_format import across
from lowbit.kernels.cpu.shared.formats import FORMATS
from lowbit.kernels.cpu.shared.functions import rounded

_LEAST = 2.0**-100  # what is less in a row of bytes than this becomes zero
_KEYS, _DIAGONAL = (Geometry._fields.index(name) for name in ("keys", "diagonal"))


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

    def turn(self, row: Value, head: Value, turned: Value) -> None:
        """Bring a row's queries for a head of keys, turned, to [group, head_dim]."""
        size, group = self.form.head_dim, self.form.group
        q, stride = self.sources[0]
        for h in range(group):
            source = q + row * stride + (head * group + h) * size
            self._turn(source, turned + h * size, self._angles(row))

    def append(self, row: Value, head: Value) -> None:
        """Bring a head's key, turned, and its value to the cache."""
        k, size = self.k, self.form.head_dim
        key, value = (place + row * stride + head * size for place, stride in self.sources[1:])
        line = self.keys(row, head) + (self.positions + row).load() * self.form.row
        if self.form.cache == "s8":
            whole = k.local(f32, size)
            self._turn(key, whole, self._angles(row))
            self._quantize(whole, line)
            self._quantize(value, line + self.values_behind)
            return
        self._turn(key, line, self._angles(row))
        for at, lanes in self.pieces(size):
            self._store((value + at).load(lanes), line + self.values_behind + at)

    def _angles(self, row: Value) -> Value:
        return self.rotation + (self.positions + row).load() * self.form.rotated

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
    k: Builder, turned: U8Pointer, q: F32Pointer, key: F32Pointer, value: F32Pointer,
    rotation: F32Pointer, positions: S64Pointer, cache: U8Pointer, table: S64Pointer,
    geometry: S64Pointer, q_stride: Int, k_stride: Int, v_stride: Int, rows: Int, heads: Int,
    capacity: Int,
    *, form: CachedForm,
) -> None:  # fmt: skip
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
        for head in k.range(0, heads):
            pair = row * heads + head
            new.turn(row, head, queries + pair * (form.group * form.head_dim))
            new.append(row, head)
        for _ in k.when(row.equals(0)):
            for i in range(TABLE_LENGTH):
                (geometry + i).store((table + i).load())
            first = positions.load()
            (geometry + _KEYS).store(first + rows)
            (geometry + _DIAGONAL).store(first)


@kernel
def cached_attention(
    k: Builder, out: F32Pointer, q: F32Pointer, key: F32Pointer, value: F32Pointer,
    rotation: F32Pointer, positions: S64Pointer, slots: S64Pointer, cache: U8Pointer,
    parameters: F32Pointer, scratch: F32Pointer, parts: F32Pointer, q_stride: Int, k_stride: Int,
    v_stride: Int, rows: Int, heads: Int, capacity: Int, slot_stride: Int, chunks: Int,
    *, form: CachedForm,
) -> None:  # fmt: skip
    """out[row] = the attention of a row's queries to the keys of its sequence, up to its own.

    As `append_rows`, but each row is the newest of a sequence, whose keys begin slots[row] ·
    slot_stride elements further. out [rows, heads · group, size], scratch [threads, form.scores],
    parts [rows, heads, chunks, group, form.part]: float32; `chunks` of CHUNK keys hold `capacity`,
    or the window. parameters: of `attention_parameters`.
    """
    sources = [(q, q_stride), (key, k_stride), (value, v_stride)]
    new = _Rows(k, form, sources, rotation, positions, slots, cache, heads, capacity, slot_stride)
    chunks_of = ByteChunks if form.cache == "s8" else Chunks
    work = chunks_of(k, form, new.values_behind, scratch + k.thread() * form.scores, parameters)
    group, size, turned = form.group, form.head_dim, k.local(f32, form.group * form.head_dim)

    def combine(item: Value, pair: Value, used: Value) -> None:
        for h in range(group):
            place, target = parts + (item * group + h) * form.part, out + (pair * group + h) * size
            work.combine(place, used, target)

    for item in k.parallel(rows * heads * chunks):
        chunk, pair = item % chunks, item // chunks
        row, head = pair // heads, pair % heads
        base, keys_of_row = _window(positions, row, form)
        left = keys_of_row - chunk * CHUNK
        for _ in k.when(left > 0):
            new.turn(row, head, turned)
            for _ in k.when(left < CHUNK + 1):
                new.append(row, head)
            keys = new.keys(row, head) + (chunk * CHUNK + base) * form.row
            count, part = minimum(left, k.index(CHUNK)), parts + item * (group * form.part)
            work.attend(turned, keys, count, part)
            for _ in k.when(keys_of_row < CHUNK + 1):
                combine(item, pair, k.index(1))
    for pair in k.parallel(select(chunks > 1, rows * heads, k.index(0))):
        used = (_window(positions, pair // heads, form)[1] + CHUNK - 1) // CHUNK
        for _ in k.when(used > 1):
            combine(pair * chunks, pair, used)


def _window(positions: Value, row: Value, form: CachedForm) -> tuple[Value, Value]:
    """The first key that a row attends to, and how many."""
    keys = (positions + row).load() + 1
    first = maximum(keys - form.window, keys * 0) if form.window else keys * 0
    return first, keys - first
