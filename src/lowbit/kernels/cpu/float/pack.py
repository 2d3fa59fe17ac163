"""Packing float operands into units: any strides in, one block or panel after another out."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.isa.generic import load_head, maximum, minimum, prefetch, shuffle
from lowbit.isa.types import u32
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.float.operand import Reader
from lowbit.kernels.cpu.shared.formats import transposed
from lowbit.kernels.cpu.shared.layout import LINE


@dataclass(frozen=True)
class Source:
    """One operand in memory: x counts its rows (left) or columns (right), `extent` of them.

    Strides count elements; `depth` is K; `along` as in Operand.
    """

    reader: Reader
    base: Value
    stride: Value
    x_stride: Value
    extent: Value
    depth: Value
    along: str

    def at(self, x: Value, unit: Value) -> Value:
        """Where a unit begins; an x beyond the extent stands for the last one."""
        inside = minimum(x, self.extent - 1)
        return self.base + (inside * self.x_stride + unit * self.reader.depth * self.stride)


@dataclass(frozen=True)
class Part:
    """What one item packs: `width` neighbours from `x` on, units from `first` to `last`.

    `target` is where unit 0 of the block or panel goes, as u32.
    """

    x: Value
    width: int
    first: Value
    last: Value
    target: Value


def pack_units(k: Builder, source: Source, part: Part, lanes: int) -> None:
    """Write [unit][width] u32, with zeros beyond K.

    Beyond the extent stands the last x again, or zero: it meets only outputs that do not exist.
    """
    reader, width = source.reader, part.width
    whole = source.depth // reader.depth
    end = minimum(part.last, whole)
    first = part.first
    if source.along == "x":
        first = _copy(k, source, part, lanes, end)
    elif source.along == "k":
        first = _transpose(k, source, part, lanes, end)

    def line(unit: Value, half: bool = False) -> None:
        for i in k.range(0, width):
            value = reader.one(source.at(part.x + i, unit), source.stride, half)
            (part.target + (unit * width + i)).store(value)

    for unit in k.range(first, end):
        line(unit)
    if reader.pair:
        for _ in k.when((whole < part.last) & (whole * 2 < source.depth)):
            line(whole, half=True)
    units = (source.depth + (reader.depth - 1)) // reader.depth
    for unit in k.range(maximum(units, part.first), part.last):
        for i in k.range(0, width):
            (part.target + (unit * width + i)).store(k.constant(0, u32))


def _copy(k: Builder, source: Source, part: Part, lanes: int, end: Value) -> Value:
    """Neighbours lie together: copy vectors of them. Returns the first unit that is left."""
    reader, width, stride = source.reader, part.width, source.stride
    step = lanes if width % lanes == 0 else width
    left = source.extent - part.x
    start = source.base + part.x
    done = k.register(part.first)
    for _ in k.when(left > width - 1):
        for unit in k.range(part.first, end):
            place = start + unit * reader.depth * stride
            for i in range(0, width, step):
                value = reader.across(place + i, stride, step)
                (part.target + (unit * width + i)).store(value)
        done.value = maximum(end, part.first)
    if step == lanes:
        for _ in k.when(left < width):
            for unit in k.range(part.first, end):
                place = start + unit * reader.depth * stride
                for i in k.range(0, width, step):
                    value = reader.across(place + i, stride, step, left - i)
                    (part.target + (unit * width + i)).store(value)
            done.value = maximum(end, part.first)
    return done.value


def _transpose(k: Builder, source: Source, part: Part, lanes: int, end: Value) -> Value:
    """Units of one x lie together: turn squares of them. Returns the first unit that is left."""
    width = part.width
    side = lanes
    while side // 2 >= width:
        side //= 2
    squares = (end - part.first) // side * side + part.first

    def square(unit: Value, i: Value | int, taken: int) -> None:
        columns = [source.reader.along(source.at(part.x + i + x, unit), side) for x in range(taken)]
        columns += columns[-1:] * (side - taken)
        for u, line in enumerate(transposed(columns)):
            part_of_it = shuffle(line, line, tuple(range(taken))) if taken < side else line
            (part.target + ((unit + u) * width + i)).store(part_of_it)

    for unit in k.range(part.first, squares, side):
        for i in k.range(0, width // side * side, side):
            square(unit, i, side)
        if width % side:
            square(unit, width // side * side, width % side)
    return squares


def copy_rows(
    k: Builder, source: Source, to: Source, block: Value, rows: int, units: tuple[Value, Value]
) -> None:
    """Copy a block of rows over units from, to, contiguous along K, to the begin of `to`, with
    zeros up to a whole cache line; and fetch the rows of the next block meanwhile."""
    (begin, end), depth, lanes = units, source.reader.depth, LINE // source.reader.bytes
    count = minimum(end * depth, source.depth) - begin * depth
    for row in range(rows):
        start, target = source.at(block * rows + row, begin), to.base + to.x_stride * row
        following = source.at((block + 1) * rows + row, begin)
        for at in k.range(0, count, lanes):
            prefetch(following + at)
            (target + at).store(load_head(start + at, count - at, lanes))


def pack_lines(k: Builder, source: Source, part: Part, units: int) -> None:
    """As `pack_units`, but `units` of a row follow each other: [unit / units][width][units] u32.

    First and last are multiples of `units`.
    """
    reader = source.reader
    whole = source.depth // reader.depth
    for first in k.range(part.first, part.last, units):
        for i in k.range(0, part.width):
            place = part.target + (first * part.width + i * units)
            start = source.at(part.x + i, first)
            here = k.register(k.index(0))
            for u in k.range(here.value, minimum(k.index(units), whole - first)):
                at = start + u * reader.depth * source.stride
                (place + u).store(reader.one(at, source.stride))
                here.value = u + 1
            for _ in k.when((here.value < units) & ((first + here.value) * 2 < source.depth)):
                at = start + here.value * 2 * source.stride
                (place + here.value).store(reader.one(at, source.stride, half=True))
                here.value = here.value + 1
            for u in k.range(here.value, k.index(units)):
                (place + u).store(k.constant(0, u32))
