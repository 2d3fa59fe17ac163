"""Where the numbers of a row are: the greatest, and the first of them in order."""

from __future__ import annotations

from lowbit.isa.generic import maximum, minimum, select
from lowbit.isa.types import (
    Int,
    S64Pointer,
    Scalar,
    U8Pointer,
    Vector,
    element_of,
    f32,
    s32,
    s64,
    u32,
    u64,
)
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.rows.input_format import across
from lowbit.kernels.cpu.shared.formats import FORMATS, WHOLE
from lowbit.kernels.cpu.shared.functions import ordered_bits

# The place of the greatest number in each row.

_LANES = 16
_NUMBERS = 16384  # that an item reads, about
_PLACE_BITS = 32
_LAST_PLACE = (1 << _PLACE_BITS) - 1
_NAN_KEY, _LEAST_KEY = 2**31 - 1, -(2**31)


def argmax_block(count: int) -> int:
    """How many rows of so many numbers an item should have."""
    return max(1, _NUMBERS // max(1, count))


def ordered(value: Value) -> Value:
    """Numbers as s32, or where they are wider integers as s64, that order alike: −0 as 0, NaN above
    all."""
    element = element_of(value.type)
    if not element.is_float and element.kind != "bf":
        if element == u64:
            return (value ^ (1 << 63)).to(s64)
        return value.to(s64 if is_wide(element) else s32)
    number = value.to(f32)
    key = ordered_bits(number)
    return select(number.equals(number), key, key.machine.constant(_NAN_KEY, key.type))


def is_wide(element: Scalar) -> bool:
    """Whether s32 does not hold such integers."""
    return element.bits == 64 or element == u32


@kernel
def argmax(
    k: Builder, places: S64Pointer, x: U8Pointer, rows: Int, count: Int, block: Int, *, format: str
) -> None:
    """places[r] = where x[r, :count] is greatest, at first; where it is NaN, at first, if it is.

    x: [rows, count], contiguous, of this format, count from 1 to 2^31 − 1. block: rows of an item.
    """
    source = x.cast((FORMATS | WHOLE)[format])
    if is_wide(source.type.element):  # type: ignore[union-attr]
        _argmax_wide(k, places, source, rows, count, block)
        return
    numbers = k.local(s32, _LANES)
    for lane in range(_LANES):
        (numbers + lane).store(k.constant(lane, s32))
    whole = count // _LANES * _LANES
    for item in k.parallel((rows + (block - 1)) // block):
        for row in k.range(item * block, minimum((item + 1) * block, rows)):
            start = source + row * count
            with k.scope():
                best = k.register(k.constant(_LEAST_KEY, Vector(s32, _LANES)))
                place = k.register(numbers.load(_LANES))
                for at in k.range(0, whole, _LANES):
                    key = ordered((start + at).load(_LANES))
                    here = numbers.load(_LANES) + at.to(s32).splat(_LANES)
                    place.value = select(best.value < key, here, place.value)
                    best.value = maximum(key, best.value)
                # Of equal keys, the lower place makes the greater number.
                lanes = (best.value.to(s64) << _PLACE_BITS) | (_LAST_PLACE - place.value.to(s64))
                found = k.register(across(lanes, maximum))
                for at in k.range(whole, count):
                    key = ordered((start + at).load()).to(s64)
                    found.value = maximum((key << _PLACE_BITS) | (_LAST_PLACE - at), found.value)
                (places + row).store(_LAST_PLACE - (found.value & _LAST_PLACE))


def _argmax_wide(
    k: Builder, places: Value, source: Value, rows: Value, count: Value, block: Value
) -> None:
    """Of integers with keys of 64 bits, which leave no room for places: one after another."""
    for item in k.parallel((rows + (block - 1)) // block):
        for row in k.range(item * block, minimum((item + 1) * block, rows)):
            start = source + row * count
            best = k.register(ordered(start.load()))
            place = k.register(k.constant(0, s64))
            for at in k.range(1, count):
                key = ordered((start + at).load())
                later = best.value < key
                place.value = select(later, at, place.value)
                best.value = select(later, key, best.value)
            (places + row).store(place.value)


# The places of the first numbers of each row, in order.

ARRAYS = 4  # of scratch: keys and places, to merge from and to


@kernel
def sort(
    k: Builder,
    places: S64Pointer,
    x: U8Pointer,
    scratch: S64Pointer,
    rows: Int,
    count: Int,
    kept: Int,
    levels: Int,
    *,
    format: str,
    descending: bool,
) -> None:
    """places[r, :kept] = where the first numbers of x[r, :count] are, in order.

    Of equal numbers the lower place comes first; NaN is above all numbers, -0 equals 0. x: [rows,
    count], contiguous, of this format. levels: the least with 2^levels >= count.
    scratch: `ARRAYS` · count for each thread. Merge sort (Knuth, volume 3, section 5.2.4), of whose
    runs no more than `kept` numbers are merged: the others cannot be among the first.
    """
    source = x.cast((FORMATS | WHOLE)[format])
    own = scratch + k.thread() * (count * ARRAYS)
    for row in k.parallel(rows):
        start = source + row * count
        for at in k.range(0, count):
            key = ordered((start + at).load()).to(s64)
            (own + at).store(key ^ -1 if descending else key)
            (own + (count + at)).store(at)
        width = k.register(k.constant(1, s64))
        here = k.register(k.constant(0, s64))
        for _ in k.range(0, levels):
            there = count * 2 - here.value
            for pair in k.range(0, (count + (width.value * 2 - 1)) // (width.value * 2)):
                begin = pair * width.value * 2
                _merge(k, own + here.value, own + there, begin, width.value, count, kept)
            here.value = there
            width.value = width.value * 2
        for at in k.range(0, kept):
            (places + (row * kept + at)).store((own + (here.value + count + at)).load())


def _merge(
    k: Builder, source: Value, target: Value, begin: Value, width: Value, count: Value, kept: Value
) -> None:
    """Two neighbouring runs of keys, whose places lie `count` behind them, as one run."""
    middle = minimum(begin + width, count)
    ends = (
        minimum(begin + kept, middle),
        minimum(minimum(middle + kept, middle + width), count),
    )
    left, right = k.register(begin), k.register(middle)
    wanted = minimum(ends[0] - begin + (ends[1] - middle), kept)
    for at in k.range(0, wanted):
        # Where a run is at its end, what is read of it does not count.
        one = minimum(left.value, ends[0] - 1)
        other = select(right.value < ends[1], right.value, begin)
        first, second = (source + one).load(), (source + other).load()
        later = (left.value > ends[0] - 1) | ((right.value < ends[1]) & (second < first))
        taken = select(later, other, one)
        (target + (begin + at)).store(select(later, second, first))
        (target + (begin + count + at)).store((source + (taken + count)).load())
        step = select(later, k.constant(1, s64), k.constant(0, s64))
        right.value = right.value + step
        left.value = left.value + (k.constant(1, s64) - step)
