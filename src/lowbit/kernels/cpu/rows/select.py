"""The greatest numbers of a row, and where they are: kept in a heap while rows pass by. And marks
of what may be among them.

A number and its place make one 64-bit key, so that keys order as (greater number, lower place
first) do:

    | float32, its bits ordered as integers | 2^32 - 1 - place |

A row's heap holds the `count` greatest keys so far, the least of them on top (each element is at
most those at 2i + 1 and 2i + 2). Sixty-four numbers at a time are compared with the top; hardly any
pass, so that a row is read about as fast as memory gives it.
"""

from __future__ import annotations

from lowbit.isa.generic import maximum, minimum, select
from lowbit.isa.types import F32Pointer, Int, S64Pointer, U8Pointer, s64, u8
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.rows.input_format import across
from lowbit.kernels.cpu.shared.functions import ordered_bits

_LANES, _VECTORS = 16, 4
_BLOCK = _LANES * _VECTORS  # numbers that are compared together
_PLACE_BITS = 32
_WORD = 8  # marks that are looked at together
LAST_PLACE = (1 << _PLACE_BITS) - 1
EMPTY = -(1 << 63)  # less than any key


def _key(ordered: Value, place: Value) -> Value:
    return (ordered.to(s64) << _PLACE_BITS) | (LAST_PLACE - place)


def _greatest(vectors: list[Value]) -> Value:
    """The greatest lane of them all."""
    while len(vectors) > 1:
        vectors = [maximum(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return across(vectors[0], maximum)


@kernel
def keep_greatest(
    k: Builder,
    numbers: F32Pointer,
    stride: Int,
    width: Int,
    base: Int,
    heaps: S64Pointer,
    count: Int,
    levels: Int,
    rows: Int,
) -> None:
    """Let each of `rows` rows of `width` numbers, `stride` apart, pass by its heap.

    The first number of a row is at place `base`; places are below 2^32. heaps: s64 [rows, count],
    count at least 1, at first all `EMPTY`. levels: of a heap, at least the bits of `count`. No
    number may be NaN.
    """
    for row in k.parallel(rows):
        source, heap = numbers + row * stride, heaps + row * count

        def offer(at: Value, source: Value = source, heap: Value = heap) -> None:
            key = _key(ordered_bits((source + at).load()), base + at)
            for _ in k.when(heap.load() < key):
                _replace_top(k, heap, count, levels, key)

        whole = width // _BLOCK * _BLOCK
        for first in k.range(0, whole, _BLOCK):
            loaded = [(source + (first + _LANES * v)).load(_LANES) for v in range(_VECTORS)]
            bound = _key(_greatest([ordered_bits(v) for v in loaded]), base + first)
            for _ in k.when(heap.load() < bound):
                for at in k.range(first, first + _BLOCK):
                    offer(at)
        for at in k.range(whole, width):
            offer(at)


@kernel
def mark(k: Builder, places: S64Pointer, count: Int, marks: U8Pointer, end: Int) -> None:
    """marks[place] = 1 for each of `count` places from 0 on and below `end`; marks[end] is written
    for the others."""
    for i in k.range(0, count):
        place = (places + i).load()
        inside = (place > -1) & (place < end)
        (marks + select(inside, place, end)).store(k.constant(1, u8))


@kernel
def marked(k: Builder, marks: S64Pointer, count: Int, places: S64Pointer, room: Int) -> None:
    """The first `room` places of marks, ascending: of bytes 0 and 1, `count` a multiple of 8.

    places: s64 [room + 1], of which the last one, and what is behind the places, has no meaning.
    """
    found = k.register(k.index(0))
    for first in k.range(0, count, _WORD):
        word = (marks + first // _WORD).load()
        for _ in k.when(word.equals(0).equals(0)):
            for byte in range(_WORD):  # each is written; the next one overwrites what is none
                (places + minimum(found.value, room)).store(first + byte)
                found.value = found.value + ((word >> 8 * byte) & 1)


def _replace_top(k: Builder, heap: Value, count: Value, levels: Value, key: Value) -> None:
    """Let `key` sink from the top to where no child is less."""
    hole = k.register(k.index(0))
    for _ in k.range(0, levels):
        left = hole.value * 2 + 1
        for _ in k.when(left < count):
            right = minimum(left + 1, count - 1)
            child = select((heap + right).load() < (heap + left).load(), right, left)
            for _ in k.when((heap + child).load() < key):
                (heap + hole.value).store((heap + child).load())
                hole.value = child
    (heap + hole.value).store(key)
