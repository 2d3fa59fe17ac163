"""The places of the first numbers of each row, in order."""

from __future__ import annotations

from lowbit.isa.generic import minimum, select
from lowbit.isa.types import Int, S64Pointer, U8Pointer, s64
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.shared.formats import FORMATS, WIDE
from lowbit.kernels.cpu.tensors.argmax import ordered

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
    count], contiguous, of this format, which may be s64. levels: the least with 2^levels >= count.
    scratch: `ARRAYS` · count for each thread. Merge sort (Knuth, volume 3, section 5.2.4), of whose
    runs no more than `kept` numbers are merged: the others cannot be among the first.
    """
    source = x.cast((FORMATS | WIDE)[format])
    own = scratch + k.thread() * (count * ARRAYS)
    for row in k.parallel(rows):
        start = source + row * count
        for at in k.range(0, count):
            number = (start + at).load()
            key = number if format == "s64" else ordered(number).to(s64)
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
