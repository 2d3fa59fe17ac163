"""The place of the greatest number in each row."""

from __future__ import annotations

from lowbit.isa.generic import maximum, minimum, select
from lowbit.isa.types import (
    Int,
    S64Pointer,
    U8Pointer,
    Vector,
    element_of,
    f32,
    s32,
    s64,
    with_element,
)
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.rows.input_format import across
from lowbit.kernels.cpu.shared.formats import FORMATS

_LANES = 16
_NUMBERS = 16384  # that an item reads, about
_PLACE_BITS = 32
_LAST_PLACE = (1 << _PLACE_BITS) - 1
_NAN_KEY, _LEAST_KEY = 2**31 - 1, -(2**31)


def argmax_block(count: int) -> int:
    """How many rows of so many numbers an item should have."""
    return max(1, _NUMBERS // max(1, count))


def ordered(value: Value) -> Value:
    """Numbers as s32 that order alike: −0 as 0, NaN above all."""
    if not element_of(value.type).is_float and element_of(value.type).kind != "bf":
        return value.to(s32)
    number = value.to(f32)
    bits = (number + 0.0).bits(with_element(number.type, s32))
    key = select(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return select(number.equals(number), key, key.machine.constant(_NAN_KEY, key.type))


@kernel
def argmax(
    k: Builder, places: S64Pointer, x: U8Pointer, rows: Int, count: Int, block: Int, *, format: str
) -> None:
    """places[r] = where x[r, :count] is greatest, at first; where it is NaN, at first, if it is.

    x: [rows, count], contiguous, of this format, count from 1 to 2^31 − 1. block: rows of an item.
    """
    source = x.cast(FORMATS[format])
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
